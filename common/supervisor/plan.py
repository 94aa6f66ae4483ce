"""Which processes `baton serve` starts, and with which command lines. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.config import Command, DecodeCommand, GatewayCommand, PrefillCommand, ServeCommand, WorkerOptions
from common.flags import to_argv, to_environ
from common.supervisor.runtime_dir import SHARED

GATEWAY = "gateway"

_DRAIN_TIMEOUT_S = 2.0
"""When everything stops at once there is no other worker that a drained request could resume at."""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """How to start one child. secrets: environment variables, for what must not be in a command line."""

    name: str
    argv: tuple[str, ...]
    secrets: dict[str, str]


def plan_children(serve: ServeCommand, program: Sequence[str], runtime_dir: Path) -> list[ChildPlan]:
    """The gateway first, then the prefill and decode workers.

    program:     what runs `baton`, such as (python, baton.py)
    runtime_dir: private folder for the sockets through which they meet
    """
    inbox = f"ipc://{runtime_dir}/{GATEWAY}"
    shared_dir = serve.worker.shared_dir or str(runtime_dir / SHARED)
    worker = replace(serve.worker, gateway=(inbox,), shared_dir=shared_dir, drain_timeout=_DRAIN_TIMEOUT_S)

    def plan(role: str, name: str, command: Command) -> ChildPlan:
        return ChildPlan(name, (*program, role, *to_argv(command)), to_environ(command))

    gateway = replace(serve.gateway, bind=inbox, name=GATEWAY)
    children = [
        plan("gateway", GATEWAY, GatewayCommand(model=serve.model, http=serve.http, gateway=gateway, log=serve.log))
    ]
    for index in range(serve.serve.prefill):
        options = _place(worker, f"prefill-{index}", runtime_dir)
        command = PrefillCommand(model=serve.model, worker=options, prefill=serve.prefill, log=serve.log)
        children.append(plan("prefill", options.name, command))
    for index in range(serve.serve.decode):
        options = _place(worker, f"decode-{index}", runtime_dir)
        command = DecodeCommand(model=serve.model, worker=options, decode=serve.decode, log=serve.log)
        children.append(plan("decode", options.name, command))
    return children


def _place(worker: WorkerOptions, name: str, runtime_dir: Path) -> WorkerOptions:
    return replace(worker, name=name, bind=f"ipc://{runtime_dir}/{name}", data_bind=f"ipc://{runtime_dir}/{name}.kv")


def child_environ(environ: dict[str, str], secrets: dict[str, str]) -> dict[str, str]:
    """The variables of a child. Ours are taken out: all that they said is in the command line already."""
    return {name: value for name, value in environ.items() if not name.startswith("BATON_")} | secrets
