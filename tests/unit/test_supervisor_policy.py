"""What a supervisor decides and shows, without processes."""

import io
import json
import subprocess
from pathlib import Path

import pytest

from common.config import (
    AggregatedCommand,
    DecodeCommand,
    DecodeOptions,
    GatewayCommand,
    HttpOptions,
    ModelOptions,
    PrefillCommand,
    ServeCommand,
    ServeOptions,
    WorkerOptions,
    parse_command,
)
from common.errors import ConfigError, WireError
from common.supervisor.channel import Listening, PoolsLive, Progress, Ready, decode_event, encode_event
from common.supervisor.display import Display, banner, live_line
from common.supervisor.plan import ChildPlan, child_environ, plan_children
from common.supervisor.policy import MAX_FAILED_STARTS, Child, GiveUp, Restart, describe_exit

RUN = Path("/run/b")


def exits(child: Child, num_exits: int, uptime_s: float = 1.0) -> list[Restart | GiveUp]:
    decisions: list[Restart | GiveUp] = []
    for index in range(num_exits):
        child.start(now=index * 1000.0)
        decisions.append(child.exit(1, now=index * 1000.0 + uptime_s))
    return decisions


def ready_child() -> Child:
    child = Child("decode-0")
    child.apply(Ready())
    return child


def test_the_delay_before_a_restart_doubles_up_to_ten_seconds() -> None:
    delays = [decision.delay_s for decision in exits(ready_child(), 7) if isinstance(decision, Restart)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_the_delay_never_passes_its_limit_however_often_a_child_dies() -> None:
    assert exits(ready_child(), 3000)[-1] == Restart(10.0)


def test_a_minute_up_forgives_earlier_deaths() -> None:
    child = ready_child()
    exits(child, 4)
    assert exits(child, 1, uptime_s=60.0) == [Restart(0.5)]


def test_a_child_that_was_never_ready_is_given_up_after_five_starts() -> None:
    decisions = exits(Child("decode-0"), MAX_FAILED_STARTS)
    assert all(isinstance(decision, Restart) for decision in decisions[:-1])
    assert decisions[-1] == GiveUp(1)


def test_exit_code_2_before_ready_gives_up_at_once_and_later_restarts() -> None:
    assert Child("decode-0").exit(2, now=0.0) == GiveUp(2)
    assert ready_child().exit(2, now=0.0) == Restart(0.5)


def test_a_gateway_that_listens_has_started_but_is_not_ready() -> None:
    child = Child("gateway")
    child.apply(Listening("http://127.0.0.1:8000"))
    assert (child.was_ready, child.is_ready, child.has_live_pools) == (True, False, False)
    child.apply(PoolsLive())
    assert (child.is_ready, child.has_live_pools) == (True, True)


def test_a_dead_child_is_not_ready() -> None:
    child = Child("gateway")
    child.apply(PoolsLive())
    child.exit(-9, now=1.0)
    assert (child.is_ready, child.has_live_pools, child.phase) == (False, False, "killed by SIGKILL")


@pytest.mark.parametrize(
    ("returncode", "text"),
    [(0, "ended with exit code 0"), (-15, "killed by SIGTERM"), (-99, "killed by signal 99")],
)
def test_an_exit_is_described_in_words(returncode: int, text: str) -> None:
    assert describe_exit(returncode) == text


@pytest.mark.parametrize("event", [Progress("loading", 0.5), Progress("x"), Listening("u"), Ready(), PoolsLive()])
def test_events_survive_the_channel(event: Progress | Listening | Ready | PoolsLive) -> None:
    assert decode_event(encode_event(event).strip()) == event


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b'{"event":"party"}', b'{"event":"progress"}', b"\xff"])
def test_a_line_that_is_no_event_is_a_wire_error(line: bytes) -> None:
    with pytest.raises(WireError, match="supervisor channel"):
        decode_event(line)


def plan(serve: ServeCommand) -> dict[str, ChildPlan]:
    return {child.name: child for child in plan_children(serve, ("python", "baton.py"), RUN)}


def test_serve_plans_a_gateway_and_the_workers_asked_for() -> None:
    assert list(plan(ServeCommand(serve=ServeOptions(prefill=1, decode=2)))) == [
        "gateway",
        "prefill-0",
        "decode-0",
        "decode-1",
    ]


def test_workers_that_do_both_are_all_that_serve_plans_if_asked_to() -> None:
    serve = ServeCommand(serve=ServeOptions(role="both", aggregated=2), decode=DecodeOptions(max_num_seqs=7))
    children = plan(serve)
    assert list(children) == ["gateway", "aggregated-0", "aggregated-1"]
    command = parse_command("aggregated", children["aggregated-1"].argv[3:], {})
    assert isinstance(command, AggregatedCommand)
    assert (command.worker.name, command.decode) == ("aggregated-1", serve.decode)
    assert command.worker.gateway == (f"ipc://{RUN}/gateway",)


