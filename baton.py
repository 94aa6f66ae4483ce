"""The `baton` command. It only parses and starts: each service imports what it needs when it is its turn."""

import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from common.config import (
    COMMANDS,
    AggregatedCommand,
    BenchGatewayCommand,
    BenchGoodputCommand,
    BenchHandoffCommand,
    BenchMixedCommand,
    BenchPerplexityCommand,
    BenchPhasesCommand,
    BenchPlanCommand,
    BenchRunCommand,
    BenchStepsCommand,
    ChatCommand,
    Command,
    DecodeCommand,
    GatewayCommand,
    PrefillCommand,
    ServeCommand,
    SupervisionOptions,
    known_variables,
    parse_command,
)
from common.errors import BatonError, ConfigError, ModelError
from common.flags import unknown_variables
from common.program import PROGRAM
from common.supervisor.channel import SupervisorChannel
from common.supervisor.policy import UNUSABLE_EXIT_CODE

_INTERRUPTED_EXIT_CODE = 130
"""What shells give for a process that Ctrl-C ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done or stopped, 1 failed, 2 what was given is unusable,
    130 interrupted while starting."""
    name, rest = _split(list(sys.argv[1:] if argv is None else argv) or ["--help"])
    if name in ("-h", "--help", "help", "bench -h", "bench --help"):
        print(_usage())
        return 0
    if name in ("version", "--version"):
        print(f"baton {_version()}")
        return 0
    try:
        if name not in COMMANDS:
            raise ConfigError(f"command: got {name!r}, wanted one of {', '.join([*COMMANDS, 'version'])}")
        command = parse_command(name, rest, os.environ)
        for warning in unknown_variables(os.environ, known_variables()):
            print(f"baton {name}: warning: {warning}", file=sys.stderr)
        return _start(command)
    except BatonError as error:
        print(f"baton {name}: error: {error}", file=sys.stderr)
        return UNUSABLE_EXIT_CODE if isinstance(error, ConfigError | ModelError) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED_EXIT_CODE


def _split(words: list[str]) -> tuple[str, list[str]]:
    """The command, of two words where the first is `bench`, and its flags."""
    num_words = 2 if words[0] == "bench" else 1
    return " ".join(words[:num_words]), words[num_words:]


def _start(command: Command) -> int:
    match command:
        case ServeCommand():
            from common.supervisor import serve

            return serve.run(command, PROGRAM)
        case GatewayCommand():
            from gateway import __main__ as gateway

            return gateway.run(command, _channel(command.supervision))
        case PrefillCommand():
            from prefill import __main__ as prefill

            return prefill.run(command, _channel(command.supervision))
        case DecodeCommand():
            from decode import __main__ as decode

            return decode.run(command, _channel(command.supervision))
        case AggregatedCommand():
            from aggregated import __main__ as aggregated

            return aggregated.run(command, _channel(command.supervision))
        case ChatCommand():
            from gateway import chat_client

            return chat_client.run(command.chat)
        case BenchRunCommand() | BenchGoodputCommand() | BenchMixedCommand():
            from bench import __main__ as bench

            return bench.run(command)
        case BenchGatewayCommand():
            from bench import gateway_bench

            return gateway_bench.run(command, PROGRAM)
        case BenchPlanCommand():
            from bench.planning import __main__ as planning

            return planning.run(command)
        case BenchStepsCommand() | BenchPhasesCommand() | BenchPerplexityCommand() | BenchHandoffCommand():
            from bench.inside import __main__ as inside

            return inside.run(command)


def _channel(options: SupervisionOptions) -> SupervisorChannel | None:
    return None if options.supervisor_fd < 0 else SupervisorChannel(options.supervisor_fd)


def _usage() -> str:
    lines = ["usage: baton COMMAND [--flag value …]", ""]
    lines += [f"  {name:13}  {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    lines += ["  version        Print the version.", "", "baton COMMAND --help lists its flags."]
    return "\n".join(lines)


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "from a source tree that is not installed"


def _leave(exit_code: int) -> NoReturn:
    """Without the interpreter's own clean-up: all is closed by now, and to take PyTorch apart takes it 0.7 s."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _leave(main())
