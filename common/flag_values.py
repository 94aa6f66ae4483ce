"""Values of options as text: parsed from the command line, and written back to it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType

ByteSize = NewType("ByteSize", int)
"""A number of bytes; on the command line also `512MB`, `2GiB`."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_EXPONENT = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of option. parse: text to value; ValueError for what is no `noun`."""

    noun: str
    metavar: str
    parse: Callable[[str], object]


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _parse_size(text: str) -> ByteSize:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    number, prefix, binary = match.groups()
    if binary and not prefix:
        raise ValueError(text)
    return ByteSize(int(float(number) * (1024 if binary else 1000) ** _EXPONENT[prefix.upper()]))


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(item for item in (part.strip() for part in text.split(",")) if item)


KINDS: dict[object, Kind] = {
    str: Kind("text", "TEXT", str),
    int: Kind("a whole number", "N", int),
    float: Kind("a number", "X", _parse_float),
    ByteSize: Kind("a size such as 512MB or 2GiB", "SIZE", _parse_size),
    tuple[str, ...]: Kind("a comma-separated list", "A,B", _parse_list),
}


def show_size(size: int) -> str:
    """With the largest binary unit that divides it."""
    for prefix, exponent in (("G", 3), ("M", 2), ("K", 1)):
        if size % 1024**exponent == 0:
            return f"{size // 1024**exponent}{prefix}iB"
    return str(size)


def to_text(value: object) -> str:
    """A value as it would be written on the command line."""
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
