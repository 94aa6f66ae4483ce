"""Every option of every command, once: the field is the flag, the variable, the default and the help.

Fields marked `wiring` say where processes find each other; `baton serve` sets them and does not offer them.
`0` or an empty text stands for "decide yourself"; whoever starts the service resolves it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from common.bench_config import (
    BenchCommand,
    BenchGatewayCommand,
    BenchGoodputCommand,
    BenchMixedCommand,
    BenchRunCommand,
)
from common.bench_inside_config import (
    BenchHandoffCommand,
    BenchPerplexityCommand,
    BenchPhasesCommand,
    BenchStepsCommand,
    InsideCommand,
)
from common.bench_plan_config import BenchPlanCommand
from common.flag_values import ByteSize
from common.flags import Flag, Option, options_of, parse
from common.worker_config import (
    INBOX,
    INBOX_WANTED,
    DecodeOptions,
    PacingOptions,
    PrefillOptions,
    RankOptions,
    TransferOptions,
    WorkerOptions,
)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """model"""

    model: Annotated[str, Flag(help="folder, .gguf file or hub name; empty for the built-in SmolLM2-135M-Instruct")] = (
        ""
    )
    served_model_name: Annotated[str, Flag(help="name in the API; empty for the model's own")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Flag(help="of weights, activations and KV; auto: bfloat16 where the device computes it natively"),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "auto"],
        Flag(help="of weights in memory, 32 with a scale; the head has 8 bits at least; auto: what a .gguf file holds"),
    ] = "none"
    max_model_len: Annotated[
        int, Flag(help="longest sequence, prompt and output; 0 for the model's own", unit="tokens", at_least=0)
    ] = 0


@dataclass(frozen=True, slots=True)
class LogOptions:
    """logging"""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag(help="least severe level written")] = "info"
    log_format: Annotated[Literal["text", "json"], Flag(help="of each line")] = "text"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """HTTP"""

    host: Annotated[str, Flag(help="address to listen on; 0.0.0.0 for every interface")] = "127.0.0.1"
    port: Annotated[int, Flag(help="port to listen on; 0 for any free one", at_least=0, at_most=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...], Flag(help="keys that clients must send one of; none: open to all", secret=True)
    ] = ()
    max_body_bytes: Annotated[ByteSize, Flag(help="largest request body", unit="bytes", at_least=1)] = ByteSize(
        32 * 1024 * 1024
    )
    client_timeout: Annotated[
        float, Flag(help="a client that does not read for so long is cancelled", unit="s", at_least=0.1)
    ] = 30.0
    allowed_origins: Annotated[tuple[str, ...], Flag(help="origins allowed by CORS")] = ("*",)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """requests and workers"""

    bind: Annotated[
        str, Flag(help="ZeroMQ inbox; `*` for any free port", pattern=INBOX, wanted=INBOX_WANTED, wiring=True)
    ] = "tcp://127.0.0.1:5550"
    advertise_host: Annotated[
        str, Flag(help="host by which workers reach the inbox; empty: from --bind", wiring=True)
    ] = ""
    name: Annotated[str, Flag(help="of this gateway in logs and metrics; empty: from host and port", wiring=True)] = ""
    max_concurrent_requests: Annotated[
        int, Flag(help="generations under way; beyond it the answer is 429", at_least=1)
    ] = 512
    request_timeout: Annotated[float, Flag(help="longest life of a request", unit="s", at_least=0.1)] = 600.0
    resume_timeout: Annotated[
        float, Flag(help="wait for a worker in the middle of a stream, then an error frame", unit="s", at_least=0)
    ] = 30.0
    no_worker_timeout: Annotated[
        float, Flag(help="wait for a pool without a live worker, then 503", unit="s", at_least=0)
    ] = 30.0
    when_no_prefill: Annotated[
        Literal["queue", "reject"],
        Flag(
            help="while no prefill worker lives; queue: new requests wait, at most --no-worker-timeout; reject: they "
            "get 503 with Retry-After at once; streams that have begun wait --resume-timeout either way"
        ),
    ] = "queue"
    max_attempts: Annotated[
        int,
        Flag(
            help="deaths of a worker that a request may have caused, then an error; one incident counts once",
            at_least=1,
        ),
    ] = 3
    drain_timeout: Annotated[
        float,
        Flag(
            help="after SIGTERM nothing new is taken, and streams may end; then an error event ends them",
            unit="s",
            at_least=0,
            wiring=True,
        ),
    ] = 30.0


@dataclass(frozen=True, slots=True)
class SupervisionOptions:
    """supervision"""

    supervisor_fd: Annotated[
        int,
        Flag(help="open file descriptor to the supervisor; -1: none; set by `baton serve`", at_least=-1, wiring=True),
    ] = -1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """processes"""

    role: Annotated[
        Literal["split", "both"],
        Flag(help="of workers; split: prefill and decode are separate; both: each worker does both, in the same steps"),
    ] = "split"
    prefill: Annotated[int, Flag(help="prefill workers, with --role split", at_least=1)] = 1
    decode: Annotated[int, Flag(help="decode workers, with --role split", at_least=1)] = 1
    aggregated: Annotated[int, Flag(help="workers, with --role both", at_least=1)] = 1
    prefill_tp: Annotated[int, Flag(help="processes that each prefill worker's model is split over", at_least=1)] = 1
    decode_tp: Annotated[int, Flag(help="processes that each decode worker's model is split over", at_least=1)] = 1
    aggregated_tp: Annotated[int, Flag(help="the same of each worker, with --role both", at_least=1)] = 1
    log_dir: Annotated[str, Flag(help="one log file per process goes here; empty: a new folder in the cache")] = ""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """chat"""

    url: Annotated[
        str, Flag(help="of the gateway", pattern="https?://.+", wanted="a URL such as http://127.0.0.1:8000")
    ] = "http://127.0.0.1:8000"
    model: Annotated[str, Flag(help="to ask for; empty: the first served", variable="BATON_CHAT_MODEL")] = ""
    system: Annotated[str, Flag(help="system prompt")] = ""
    api_key: Annotated[tuple[str, ...], Flag(help="key to send; of several the first", secret=True)] = ()
    max_tokens: Annotated[int, Flag(help="of one answer; 0: the server's default", unit="tokens", at_least=0)] = 0
    temperature: Annotated[float, Flag(help="of the sampler; -1: the server's default", at_least=-1, at_most=2)] = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCommand:
    """The HTTP front. Any number of them; starts in about a second."""

    model: ModelOptions = field(default_factory=ModelOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    log: LogOptions = field(default_factory=LogOptions)
    supervision: SupervisionOptions = field(default_factory=SupervisionOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCommand:
    """A prefill worker: computes prompts, samples token 0 and hands the KV blocks over."""

    model: ModelOptions = field(default_factory=ModelOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    transfer: TransferOptions = field(default_factory=TransferOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    log: LogOptions = field(default_factory=LogOptions)
    rank: RankOptions = field(default_factory=RankOptions)
    supervision: SupervisionOptions = field(default_factory=SupervisionOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCommand:
    """A decode worker: pulls KV blocks and generates tokens in continuous batches."""

    model: ModelOptions = field(default_factory=ModelOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    transfer: TransferOptions = field(default_factory=TransferOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    pacing: PacingOptions = field(default_factory=PacingOptions)
    log: LogOptions = field(default_factory=LogOptions)
    rank: RankOptions = field(default_factory=RankOptions)
    supervision: SupervisionOptions = field(default_factory=SupervisionOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedCommand:
    """A worker that does both: computes prompts in chunks beside the tokens of running sequences."""

    model: ModelOptions = field(default_factory=ModelOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    log: LogOptions = field(default_factory=LogOptions)
    rank: RankOptions = field(default_factory=RankOptions)
    supervision: SupervisionOptions = field(default_factory=SupervisionOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """Everything on one machine: a gateway and workers, started and supervised together."""

    serve: ServeOptions = field(default_factory=ServeOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    transfer: TransferOptions = field(default_factory=TransferOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    pacing: PacingOptions = field(default_factory=PacingOptions)
    log: LogOptions = field(default_factory=LogOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand:
    """Chat with a running gateway in the terminal."""

    chat: ChatOptions = field(default_factory=ChatOptions)


WorkerCommand = PrefillCommand | DecodeCommand | AggregatedCommand

Command = (
    GatewayCommand
    | PrefillCommand
    | DecodeCommand
    | AggregatedCommand
    | ServeCommand
    | ChatCommand
    | BenchCommand
    | BenchGatewayCommand
    | BenchPlanCommand
    | InsideCommand
)

COMMANDS: dict[str, type[Command]] = {
    "serve": ServeCommand,
    "gateway": GatewayCommand,
    "prefill": PrefillCommand,
    "decode": DecodeCommand,
    "aggregated": AggregatedCommand,
    "chat": ChatCommand,
    "bench run": BenchRunCommand,
    "bench goodput": BenchGoodputCommand,
    "bench mixed": BenchMixedCommand,
    "bench gateway": BenchGatewayCommand,
    "bench plan": BenchPlanCommand,
    "bench steps": BenchStepsCommand,
    "bench phases": BenchPhasesCommand,
    "bench perplexity": BenchPerplexityCommand,
    "bench handoff": BenchHandoffCommand,
}


def offered_options(command: type[Command]) -> list[Option]:
    """The options a user may set."""
    return [option for option in options_of(command) if command is not ServeCommand or not option.flag.wiring]


def parse_command(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Read the options of `baton NAME`. Raises: ConfigError; SystemExit(0) after --help."""
    command = COMMANDS[name]
    return parse(command, offered_options(command), argv, environ, prog=f"baton {name}")


def known_variables() -> set[str]:
    """Every BATON_* variable that some command reads."""
    return {option.variable for command in COMMANDS.values() for option in offered_options(command)}
