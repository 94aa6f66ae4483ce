"""The real commands: what they offer, and what is written about them."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import baton
from common.config import (
    COMMANDS,
    DecodeCommand,
    GatewayOptions,
    ServeCommand,
    known_variables,
    offered_options,
    parse_command,
)
from common.errors import ConfigError
from common.flags_reference import flags_reference
from common.supervisor.policy import MAX_DELAY_S

ROOT = Path(__file__).parents[2]


def switches(command: str) -> list[str]:
    return [switch for option in offered_options(COMMANDS[command]) for switch in option.switches]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_starts_from_its_defaults_and_offers_each_flag_once(command: str) -> None:
    assert parse_command(command, [], {}) == COMMANDS[command]()
    assert len(switches(command)) == len(set(switches(command)))


def test_a_worker_s_ranks_go_by_the_names_of_vllm_and_of_tgi() -> None:
    for switch in ("--tensor-parallel-size", "--num-shard"):
        command = parse_command("decode", [switch, "3"], {})
        assert isinstance(command, DecodeCommand)
        assert command.worker.tensor_parallel_size == 3


def test_serve_decides_itself_where_processes_meet() -> None:
    assert {"--bind", "--data-bind", "--gateway", "--name", "--supervisor-fd"}.isdisjoint(switches("serve"))
    with pytest.raises(ConfigError, match="--bind"):
        parse_command("serve", ["--bind=tcp://0.0.0.0:1"], {})


def test_serve_takes_every_other_option_of_the_services() -> None:
    services = {
        option for name in ("gateway", "prefill", "decode", "aggregated") for option in offered_options(COMMANDS[name])
    }
    assert {option.switch for option in services if not option.flag.wiring} <= set(switches("serve"))


def test_values_of_one_flag_name_mean_the_same_in_every_command() -> None:
    """One environment file may serve all containers, so a variable's type cannot depend on who reads it."""
    kinds: dict[str, set[object]] = {}
    for command in COMMANDS.values():
        for option in offered_options(command):
            kinds.setdefault(option.variable, set()).add((option.kind, option.choices))
    assert {variable for variable, found in kinds.items() if len(found) > 1} == set()


def test_a_request_waits_for_as_long_as_a_worker_takes_to_be_started_again() -> None:
    """In mid-stream or before: the supervisor's longest delay, and as long again to load the model."""
    options = GatewayOptions()
    assert min(options.no_worker_timeout, options.resume_timeout) > 2 * MAX_DELAY_S


def test_the_flags_page_is_what_make_docs_writes() -> None:
    assert (ROOT / "docs" / "flags.md").read_text() == flags_reference(), "make docs writes it anew"


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_pages_name_only_flags_and_variables_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    lines = [
        line
        for line in text.splitlines()
        if all(f"{tool} " not in line for tool in ("pip", "git", "curl", "docker compose"))
    ]
    known = {switch for command in COMMANDS for switch in switches(command)} | {"--help", "--version"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines))) <= known
    assert set(re.findall(r"\bBATON_[A-Z_]*[A-Z]\b", text)) <= known_variables()


@pytest.mark.parametrize("file", sorted(ROOT.glob("compose*.yaml")), ids=lambda file: file.name)
def test_compose_files_give_services_only_what_these_know(file: Path) -> None:
    text = file.read_text()
    known = {switch for command in ("gateway", "prefill", "decode") for switch in switches(command)}
    assert set(re.findall(r"(?<=[- \"])--[a-z][a-z-]+(?==)", text)) <= known
    assert set(re.findall(r"^ +(BATON_[A-Z_]+):", text, re.MULTILINE)) <= known_variables()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["frobnicate"], "command: got 'frobnicate', wanted one of serve, gateway, prefill, decode, aggregated"),
        (["serve", "--port=http"], "--port: got 'http', wanted a whole number, at least 0, at most 65535"),
    ],
)
def test_unusable_arguments_end_with_2_and_one_line(
    argv: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_usage_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert baton.main(argv) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in [*COMMANDS, "version"])


def test_a_misspelt_variable_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("BATON_PROT", "80")
    monkeypatch.setenv("BATON_LOG_DIR", "/dev/null/logs")
    assert baton.main(["serve"]) == 2
    shown = capsys.readouterr().err
    assert "BATON_PROT is not a known variable; did you mean BATON_PORT?" in shown
    assert "--log-dir: got /dev/null/logs, wanted a folder that can be written to" in shown


def test_the_default_command_is_one_worker_of_each_kind() -> None:
    serve = parse_command("serve", [], {})
    assert isinstance(serve, ServeCommand)
    assert (serve.serve.prefill, serve.serve.decode) == (1, 1)
