"""Options of `baton bench plan`. What a worker has an option for is named as there, and takes the same variable."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from common.bench_config import (
    LENGTH,
    LENGTH_WANTED,
    BenchObjectiveOptions,
    BenchSearchOptions,
    BenchTokenOptions,
)
from common.flags import Flag
from common.worker_config import DecodeOptions, PacingOptions, PrefillOptions

_flag = partial(Flag, prefix="BENCH_")


@dataclass(frozen=True, slots=True)
class PlanCostOptions:
    """costs"""

    steps: Annotated[
        tuple[str, ...],
        _flag(help="files of `baton bench steps --json`, on the cores of one host; all curves of them together"),
    ] = ()
    shared_steps: Annotated[
        tuple[str, ...],
        _flag(
            help="the same while others compute: all workers are on one host then, and lend their cores; none: each"
            " has a host for itself"
        ),
    ] = ()
    handoffs: Annotated[str, _flag(help="file of `baton bench handoff --json`")] = ""
    handoff_transport: Annotated[Literal["shm", "tcp"], _flag(help="which of those handoffs")] = "tcp"
    link_ms: Annotated[
        float,
        _flag(
            help="of a message between client and gateway, or gateway and worker, the gateway's own work included",
            unit="ms",
            at_least=0,
        ),
    ] = 1.0


@dataclass(frozen=True, slots=True)
class PlanPoolOptions:
    """pools"""

    pools: Annotated[
        tuple[str, ...],
        _flag(
            help="prefill and decode workers to plan for, each compared with the first",
            pattern=r"[1-9]\d*:[1-9]\d*",
            wanted="prefill and decode workers such as 1:1,2:4",
        ),
    ] = ()
    split: Annotated[
        tuple[str, ...],
        _flag(
            help="numbers of workers to split in every way, for the best one",
            pattern=r"[2-9]|[1-9]\d+",
            wanted="numbers of workers from 2 on",
        ),
    ] = ()
    kv_cache_tokens: Annotated[int, _flag(help="that a worker's KV cache holds", unit="tokens", at_least=16)] = 65_536
    block_size: Annotated[int, Flag(help="of a KV block; even", unit="tokens", at_least=2)] = 16


@dataclass(frozen=True, slots=True)
class PlanRequestOptions:
    """requests: Poisson arrivals"""

    traces: Annotated[
        tuple[str, ...],
        _flag(help=".jsonl of t, in, out, session, hash_ids; each trace is planned for; random requests without one"),
    ] = ()
    requests_per_worker: Annotated[
        int,
        _flag(help="of one probe; those of a trace again, with other tokens, where they do not suffice", at_least=1),
    ] = 100
    input_len: Annotated[str, _flag(help="of random prompts", unit="tokens", pattern=LENGTH, wanted=LENGTH_WANTED)] = (
        "256"
    )
    output_len: Annotated[
        str, _flag(help="of answers, without a trace", unit="tokens", pattern=LENGTH, wanted=LENGTH_WANTED)
    ] = "64"
    max_input_len: Annotated[int, _flag(help="a trace's prompts are cut to it; 0: not", unit="tokens", at_least=0)] = 0
    max_output_len: Annotated[int, _flag(help="a trace's answers are cut to it; 0: not", unit="tokens", at_least=0)] = 0


@dataclass(frozen=True, slots=True)
class PlanResultOptions:
    """results"""

    measured: Annotated[
        str,
        _flag(
            help="file of `baton bench run --json`: not planned, its runs are simulated on the first of --pools"
            " (1:1 by default), and compared"
        ),
    ] = ""
    json: Annotated[str, _flag(help="file for all results, each probe included")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlanCommand:
    """Plan pools: the goodput of deployments that are simulated, with the costs measured on a machine."""

    costs: PlanCostOptions = field(default_factory=PlanCostOptions)
    pools: PlanPoolOptions = field(default_factory=PlanPoolOptions)
    prefill: PrefillOptions = field(default_factory=PrefillOptions)
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    pacing: PacingOptions = field(default_factory=PacingOptions)
    requests: PlanRequestOptions = field(default_factory=PlanRequestOptions)
    objectives: BenchObjectiveOptions = field(default_factory=BenchObjectiveOptions)
    search: BenchSearchOptions = field(default_factory=BenchSearchOptions)
    randomness: BenchTokenOptions = field(default_factory=BenchTokenOptions)
    results: PlanResultOptions = field(default_factory=PlanResultOptions)
