"""Flags, variables and defaults, on a small command of its own."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from common.errors import ConfigError
from common.flag_values import ByteSize
from common.flags import Flag, options_of, parse, to_argv, to_environ, unknown_variables


@dataclass(frozen=True, slots=True)
class Things:
    """things"""

    num_things: Annotated[int, Flag(help="how many", at_least=0, at_most=9)] = 3
    timeout: Annotated[float, Flag(help="to wait", unit="s", at_least=0.5)] = 30.0
    memory: Annotated[ByteSize, Flag(help="to use", unit="bytes")] = ByteSize(2**20)
    colour: Annotated[Literal["red", "blue"], Flag(help="of all")] = "red"
    address: Annotated[str, Flag(help="of it", pattern=r"tcp://.+", wanted="an address")] = "tcp://a"
    tags: Annotated[tuple[str, ...], Flag(help="labels", pattern="[a-z]+", wanted="words")] = ()
    key: Annotated[tuple[str, ...], Flag(help="keys", secret=True)] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """Do things."""

    things: Things = field(default_factory=Things)


def read(*argv: str, **environ: str) -> Things:
    return parse(Command, options_of(Command), argv, environ, prog="do").things


def test_a_flag_wins_over_its_variable_and_that_over_the_default() -> None:
    assert read().num_things == 3
    assert read(BATON_NUM_THINGS="4").num_things == 4
    assert read("--num-things", "5", BATON_NUM_THINGS="4").num_things == 5


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read(BATON_NUM_THINGS="").num_things == 3


def test_the_last_of_a_repeated_flag_wins_but_a_list_takes_all() -> None:
    things = read("--num-things=1", "--num-things=2", "--tags", "a,b", "--tags=c")
    assert things.num_things == 2
    assert things.tags == ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("512MB", 512_000_000), ("2GiB", 2 * 1024**3), ("1.5k", 1500), ("3 kib", 3072)],
)
def test_sizes_have_decimal_and_binary_units(text: str, size: int) -> None:
    assert read(f"--memory={text}").memory == size


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-things=x"], "--num-things: got 'x', wanted a whole number, at least 0, at most 9"),
        (["--num-things=10"], "--num-things: got '10', wanted"),
        (["--num-things=-1"], "--num-things: got '-1', wanted"),
        (["--timeout=0.1"], r"--timeout: got '0.1', wanted a number \(s\), at least 0.5"),
        (["--timeout=nan"], "--timeout: got 'nan'"),
        (["--memory=2XB"], "--memory: got '2XB', wanted a size such as 512MB or 2GiB"),
        (["--memory=2iB"], "--memory: got '2iB'"),
        (["--colour=green"], "--colour: got 'green', wanted one of red, blue"),
        (["--address=udp://a"], "--address: got 'udp://a', wanted an address"),
        (["--tags=a,B"], "--tags: got 'a,B', wanted words"),
        (["--num-thing=1"], "unrecognized arguments: --num-thing=1"),
        (["--timeout"], "--timeout: expected one argument"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_bad_value_is_refused_with_flag_got_and_wanted(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*argv)


def test_a_bad_variable_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match="BATON_COLOUR: got 'green', wanted one of red, blue"):
        read(BATON_COLOUR="green")


def test_argv_and_environ_give_the_command_again() -> None:
    things = Things(
        num_things=0, timeout=1234567.25, memory=ByteSize(5), colour="blue", tags=("a", "b"), key=("k1", "k2")
    )
    command = Command(things)
    assert parse(Command, options_of(Command), to_argv(command), to_environ(command), prog="do") == command


def test_secrets_are_never_on_a_command_line() -> None:
    command = Command(Things(key=("very-secret",)))
    assert to_argv(command) == []
    assert to_environ(command) == {"BATON_KEY": "very-secret"}


def test_help_shows_text_unit_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--timeout X to wait (s; default: 30; BATON_TIMEOUT)" in shown
    assert "--memory SIZE to use (bytes; default: 1MiB; BATON_MEMORY)" in shown
    assert "--colour red|blue" in shown


def test_an_unknown_variable_is_warned_of_with_what_was_probably_meant() -> None:
    known = {"BATON_PORT", "BATON_HOST"}
    warnings = unknown_variables({"BATON_PROT": "1", "BATON_PORT": "2", "PATH": "/", "BATON_XYZZY": ""}, known)
    assert warnings == [
        "BATON_PROT is not a known variable; did you mean BATON_PORT?",
        "BATON_XYZZY is not a known variable",
    ]
