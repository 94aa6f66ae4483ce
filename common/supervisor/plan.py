"""Which processes `baton serve` starts, and with which command lines. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path

from common.config import (
    AggregatedCommand,
    Command,
    DecodeCommand,
    GatewayCommand,
    PrefillCommand,
    ServeCommand,
    ServeOptions,
)
from common.errors import ConfigError
from common.flag_values import to_text
from common.flags import to_argv, to_environ, values_of
from common.supervisor.runtime_dir import SHARED

GATEWAY = "gateway"

_DRAIN_TIMEOUT_S = 2.0
"""When everything stops at once there is no other worker that a drained request could resume at."""
_GATEWAY_DRAIN_TIMEOUT_S = 2.5
"""What workers say last still gets to clients."""

_COMMANDS = {"split": (GatewayCommand, PrefillCommand, DecodeCommand), "both": (GatewayCommand, AggregatedCommand)}
_POOL_SIZES = {"split": {"prefill", "decode", "prefill_tp", "decode_tp"}, "both": {"aggregated", "aggregated_tp"}}


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """How to start one child. secrets: environment variables, for what must not be in a command line."""

    name: str
    argv: tuple[str, ...]
    secrets: dict[str, str]


def plan_children(serve: ServeCommand, program: Sequence[str], runtime_dir: Path) -> list[ChildPlan]:
    """The gateway first, then the workers.

    program:     what runs `baton`, such as (python, baton.py)
    runtime_dir: private folder for the sockets through which they meet

    Raises: ConfigError for an option that none of these processes has a use for.
    """
    _check_use(serve)
    inbox = f"ipc://{runtime_dir}/{GATEWAY}"
    gateway = replace(serve.gateway, bind=inbox, name=GATEWAY, drain_timeout=_GATEWAY_DRAIN_TIMEOUT_S)
    commands: list[tuple[str, str, Command]] = [
        ("gateway", GATEWAY, GatewayCommand(model=serve.model, http=serve.http, gateway=gateway, log=serve.log))
    ]
    workers = [(role, f"{role}-{index}") for role, count in _num_workers(serve).items() for index in range(count)]
    num_ranks = [_num_ranks(role, serve.serve) for role, _ in workers]
    for (role, name), first_rank in zip(workers, accumulate(num_ranks, initial=0), strict=False):
        worker = replace(serve.worker, first_rank=first_rank, host_ranks=sum(num_ranks))
        commands.append((role, name, _worker_command(role, name, replace(serve, worker=worker), inbox, runtime_dir)))
    return [
        ChildPlan(name, (*program, role, *to_argv(command)), to_environ(command)) for role, name, command in commands
    ]


def _check_use(serve: ServeCommand) -> None:
    role = serve.serve.role
    sizes_of_others = set[str]().union(*_POOL_SIZES.values()) - _POOL_SIZES[role]
    groups = {"serve", *(group.name for command in _COMMANDS[role] for group in fields(command))}
    for option, value in values_of(serve):
        is_used = option.group in groups and option.name not in sizes_of_others
        if not is_used and value != option.default:
            raise ConfigError(f"{option.switch}: got {to_text(value)}, but --role {role} has no use for it")


def _num_workers(serve: ServeCommand) -> dict[str, int]:
    """By the command that starts them."""
    if serve.serve.role == "both":
        return {"aggregated": serve.serve.aggregated}
    return {"prefill": serve.serve.prefill, "decode": serve.serve.decode}


def _worker_command(role: str, name: str, serve: ServeCommand, inbox: str, runtime_dir: Path) -> Command:
    worker = replace(
        serve.worker,
        name=name,
        gateway=(inbox,),
        bind=f"ipc://{runtime_dir}/{name}",
        shared_dir=serve.worker.shared_dir or str(runtime_dir / SHARED),
        drain_timeout=_DRAIN_TIMEOUT_S,
        tensor_parallel_size=_num_ranks(role, serve.serve),
    )
    transfer = replace(serve.transfer, data_bind=f"ipc://{runtime_dir}/{name}.kv")
    model, prefill, decode, log = serve.model, serve.prefill, serve.decode, serve.log
    match role:
        case "prefill":
            return PrefillCommand(model=model, worker=worker, transfer=transfer, prefill=prefill, log=log)
        case "decode":
            pacing = serve.pacing
            return DecodeCommand(model=model, worker=worker, transfer=transfer, decode=decode, pacing=pacing, log=log)
        case _:
            return AggregatedCommand(model=model, worker=worker, prefill=prefill, decode=decode, log=log)


def _num_ranks(role: str, options: ServeOptions) -> int:
    return {"prefill": options.prefill_tp, "decode": options.decode_tp, "aggregated": options.aggregated_tp}[role]


def child_environ(environ: dict[str, str], secrets: dict[str, str]) -> dict[str, str]:
    """The variables of a child. Ours are taken out: all that they said is in the command line already."""
    return {name: value for name, value in environ.items() if not name.startswith("BATON_")} | secrets
