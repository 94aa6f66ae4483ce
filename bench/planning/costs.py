"""What steps and handoffs cost: times as a sum over few features, fitted to what was measured. Pure but for reading."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np

from common.engine.step import StepPlan
from common.errors import ConfigError

_FEW_ROWS = 4
"""Sequences of a decode step up to which reading the weights hides the products; see docs/performance.md, Planning."""


class _Point(msgspec.Struct):
    num_sequences: int
    num_tokens: int
    num_pairs: int
    times_s: list[float]


class _Curve(msgspec.Struct):
    name: str
    points: list[_Point]


class _Steps(msgspec.Struct):
    curves: list[_Curve]


class _Handoffs(msgspec.Struct):
    transport: str
    num_tokens: int
    times_s: list[float]


class _HandoffReport(msgspec.Struct):
    handoffs: list[_Handoffs]


_Report = TypeVar("_Report", _Steps, _HandoffReport)


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds: the sum of coefficients times features, none of them negative.

    errors: of each point that it was fitted to, as a share of what was measured
    """

    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    errors: tuple[float, ...]

    def seconds(self, features: Sequence[float]) -> float:
        return sum(each * feature for each, feature in zip(self.coefficients, features, strict=True))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of a worker that computes on some cores."""

    prompt: Fit
    decode: Fit

    def prompt_s(self, plan: StepPlan) -> float:
        return self.prompt.seconds(_prompt_features(plan.num_tokens, plan.num_pairs))

    def decode_s(self, plan: StepPlan) -> float:
        return self.decode.seconds(_decode_features(len(plan.sequences), plan.num_pairs))


PROMPT_FEATURES = ("step", "token", "pair of tokens")
DECODE_FEATURES = ("step", "sequence", f"sequence beyond {_FEW_ROWS}", "token of context")
HANDOFF_FEATURES = ("handoff", "token")


def _prompt_features(num_tokens: int, num_pairs: int) -> tuple[float, ...]:
    return 1, num_tokens, num_pairs


def _decode_features(num_sequences: int, num_pairs: int) -> tuple[float, ...]:
    return 1, num_sequences, max(0, num_sequences - _FEW_ROWS), num_pairs


def read_step_costs(flag: str, paths: Sequence[str]) -> StepCosts:
    """From the curves in several results of `baton bench steps`. flag: that named the files. Raises: ConfigError."""
    curves = [curve for path in paths for curve in _read(flag, path, _Steps).curves]
    prompts = [point for curve in curves if curve.name == "prompt" for point in curve.points]
    steps = [point for curve in curves if curve.name != "prompt" for point in curve.points]
    if len(prompts) < len(PROMPT_FEATURES) or len(steps) < len(DECODE_FEATURES):
        got = ", ".join(paths) or "no file"
        raise ConfigError(f"{flag}: wanted all curves of `baton bench steps`, with several points each, got {got}")
    return StepCosts(
        prompt=fit_times(
            PROMPT_FEATURES,
            [_prompt_features(point.num_tokens, point.num_pairs) for point in prompts],
            [median(point.times_s) for point in prompts],
        ),
        decode=fit_times(
            DECODE_FEATURES,
            [_decode_features(point.num_sequences, point.num_pairs) for point in steps],
            [median(point.times_s) for point in steps],
        ),
    )


def read_handoff_costs(path: str, transport: str) -> Fit:
    """From the results of `baton bench handoff`: by tokens. Raises: ConfigError."""
    if not path:
        raise ConfigError("--handoffs: wanted a file of results, got none")
    points = [each for each in _read("--handoffs", path, _HandoffReport).handoffs if each.transport == transport]
    if len(points) < len(HANDOFF_FEATURES):
        raise ConfigError(f"--handoffs: wanted handoffs over {transport} of several lengths, got {path}")
    rows = [(1, point.num_tokens) for point in points]
    return fit_times(HANDOFF_FEATURES, rows, [median(point.times_s) for point in points])


def fit_times(names: tuple[str, ...], rows: Sequence[Sequence[float]], times_s: Sequence[float]) -> Fit:
    """Least squares of relative errors, with no coefficient below zero.

    Tries every set of features and takes the best one whose coefficients are all positive: that is exact, and quick
    for as few features as a step has.
    rows: the features of each time
    """
    relative = np.array(rows, dtype=float) / np.array(times_s)[:, None]
    columns = range(len(names))
    best = np.zeros(len(names))
    for kept in map(list, chain.from_iterable(combinations(columns, num) for num in range(1, len(names) + 1))):
        found = np.zeros(len(names))
        found[kept] = np.linalg.lstsq(relative[:, kept], np.ones(len(times_s)))[0]
        if found.min() >= 0 and _loss(relative, found) < _loss(relative, best):
            best = found
    return Fit(names, tuple(best.tolist()), tuple((relative @ best - 1).tolist()))


def _loss(relative: np.ndarray, coefficients: np.ndarray) -> float:
    return float(np.square(relative @ coefficients - 1).sum())


def _read(flag: str, path: str, report: type[_Report]) -> _Report:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=report)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag}: {path} has no such results: {error}") from error
