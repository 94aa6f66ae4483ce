"""Options of the services that compute: see config.py for what a field is."""

from dataclasses import dataclass
from typing import Annotated, Literal

from common.flag_values import ByteSize
from common.flags import Flag

INBOX = r"tcp://.+:(\d+|\*)|ipc://.+"
INBOX_WANTED = "an address such as tcp://127.0.0.1:5550, tcp://0.0.0.0:* or ipc:///run/inbox"


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """worker"""

    gateway: Annotated[
        tuple[str, ...],
        Flag(
            help="addresses of the gateways; a name is looked up every few seconds, and each of its addresses is a "
            "gateway",
            pattern=r"tcp://.+:\d+|ipc://.+",
            wanted="addresses such as tcp://gateway:5550",
            wiring=True,
        ),
    ] = ("tcp://127.0.0.1:5550",)
    bind: Annotated[
        str, Flag(help="ZeroMQ inbox; `*` for any free port", pattern=INBOX, wanted=INBOX_WANTED, wiring=True)
    ] = "tcp://127.0.0.1:*"
    advertise_host: Annotated[
        str,
        Flag(
            help="host by which others reach this worker; empty: that of --bind, or where it listens on all, the one "
            "from which it reaches the gateways",
            wiring=True,
        ),
    ] = ""
    name: Annotated[str, Flag(help="of this worker in logs and metrics; empty: from role and host", wiring=True)] = ""
    kv_cache_memory: Annotated[
        ByteSize, Flag(help="of one worker's KV cache; 0: from the memory that is free", unit="bytes", at_least=0)
    ] = ByteSize(0)
    block_size: Annotated[int, Flag(help="of a KV block; even", unit="tokens", at_least=2)] = 16
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Flag(help="what computes; cuda: GPUs of NVIDIA or AMD, one a process; auto: GPUs if PyTorch finds any"),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Flag(
            help="part of a GPU's memory that the workers of this host may take; the KV cache gets what weights and "
            "the largest step leave of it",
            at_least=0.05,
            at_most=1.0,
        ),
    ] = 0.9
    first_rank: Annotated[
        int,
        Flag(
            help="processes of other workers of this host that come before ours when its GPUs are given out in turn",
            at_least=0,
            wiring=True,
        ),
    ] = 0
    host_ranks: Annotated[
        int,
        Flag(help="processes of all workers of this host, which share its GPUs; 0: only ours", at_least=0, wiring=True),
    ] = 0
    cores: Annotated[
        int, Flag(help="that the workers of this host compute on; 0: those available to the process", at_least=0)
    ] = 0
    core_sharing: Annotated[
        Literal["elastic", "static"],
        Flag(help="elastic: workers that have nothing to do lend their cores; static: each keeps its own"),
    ] = "elastic"
    shared_dir: Annotated[
        str,
        Flag(
            help="folder in which workers of one host meet to share its cores; empty: a worker has --cores for itself",
            wiring=True,
        ),
    ] = ""
    kernels: Annotated[
        Literal["auto", "cpu", "triton", "reference"],
        Flag(
            help="cpu: native, built on first use; triton: of GPUs; reference: plain PyTorch; auto: the device's own, "
            "if they can be had"
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Flag(help="processes that a worker's model is split over", alias="--num-shard", at_least=1, wiring=True),
    ] = 1
    collectives: Annotated[
        Literal["auto", "shm", "gloo", "nccl"],
        Flag(
            help="how a worker's processes add up their parts; shm: native; gloo: PyTorch's; nccl: of GPUs; auto: the "
            "fastest there is"
        ),
    ] = "auto"
    alive_file: Annotated[
        str,
        Flag(
            help="file that is touched ten times a second while the worker is ready, for health checks; empty: none",
            wiring=True,
        ),
    ] = ""
    step_timeout: Annotated[
        float,
        Flag(
            help="a worker whose step takes longer, and ten times what a large one took when it started, ends itself",
            unit="s",
            at_least=1,
        ),
    ] = 60.0
    drain_timeout: Annotated[
        float, Flag(help="after SIGTERM, for running requests to end", unit="s", at_least=0, wiring=True)
    ] = 30.0


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """prefill"""

    max_batch_prefill_tokens: Annotated[int, Flag(help="prompt tokens of one step", unit="tokens", at_least=1)] = 4096
    max_step_ms: Annotated[
        float, Flag(help="length that a step of more than 128 tokens is cut to", unit="ms", at_least=1)
    ] = 150.0


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """decode"""

    max_num_seqs: Annotated[int, Flag(help="sequences of one step", at_least=1)] = 256


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """KV transfer"""

    data_bind: Annotated[
        str, Flag(help="KV transfer; `*` for any free port", pattern=INBOX, wanted=INBOX_WANTED, wiring=True)
    ] = "tcp://127.0.0.1:*"
    kv_transport: Annotated[
        Literal["auto", "tcp", "shm", "nixl"],
        Flag(
            help="how KV blocks travel; auto: shared memory where both ends see it, else tcp; nixl: over RDMA, at both "
            "ends, with the extra `nixl`"
        ),
    ] = "auto"
    kv_lease: Annotated[
        float,
        Flag(
            help="a handoff nobody asks for or renews is dropped after; so long after a request's end its prompt is "
            "evicted last",
            unit="s",
            at_least=0.1,
        ),
    ] = 30.0
    pull_timeout: Annotated[
        float, Flag(help="a KV transfer without progress is given up after", unit="s", at_least=0.1)
    ] = 10.0


@dataclass(frozen=True, slots=True)
class PacingOptions:
    """pacing"""

    itl_target: Annotated[
        float,
        Flag(
            help="time between tokens that steps keep while prompts of this host wait, if they can; 0: no pacing",
            unit="ms",
            at_least=0,
        ),
    ] = 30.0


@dataclass(frozen=True, slots=True)
class RankOptions:
    """rank"""

    rank_fd: Annotated[
        int,
        Flag(
            help="open file descriptor to rank 0 of the worker; -1: this is rank 0; set by rank 0",
            at_least=-1,
            wiring=True,
        ),
    ] = -1
