"""Options of the commands of `baton bench` that look at the engine from inside, without a server.

What a worker has an option for is named as there, and takes the same variable.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from common.flags import Flag

_flag = partial(Flag, prefix="BENCH_")

_counts = partial(_flag, pattern=r"[1-9]\d*", wanted="whole numbers such as 1,2,4")


@dataclass(frozen=True, slots=True)
class InsideModelOptions:
    """model"""

    model: Annotated[str, Flag(help="folder, .gguf file or hub name; empty for the built-in SmolLM2-135M-Instruct")] = (
        ""
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Flag(help="of weights, activations and KV; auto: bfloat16 where the device computes it natively"),
    ] = "auto"
    block_size: Annotated[int, Flag(help="of a KV block; even", unit="tokens", at_least=2)] = 16


@dataclass(frozen=True, slots=True)
class InsideEngineOptions:
    """engine"""

    cores: Annotated[int, Flag(help="to compute on; 0: those available to the process", at_least=0)] = 0
    kernels: Annotated[
        Literal["auto", "cpu", "triton", "reference"],
        Flag(help="cpu: native; triton: of GPUs; reference: plain PyTorch; auto: the device's own, if they can be had"),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """ranks"""

    tensor_parallel_size: Annotated[int, Flag(help="processes that the model is split over", at_least=1)] = 1
    collectives: Annotated[
        Literal["auto", "shm", "gloo", "nccl"],
        Flag(
            help="how they add up their parts; shm: native; gloo: PyTorch's; nccl: of GPUs; auto: the fastest there is"
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """weights"""

    quantization: Annotated[
        Literal["none", "int8", "int4", "auto"],
        Flag(help="of weights in memory, 32 with a scale; the head has 8 bits at least; auto: what a .gguf file holds"),
    ] = "none"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """steps"""

    curves: Annotated[
        tuple[str, ...],
        _flag(
            help="decode steps by batch and by context, prompts by length",
            pattern="batch|context|prompt",
            wanted="some of batch, context, prompt",
        ),
    ] = ("batch", "context", "prompt")
    batch_sizes: Annotated[tuple[str, ...], _counts(help="of the batch curve", unit="sequences")] = (
        *("1", "2", "4", "8", "16", "32", "64"),
    )
    batch_context: Annotated[int, _flag(help="of every sequence of the batch curve", unit="tokens", at_least=2)] = 512
    contexts: Annotated[tuple[str, ...], _counts(help="of the context curve", unit="tokens")] = (
        *("128", "256", "512", "1024", "2048", "4096", "8192"),
    )
    context_batch: Annotated[int, _flag(help="of the context curve", unit="sequences", at_least=1)] = 8
    prompt_lens: Annotated[tuple[str, ...], _counts(help="of the prompt curve; a step each", unit="tokens")] = (
        *("128", "256", "512", "1024", "2048", "4096", "8192"),
    )
    step_repeats: Annotated[int, _flag(help="of a point, unless it takes too long", at_least=1)] = 15
    point_time: Annotated[
        float, _flag(help="of a point, after which its steps end; it has three at least", unit="s", at_least=0)
    ] = 5.0


@dataclass(frozen=True, slots=True)
class PhaseOptions:
    """phases"""

    phase_batch: Annotated[int, _flag(help="of decode steps", unit="sequences", at_least=1)] = 8
    phase_context: Annotated[int, _flag(help="of each sequence of a decode step", unit="tokens", at_least=2)] = 512
    phase_prompt_len: Annotated[int, _flag(help="of a prompt in one step", unit="tokens", at_least=2)] = 1024
    phase_repeats: Annotated[int, _flag(help="steps of each kind", at_least=1)] = 30


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    """text"""

    text_file: Annotated[str, _flag(help="plain text in UTF-8")] = ""
    quantizations: Annotated[
        tuple[str, ...],
        _flag(
            help="of weights, each compared with the first",
            pattern="none|int8|int4|auto",
            wanted="some of none, int8, int4, auto",
        ),
    ] = ("none", "int8", "int4")
    window: Annotated[int, _flag(help="that the model sees at a time", unit="tokens", at_least=2)] = 1024
    stride: Annotated[
        int, _flag(help="between windows: what a window has in common with the last is not scored again", at_least=1)
    ] = 512
    max_text_tokens: Annotated[int, _flag(help="the text is cut to it; 0: not", unit="tokens", at_least=0)] = 0


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    """handoffs"""

    transports: Annotated[
        tuple[str, ...],
        _flag(help="to measure, one after the other", pattern="shm|tcp|nixl", wanted="some of shm, tcp and nixl"),
    ] = ("shm", "tcp")
    handoff_lens: Annotated[tuple[str, ...], _counts(help="of the prompts whose KV is handed over", unit="tokens")] = (
        "128",
        "512",
        "1024",
        "2048",
        "4096",
        "8192",
    )
    handoff_repeats: Annotated[int, _flag(help="of each length", at_least=1)] = 15


@dataclass(frozen=True, slots=True)
class InsideResultOptions:
    """results"""

    json: Annotated[str, _flag(help="file for everything measured")] = ""


@dataclass(frozen=True, slots=True)
class InsidePlotOptions:
    """plot"""

    plot: Annotated[str, _flag(help="file for a plot: .png or .svg; needs the extra `bench`")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStepsCommand:
    """Measure how the time of a step grows with batch, context and prompt, without a server."""

    model: InsideModelOptions = field(default_factory=InsideModelOptions)
    engine: InsideEngineOptions = field(default_factory=InsideEngineOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    weights: QuantizationOptions = field(default_factory=QuantizationOptions)
    steps: StepOptions = field(default_factory=StepOptions)
    plots: InsidePlotOptions = field(default_factory=InsidePlotOptions)
    results: InsideResultOptions = field(default_factory=InsideResultOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPhasesCommand:
    """Measure where the time of a step goes, beside what the machine could do at most."""

    model: InsideModelOptions = field(default_factory=InsideModelOptions)
    engine: InsideEngineOptions = field(default_factory=InsideEngineOptions)
    ranks: RanksOptions = field(default_factory=RanksOptions)
    weights: QuantizationOptions = field(default_factory=QuantizationOptions)
    phases: PhaseOptions = field(default_factory=PhaseOptions)
    plots: InsidePlotOptions = field(default_factory=InsidePlotOptions)
    results: InsideResultOptions = field(default_factory=InsideResultOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPerplexityCommand:
    """Measure how well the model predicts a text, with weights as they are and quantised."""

    model: InsideModelOptions = field(default_factory=InsideModelOptions)
    engine: InsideEngineOptions = field(default_factory=InsideEngineOptions)
    text: PerplexityOptions = field(default_factory=PerplexityOptions)
    results: InsideResultOptions = field(default_factory=InsideResultOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchHandoffCommand:
    """Measure how fast KV blocks go from one process of this host to another."""

    model: InsideModelOptions = field(default_factory=InsideModelOptions)
    handoff: HandoffOptions = field(default_factory=HandoffOptions)
    plots: InsidePlotOptions = field(default_factory=InsidePlotOptions)
    results: InsideResultOptions = field(default_factory=InsideResultOptions)


InsideCommand = BenchStepsCommand | BenchPhasesCommand | BenchPerplexityCommand | BenchHandoffCommand
