"""Prompts that are texts: a .jsonl file with one a line, or a file of paragraphs."""

from pathlib import Path
from typing import Any

import msgspec

from common.errors import ConfigError

_FIELDS = ("prompt", "question", "turns", "input", "text")


def read_prompts(path: str, field: str = "") -> list[str]:
    """field: of each .jsonl line; empty: the first that it has of prompt, question, turns, input, text.

    Raises: ConfigError naming the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: cannot read {path}: {error}") from error
    if path.endswith(".jsonl"):
        # Not splitlines(): JSON may hold Unicode line breaks as they are.
        lines = enumerate(text.split("\n"), 1)
        prompts = [_prompt(f"{path}, line {number}", line, field) for number, line in lines if line.strip()]
    else:
        prompts = [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: got {path} without a prompt")
    return prompts


def _prompt(where: str, line: str, field: str) -> str:
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--prompts: {where}: {error}") from error
    names = (field,) if field else _FIELDS
    found = next((row[name] for name in names if name in row), None)
    text = _first_text(found)
    if not text:
        raise ConfigError(f"--prompts: {where} has no text in {' or '.join(names)}; --prompt-field names another")
    return text


def _first_text(value: Any) -> str:
    """A text itself, the first of several turns, or the content of a message."""
    while True:
        match value:
            case str():
                return value
            case [first, *_]:
                value = first
            case {"content": content}:
                value = content
            case _:
                return ""
