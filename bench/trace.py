"""Request traces: one JSON object a line."""

from pathlib import Path

import msgspec

from common.errors import ConfigError


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace.

    t:         arrival, seconds since the trace began
    hash_ids:  one for each `block` tokens of the prompt: equal ids are equal tokens. What they do not cover is unique
    session:   of which conversation; carried into the results
    """

    t: float
    num_input: int = msgspec.field(name="in")
    num_output: int = msgspec.field(name="out")
    session: str = ""
    block: int = 0
    hash_ids: tuple[int, ...] = ()


def read_trace(path: str) -> list[TraceRow]:
    """The rows in order of arrival. Raises: ConfigError naming the line."""
    rows = [_row(path, number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    if not rows:
        raise ConfigError(f"--trace: got {path} without a row")
    return sorted(rows, key=lambda row: row.t)


def _lines(path: str) -> list[bytes]:
    try:
        return Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace: cannot read {path}: {error.strerror}") from error


def _row(path: str, number: int, line: bytes) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=TraceRow)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--trace: {path}, line {number}: {error}") from error
    if row.t < 0 or row.num_input < 1 or row.num_output < 1:
        raise ConfigError(f"--trace: {path}, line {number}: wanted t at least 0, in and out at least 1")
    if row.hash_ids and (row.block < 1 or min(row.hash_ids) < 0):
        raise ConfigError(f"--trace: {path}, line {number}: hash_ids need `block`, and are at least 0")
    return row
