"""docs/flags.md out of `common.config`: `python -m common.flags_reference > docs/flags.md`."""

import sys
from collections.abc import Sequence

from common.config import COMMANDS, offered_options
from common.flags import Option, show_default


def flags_reference() -> str:
    """Every option once, under its group, with the commands that take it."""
    takers: dict[tuple[str, Option], list[str]] = {}
    for command_name, command in COMMANDS.items():
        for option in offered_options(command):
            takers.setdefault((option.group, option), []).append(command_name)
    groups: dict[tuple[str, tuple[str, ...]], list[Option]] = {}
    for (group, option), names in takers.items():
        groups.setdefault((group, tuple(names)), []).append(option)
    sections = [_section(group, names, options) for (group, names), options in groups.items()]
    return "\n".join(["# Flags and variables", "", _INTRODUCTION, *sections])


_INTRODUCTION = """\
Written by `make docs` from `common/config.py`; a test compares. A flag wins over its environment variable, and that
over the default; an empty variable counts as not set. `baton serve` passes every worker and gateway option on, and
decides itself where the processes find each other.
"""


def _section(group: str, commands: Sequence[str], options: Sequence[Option]) -> str:
    lines = [f"## {group}: `{'`, `'.join(commands)}`", "", "| flag | variable | default | |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, options), ""])


def _row(option: Option) -> str:
    choices = f": {', '.join(option.choices)}" if option.choices else ""
    unit = f" ({option.flag.unit})" if option.flag.unit else ""
    text = f"{option.flag.help}{unit}{choices}"
    default = f"`{show_default(option)}`"
    switches = ", ".join(f"`{switch}`" for switch in option.switches)
    return f"| {switches} | `{option.variable}` | {default} | {text} |"


if __name__ == "__main__":
    sys.stdout.write(flags_reference())
