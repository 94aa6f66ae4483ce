"""Options of `baton bench`. Its variables are `BATON_BENCH_*`: a machine that serves may also measure."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from common.flags import Flag

LENGTH = r"[1-9]\d*(-[1-9]\d*)?"
LENGTH_WANTED = "a length such as 128, or a range such as 64-256"
_DURATION = r"(\d+(\.\d+)?(ms|s))?"
_DURATION_WANTED = "a duration such as 250ms or 1.5s"
_OBJECTIVE = r"(\d+(\.\d+)?(ms|s|x))?"
_OBJECTIVE_WANTED = "a duration such as 25ms, or a multiple of the unloaded latency such as 5x"

_flag = partial(Flag, prefix="BENCH_")


@dataclass(frozen=True, slots=True)
class BenchServerOptions:
    """servers"""

    url: Annotated[
        tuple[str, ...],
        _flag(
            help="server to measure; repeat it with names to compare: a=http://…, b=http://…",
            pattern=r"([\w.-]+=)?https?://.+",
            wanted="URLs such as http://127.0.0.1:8000, or baton=http://127.0.0.1:8000",
        ),
    ] = ("http://127.0.0.1:8000",)
    model: Annotated[str, _flag(help="to ask for; empty: the first that a server lists")] = ""
    api_key: Annotated[
        tuple[str, ...],
        Flag(help="key to send; of several the first", variable="BATON_API_KEY", secret=True),
    ] = ()
    repeats: Annotated[int, _flag(help="measurements of each server; two servers alternate A B B A", at_least=1)] = 1
    warmup: Annotated[int, _flag(help="requests to each server before the first measurement", at_least=0)] = 2
    timeout: Annotated[float, _flag(help="a request that takes longer is an error", unit="s", at_least=0.1)] = 600.0


@dataclass(frozen=True, slots=True)
class BenchTokenOptions:
    """randomness"""

    seed: Annotated[int, _flag(help="of lengths, arrivals and tokens", at_least=0)] = 0
    vocab_size: Annotated[
        int, _flag(help="token ids of prompts are below it: at most the model's", unit="tokens", at_least=1000)
    ] = 32_000


@dataclass(frozen=True, slots=True)
class BenchRequestOptions:
    """requests"""

    num_requests: Annotated[int, _flag(help="of one measurement; of a trace at most its own", at_least=1)] = 100
    input_len: Annotated[str, _flag(help="of random prompts", unit="tokens", pattern=LENGTH, wanted=LENGTH_WANTED)] = (
        "256"
    )
    output_len: Annotated[
        str, _flag(help="of answers, without a trace", unit="tokens", pattern=LENGTH, wanted=LENGTH_WANTED)
    ] = "64"
    trace: Annotated[
        str, _flag(help=".jsonl of t, in, out, session, hash_ids: replayed, unless another arrival is given")
    ] = ""
    prompts: Annotated[
        str, _flag(help="text prompts, sent as chats: .jsonl, or paragraphs; random tokens without it")
    ] = ""
    prompt_field: Annotated[str, _flag(help="of a .jsonl line; empty: prompt, question, turns, input or text")] = ""
    max_input_len: Annotated[int, _flag(help="a trace's prompts are cut to it; 0: not", unit="tokens", at_least=0)] = 0
    max_output_len: Annotated[int, _flag(help="a trace's answers are cut to it; 0: not", unit="tokens", at_least=0)] = 0


@dataclass(frozen=True, slots=True)
class BenchArrivalOptions:
    """arrivals: concurrency, rate, or the trace's own; concurrency 8 by default"""

    concurrency: Annotated[
        tuple[str, ...],
        _flag(
            help="closed loop: requests under way; several are measured one after another",
            pattern=r"[1-9]\d*",
            wanted="whole numbers such as 1,2,4",
        ),
    ] = ()
    rate: Annotated[
        tuple[str, ...],
        _flag(
            help="open loop: mean of Poisson arrivals; several are measured one after another",
            unit="requests/s",
            pattern=r"\d*[1-9]\d*(\.\d+)?|\d+\.\d*[1-9]\d*",
            wanted="numbers above 0 such as 0.5,1,2",
        ),
    ] = ()
    time_factor: Annotated[
        float, _flag(help="a trace's times are multiplied by it: 0.5 is twice as fast", at_least=0)
    ] = 1.0


@dataclass(frozen=True, slots=True)
class BenchObjectiveOptions:
    """objectives"""

    ttft_slo: Annotated[
        str, _flag(help="longest time to first token", pattern=_OBJECTIVE, wanted=_OBJECTIVE_WANTED)
    ] = ""
    ttft_floor: Annotated[
        str, _flag(help="a multiple asks for no less", pattern=_DURATION, wanted=_DURATION_WANTED)
    ] = ""
    tpot_slo: Annotated[
        str, _flag(help="longest mean time per token after the first", pattern=_OBJECTIVE, wanted=_OBJECTIVE_WANTED)
    ] = ""
    tpot_floor: Annotated[
        str, _flag(help="a multiple asks for no less", pattern=_DURATION, wanted=_DURATION_WANTED)
    ] = ""
    num_unloaded: Annotated[
        int, _flag(help="requests, one at a time, that give the unloaded latencies of the first server", at_least=1)
    ] = 5


