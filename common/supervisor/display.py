"""What `baton serve` shows: one live line on a terminal, plain lines elsewhere."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from common.supervisor.policy import Child, describe_exit

_ERASE_LINE = "\r\x1b[2K"


def describe_child(child: Child) -> str:
    percent = "" if child.fraction is None else f" {child.fraction:.0%}"
    return f"{child.name}: {child.phase}{percent}"


def live_line(children: Sequence[Child], width: int) -> str:
    """All children on one line, cut to the terminal's width so that it can be erased again."""
    return " · ".join(describe_child(child) for child in children)[: max(0, width - 1)]


def death_report(name: str, returncode: int, last_lines: Sequence[str], log_path: Path, then: str) -> str:
    lines = [f"{name} {describe_exit(returncode)}; {then}. Its last lines ({log_path}):"]
    return "\n".join(lines + [f"  {name} | {line}" for line in last_lines])


def banner(url: str, has_api_key: bool, log_dir: Path) -> str:
    """Where the service is, and a first request that can be pasted into a shell."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "temperature": 0, "stream": True}
    key = ' \\\n    -H "Authorization: Bearer ${BATON_API_KEY%%,*}"' if has_api_key else ""
    return (
        f"\nBaton is ready at {url}\n\n"
        f"  curl -N {url}/v1/chat/completions{key} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        + ("  with your keys in BATON_API_KEY, of which it sends the first.\n" if has_api_key else "")
        + f"Logs are in {log_dir}. Ctrl-C stops everything.\n"
    )


class Display:
    """Writes to one stream; what cannot be written (a full disk, a reader that is gone) stops nothing.

    Mutable state: what is on the live line, and what was last said of each child.
    """

    def __init__(self, stream: TextIO, width: int | None) -> None:
        """width: of the terminal that the stream is, in columns; None: it is no terminal."""
        self._stream = stream
        self._width = width
        self._live = ""
        self._phases: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Write lines that stay."""
        self._write(f"{self._erase()}{text}\n{self._live}")

    def show(self, children: Sequence[Child]) -> None:
        """Show how the start goes: redraw the live line, or write a line for each child whose phase is new."""
        if self._width is not None:
            erase = self._erase()
            self._live = live_line(children, self._width)
            self._write(erase + self._live)
            return
        for child in children:
            if self._phases.get(child.name) != child.phase:
                self._phases[child.name] = child.phase
                self._write(f"{child.name}: {child.phase}\n")

    def clear(self) -> None:
        """Take the live line away."""
        self._write(self._erase())
        self._live = ""

    def close(self) -> None:
        """Drop what could not be written: else it fails again when Python ends, and changes its exit code."""
        try:
            self._stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())

    def _erase(self) -> str:
        return _ERASE_LINE if self._live else ""

    def _write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
