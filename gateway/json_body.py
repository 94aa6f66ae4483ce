"""JSON bodies: bytes -> object -> checked struct, with errors that name the parameter."""

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from common.errors import RequestError
from gateway.http_errors import invalid

Json = dict[str, object]
_Body = TypeVar("_Body", bound=msgspec.Struct)

_MAX_SHOWN_CHARS = 80
_PROBLEM = re.compile(r"(?:Expected (?P<expected>.*?)|.*?)(?:, got `\w+`)?(?: - at `\$(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`(?: - at `\$(?P<path>.*)`)?")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def parse_object(body: bytes) -> Json:
    """Parse a JSON object. NaN, Infinity and lone surrogates are not JSON.

    Raises: RequestError 400.
    """
    try:
        return msgspec.json.decode(body, type=Json)
    except msgspec.ValidationError as error:  # says: Expected `object`, got `array`
        got = str(error).rpartition(" ")[2].strip("`")
        raise invalid(f"the body must be a JSON object, got {got}") from error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise invalid(f"the body must be valid JSON: {error}") from error


def convert(body: Mapping[str, object], kind: type[_Body]) -> _Body:
    """Check types and ranges; unknown fields are ignored, and nothing is coerced (true is no 1, "2" is no 2).

    Raises: RequestError 400 with the field as its param.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body) from error


def _explain(problem: str, body: Mapping[str, object]) -> RequestError:
    """Say msgspec's finding in our words: what, wanted, got."""
    if missing := _MISSING.fullmatch(problem):
        path = f"{missing['path'] or ''}.{missing['field']}".removeprefix(".")
        return invalid(f"{path} is required", path)
    match = _PROBLEM.fullmatch(problem)
    if match is None or match["path"] is None:
        return invalid(problem)
    path = match["path"].replace("[...]", "").removeprefix(".")
    got = shown(_value_at(body, match["path"]))
    if match["expected"] is None:
        return invalid(f"{path}: not usable, got {got}", path)
    wanted = match["expected"].replace(" | null", "").replace("`", "")
    return invalid(f"{path} must be {wanted}, got {got}", path)


def _value_at(body: object, path: str) -> object:
    """What is at a path such as `.stop[0]`; the container where the path does not name the element."""
    value = body
    for name, index in _STEP.findall(path):
        if name and isinstance(value, dict):
            value = value[name]  # pyright: ignore[reportUnknownVariableType]
        elif index and isinstance(value, list):
            value = value[int(index)]  # pyright: ignore[reportUnknownVariableType]
    return value  # pyright: ignore[reportUnknownVariableType]


def shown(value: object) -> str:
    """A client's value as it may appear in a message: JSON, cut short."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