@dataclass(frozen=True, slots=True)
class BenchSearchOptions:
    """search"""

    attainment: Annotated[
        float, _flag(help="share of requests that must meet the objectives", at_least=0.01, at_most=1)
    ] = 0.9
    start_rate: Annotated[
        float, _flag(help="probed first; 0: what one request at a time would give", unit="requests/s", at_least=0)
    ] = 0.0
    tolerance: Annotated[
        float, _flag(help="the search ends when the lowest miss is this much above the highest hit", at_least=0.001)
    ] = 0.1
    max_probes: Annotated[int, _flag(help="of one search", at_least=1)] = 12


@dataclass(frozen=True, slots=True)
class BenchMixedOptions:
    """mixed load"""

    num_streams: Annotated[int, _flag(help="that start at 0", at_least=1)] = 4
    stream_input_len: Annotated[int, _flag(help="of a stream's prompt", unit="tokens", at_least=1)] = 128
    stream_output_len: Annotated[int, _flag(help="of a stream", unit="tokens", at_least=1)] = 256
    num_long: Annotated[int, _flag(help="long prompts", at_least=1)] = 6
    long_input_len: Annotated[int, _flag(help="of a long prompt", unit="tokens", at_least=1)] = 2048
    long_output_len: Annotated[int, _flag(help="of the answer to a long prompt", unit="tokens", at_least=1)] = 8
    long_start: Annotated[float, _flag(help="the first long prompt comes at", unit="s", at_least=0)] = 2.0
    long_interval: Annotated[float, _flag(help="between long prompts", unit="s", at_least=0)] = 0.5


@dataclass(frozen=True, slots=True)
class BenchGatewayOptions:
    """streams through a gateway"""

    streams: Annotated[
        tuple[str, ...],
        _flag(
            help="under way at once; several are measured one after another",
            pattern=r"[1-9]\d*",
            wanted="whole numbers such as 1,8,64",
        ),
    ] = ("1", "8", "16", "32", "64")
    gateways: Annotated[
        tuple[str, ...],
        _flag(
            help="that the streams are spread over; several are measured by turns",
            pattern=r"[1-9]\d*",
            wanted="whole numbers such as 1,2",
        ),
    ] = ("1",)
    token_rate: Annotated[float, _flag(help="of each stream", unit="tokens/s", at_least=0.1)] = 50.0
    prefill_ms: Annotated[float, _flag(help="from prompt to first token", unit="ms", at_least=0)] = 20.0
    stream_input_len: Annotated[int, _flag(help="of a prompt", unit="tokens", at_least=1)] = 256
    stream_output_len: Annotated[int, _flag(help="of a stream", unit="tokens", at_least=2)] = 128
    seconds: Annotated[float, _flag(help="measured of each number of streams", unit="s", at_least=0.1)] = 5.0
    model: Annotated[
        str, Flag(help="whose tokenizer the gateway has; empty: the built-in one", variable="BATON_MODEL")
    ] = ""


@dataclass(frozen=True, slots=True)
class BenchResultOptions:
    """results"""

    json: Annotated[str, _flag(help="file for everything measured, each request's times included")] = ""
    plots: Annotated[str, _flag(help="folder for plots as PNG and SVG; needs the extra `bench`")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRunCommand:
    """Measure servers under a load: closed loop, Poisson arrivals or a trace."""

    servers: BenchServerOptions = field(default_factory=BenchServerOptions)
    requests: BenchRequestOptions = field(default_factory=BenchRequestOptions)
    arrivals: BenchArrivalOptions = field(default_factory=BenchArrivalOptions)
    objectives: BenchObjectiveOptions = field(default_factory=BenchObjectiveOptions)
    randomness: BenchTokenOptions = field(default_factory=BenchTokenOptions)
    results: BenchResultOptions = field(default_factory=BenchResultOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchGoodputCommand:
    """Find the highest rate at which enough requests meet their latency objectives."""

    servers: BenchServerOptions = field(default_factory=BenchServerOptions)
    requests: BenchRequestOptions = field(default_factory=BenchRequestOptions)
    objectives: BenchObjectiveOptions = field(default_factory=BenchObjectiveOptions)
    search: BenchSearchOptions = field(default_factory=BenchSearchOptions)
    randomness: BenchTokenOptions = field(default_factory=BenchTokenOptions)
    results: BenchResultOptions = field(default_factory=BenchResultOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchMixedCommand:
    """Measure running streams while long prompts arrive."""

    servers: BenchServerOptions = field(default_factory=BenchServerOptions)
    mixed: BenchMixedOptions = field(default_factory=BenchMixedOptions)
    randomness: BenchTokenOptions = field(default_factory=BenchTokenOptions)
    results: BenchResultOptions = field(default_factory=BenchResultOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchGatewayCommand:
    """Measure what the gateway itself costs and adds: a real one, between clients and workers without a model."""

    gateway: BenchGatewayOptions = field(default_factory=BenchGatewayOptions)
    randomness: BenchTokenOptions = field(default_factory=BenchTokenOptions)
    results: BenchResultOptions = field(default_factory=BenchResultOptions)


BenchCommand = BenchRunCommand | BenchGoodputCommand | BenchMixedCommand
