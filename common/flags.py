"""Command lines out of dataclasses: a field is a flag, an environment variable, a default and a help text at once.

A command is a frozen dataclass whose fields are option groups; a group is a frozen dataclass whose fields are
`name: Annotated[type, Flag("help")] = default`. `max_model_len` becomes `--max-model-len` and `BATON_MAX_MODEL_LEN`.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

from common.errors import ConfigError
from common.flag_values import KINDS, ByteSize, show_size, to_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What the type and default of a field do not say.

    help:      one line, without the default, which is added
    unit:      of the number, for help and error messages
    pattern:   regular expression that a text, or each item of a list, matches; `wanted` says it in words
    alias:     another flag for the same, as it is called elsewhere
    variable:  environment variable, if not the one derived from prefix and the field's name
    wiring:    says how processes find each other; `baton serve` decides these itself and offers no flag
    secret:    handed to a child in its environment, never on its command line, which every user can read
    """

    help: str
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    pattern: str = ""
    wanted: str = ""
    alias: str = ""
    variable: str = ""
    prefix: str = ""
    wiring: bool = False
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one group, resolved: everything that help, parsing and printing need."""

    group: str
    name: str
    kind: object
    default: object
    flag: Flag
    choices: tuple[str, ...] = field(default=())

    @property
    def switch(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def switches(self) -> list[str]:
        return [self.switch, *([self.flag.alias] if self.flag.alias else [])]

    @property
    def variable(self) -> str:
        return self.flag.variable or "BATON_" + self.flag.prefix + self.name.upper()

    @property
    def wanted(self) -> str:
        """What a value must look like, for error messages."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = self.flag.wanted or KINDS[self.kind].noun
        if self.flag.unit:
            noun += f" ({self.flag.unit})"
        if self.flag.at_least is not None:
            noun += f", at least {self.flag.at_least:g}"
        if self.flag.at_most is not None:
            noun += f", at most {self.flag.at_most:g}"
        return noun


def options_of(command: "type[DataclassInstance]") -> list[Option]:
    """Every option of a command, in the order of its groups, the hidden ones included."""
    groups: dict[str, type[DataclassInstance]] = get_type_hints(command)
    return [option for group in fields(command) for option in group_options(group.name, groups[group.name])]


def group_options(name: str, group: "type[DataclassInstance]") -> list[Option]:
    hints = get_type_hints(group, include_extras=True)
    options: list[Option] = []
    for item in fields(group):
        hint = hints[item.name]
        assert get_origin(hint) is Annotated, f"{group.__name__}.{item.name} has no Flag"
        kind, flag = get_args(hint)
        choices: tuple[str, ...] = get_args(kind) if get_origin(kind) is Literal else ()
        options.append(Option(name, item.name, str if choices else kind, item.default, flag, choices))
    return options


def parse(
    command: type[Options], offered: Sequence[Option], argv: Sequence[str], environ: Mapping[str, str], *, prog: str
) -> Options:
    """Build the command from flags, then variables, then defaults. What is not offered keeps its default.

    An empty variable counts as not set: that is how a compose file passes on what its user left out.

    Raises: ConfigError naming the flag or variable, the value got and what was wanted. SystemExit(0) after --help.
    """
    given = vars(_parser(command, offered, prog).parse_args(argv))
    groups: dict[str, dict[str, object]] = {item.name: {} for item in fields(command)}
    for option in offered:
        texts: list[str] | None = given[option.name]
        if texts is not None:
            groups[option.group][option.name] = _convert(option, texts, option.switch)
        elif environ.get(option.variable):
            groups[option.group][option.name] = _convert(option, [environ[option.variable]], option.variable)
    types: dict[str, type[DataclassInstance]] = get_type_hints(command)
    return command(**{name: types[name](**values) for name, values in groups.items()})


def _convert(option: Option, texts: Sequence[str], source: str) -> object:
    """The value of an option. A list takes every occurrence of its flag, anything else the last."""
    text = ",".join(texts) if option.kind == tuple[str, ...] else texts[-1]
    wrong = ConfigError(f"{source}: got {text!r}, wanted {option.wanted}")
    try:
        value = KINDS[option.kind].parse(text)
    except ValueError:
        raise wrong from None
    if not _is_allowed(option, value):
        raise wrong
    return value


def _is_allowed(option: Option, value: object) -> bool:
    flag = option.flag
    match value:
        case int() | float():
            above = flag.at_least is None or value >= flag.at_least
            return above and (flag.at_most is None or value <= flag.at_most)
        case str():
            if option.choices:
                return value in option.choices
            return not flag.pattern or re.fullmatch(flag.pattern, value) is not None
        case _:
            return not flag.pattern or all(re.fullmatch(flag.pattern, item) for item in to_text(value).split(","))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser(command: "type[DataclassInstance]", options: Iterable[Option], prog: str) -> argparse.ArgumentParser:
    width = max(60, min(120, int(os.environ.get("COLUMNS", "100"))))
    parser = _Parser(
        prog=prog,
        description=command.__doc__,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=width),
    )
    types: dict[str, type[DataclassInstance]] = get_type_hints(command)
    sections = {name: parser.add_argument_group(group.__doc__ or name) for name, group in types.items()}
    for option in options:
        sections[option.group].add_argument(
            *option.switches,
            dest=option.name,
            action="append",
            metavar="|".join(option.choices) or KINDS[option.kind].metavar,
            help=describe(option).replace("%", "%%"),
        )
    return parser


def describe(option: Option) -> str:
    """Help text with unit, default and variable."""
    unit = f"{option.flag.unit}; " if option.flag.unit else ""
    return f"{option.flag.help} ({unit}default: {show_default(option)}; {option.variable})"


def show_default(option: Option) -> str:
    if option.kind is ByteSize and isinstance(option.default, int) and option.default:
        return show_size(option.default)
    return to_text(option.default) or "none"


def to_argv(command: "DataclassInstance") -> list[str]:
    """The flags that give this command again: those that differ from the defaults, without secrets."""
    return [
        f"{option.switch}={to_text(value)}"
        for option, value in values_of(command)
        if value != option.default and not option.flag.secret
    ]


def to_environ(command: "DataclassInstance") -> dict[str, str]:
    """The variables that give the command's secrets again."""
    return {option.variable: to_text(value) for option, value in values_of(command) if option.flag.secret and value}


def values_of(command: "DataclassInstance") -> list[tuple[Option, object]]:
    """Every option of a command with its value."""
    values: dict[str, dict[str, object]] = asdict(command)
    return [(option, values[option.group][option.name]) for option in options_of(type(command))]


def unknown_variables(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """One warning for each BATON_* variable that no command reads, with the name that was probably meant."""
    names = set(known)
    warnings: list[str] = []
    for name in sorted(environ):
        if name.startswith("BATON_") and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            warnings.append(f"{name} is not a known variable" + (f"; did you mean {close[0]}?" if close else ""))
    return warnings