@pytest.mark.parametrize(
    ("role", "flag", "value"),
    [
        ("both", "--prefill", "2"),
        ("both", "--decode-tp", "3"),
        ("both", "--kv-transport", "tcp"),
        ("both", "--itl-target", "50"),
        ("split", "--aggregated", "2"),
        ("split", "--aggregated-tp", "2"),
    ],
)
def test_an_option_that_no_process_has_a_use_for_is_refused(role: str, flag: str, value: str) -> None:
    serve = parse_command("serve", [f"--role={role}", f"{flag}={value}"], {})
    assert isinstance(serve, ServeCommand)
    with pytest.raises(ConfigError, match=f"{flag}: got {value}, but --role {role} has no use for it"):
        plan(serve)


def split_command(child: ChildPlan) -> PrefillCommand | DecodeCommand:
    command = parse_command(child.argv[2], child.argv[3:], child.secrets)
    assert isinstance(command, PrefillCommand | DecodeCommand)
    return command


def test_planned_command_lines_carry_what_serve_was_given() -> None:
    serve = ServeCommand(model=ModelOptions(model="m.gguf"), http=HttpOptions(port=0, api_key=("k",)))
    for child in plan(serve).values():
        command = parse_command(child.argv[2], child.argv[3:], child.secrets)
        assert isinstance(command, GatewayCommand | PrefillCommand | DecodeCommand)
        assert command.model == serve.model
        if isinstance(command, GatewayCommand):
            assert command.http == serve.http


def test_planned_processes_meet_each_other() -> None:
    children = plan(ServeCommand())
    gateway = parse_command("gateway", children["gateway"].argv[3:], {})
    assert isinstance(gateway, GatewayCommand)
    workers = [split_command(children[name]) for name in ("prefill-0", "decode-0")]
    assert [command.worker.gateway for command in workers] == [(gateway.gateway.bind,)] * 2
    worker_inboxes = [inbox for command in workers for inbox in (command.worker.bind, command.transfer.data_bind)]
    inboxes = {gateway.gateway.bind, *worker_inboxes}
    assert len(inboxes) == 5
    assert all(inbox.startswith("ipc:///run/b/") for inbox in inboxes)


@pytest.mark.parametrize(("given", "expected"), [("", "/run/b/shared"), ("/shm/x", "/shm/x")])
def test_workers_share_their_cores_through_one_folder(given: str, expected: str) -> None:
    children = plan(ServeCommand(worker=WorkerOptions(shared_dir=given)))
    assert {split_command(children[name]).worker.shared_dir for name in ("prefill-0", "decode-0")} == {expected}


def test_a_key_reaches_the_gateway_by_environment_only() -> None:
    children = plan(ServeCommand(http=HttpOptions(api_key=("secret-1", "secret-2"))))
    assert "secret-1" not in " ".join(word for child in children.values() for word in child.argv)
    assert children["gateway"].secrets == {"BATON_API_KEY": "secret-1,secret-2"}
    assert children["decode-0"].secrets == {}


def test_children_do_not_inherit_our_variables() -> None:
    environ = child_environ({"BATON_PORT": "1", "PATH": "/bin"}, {"BATON_API_KEY": "k"})
    assert environ == {"PATH": "/bin", "BATON_API_KEY": "k"}


def test_without_a_terminal_each_new_phase_is_one_line() -> None:
    out = io.StringIO()
    display, child = Display(out, width=None), Child("decode-0")
    for event in (Progress("loading", 0.1), Progress("loading", 0.2), Ready()):
        display.show([child])
        child.apply(event)
    display.show([child])
    assert out.getvalue() == "decode-0: starting\ndecode-0: loading\ndecode-0: ready\n"


def test_on_a_terminal_one_line_is_redrawn_below_what_is_said() -> None:
    out = io.StringIO()
    display, child = Display(out, width=80), Child("decode-0")
    child.apply(Progress("loading", 0.25))
    display.show([child])
    display.say("something died")
    display.clear()
    erase = "\r\x1b[2K"
    live = "decode-0: loading 25%"
    assert out.getvalue() == f"{live}{erase}something died\n{live}{erase}"


def test_the_live_line_never_wraps() -> None:
    assert len(live_line([Child("x" * 50), Child("y" * 50)], width=40)) < 40


def test_the_first_request_carries_a_key_where_one_is_needed() -> None:
    assert "Authorization" not in banner("http://h:1", has_api_key=False, log_dir=RUN)
    assert "Authorization" in banner("http://h:1", has_api_key=True, log_dir=RUN)


@pytest.mark.parametrize("keys", ["sk-a", "sk-a,sk-b"])
def test_the_first_request_can_be_pasted_is_greedy_and_carries_the_first_key(keys: str) -> None:
    command = banner("http://h:1", has_api_key=True, log_dir=RUN).split("\n\n")[1]
    script = f"curl() {{ printf '%s\\n' \"$@\"; }}\n{command}"
    environ = {"BATON_API_KEY": keys}
    sent = subprocess.run(["/bin/sh", "-c", script], env=environ, capture_output=True, text=True, check=True).stdout
    flag, url, *headers, data_flag, body = sent.splitlines()
    assert (flag, url, data_flag) == ("-N", "http://h:1/v1/chat/completions", "-d")
    assert "Authorization: Bearer sk-a" in headers
    assert (json.loads(body)["temperature"], json.loads(body)["stream"]) == (0, True)
