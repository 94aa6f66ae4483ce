"""The one place that chooses between implementations of the ops."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.blocks import (
    AttentionBlock,
    AttentionWeights,
    Decoder,
    Embedding,
    Head,
    LayerWeights,
    LinearWeight,
    MLPBlock,
    MLPWeights,
    NormWeight,
)
from kernels.composed import ComposedOps
from kernels.cpu.cores import Cores
from kernels.cpu.ops import CpuOps
from kernels.errors import NoOps
from kernels.group import Group
from kernels.sample import Draws

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Ops(Protocol):
    """What a model is built from: given to it once, never looked up."""

    @property
    def name(self) -> str: ...

    def linear_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which the ops want the weights of linears, for a model that computes in dtype."""
        ...

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What hidden states are between blocks, for weights of this dtype."""
        ...

    def embedding(self, weight: Tensor) -> Embedding:
        """weight: [vocab_size, hidden_size]."""
        ...

    def tied(self, norm: NormWeight, weight: Tensor) -> tuple[Embedding, Head]:
        """Embedding and head with one weight, [vocab_size, hidden_size] as a linear's."""
        ...

    def attention(self, weights: AttentionWeights) -> AttentionBlock: ...

    def mlp(self, weights: MLPWeights) -> MLPBlock: ...

    def decoder(self, layers: Iterable[LayerWeights]) -> Decoder:
        """Takes one layer's weights at a time."""
        ...

    def head(self, norm: NormWeight, weight: LinearWeight) -> Head: ...

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See kernels/argmax.py."""
        ...

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """See kernels/sample.py."""
        ...

    def gather_blocks(self, blocks: Tensor, block_ids: Tensor, first_head: int, staging: Tensor) -> None:
        """See kernels/staging.py."""
        ...

    def scatter_blocks(self, staging: Tensor, blocks: Tensor, block_ids: Tensor, first_head: int) -> None:
        """See kernels/staging.py."""
        ...

    def allow_binding(self) -> None:
        """The threads that compute, the caller's among them, may be bound to cores from now on."""
        ...

    def claim_cores(self) -> None:
        """A step follows soon: whoever has cores of ours on loan is to be off them by then."""
        ...

    def begin_step(self) -> None:
        """Before the blocks of a step are called."""
        ...

    def rest(self) -> None:
        """There is no next step yet: what the ops hold ready for it may serve others."""
        ...

    @property
    def num_helped(self) -> int:
        """Tasks of steps that were run on other cores than the caller's, so far."""
        ...

    def others_want_cores(self) -> bool:
        """Whether another worker of this host has work that our cores could help with."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsRequest:
    """What a model asks of its ops; not all of them can do everything."""

    dtype: torch.dtype
    head_dim: int
    block_size: int
    device: torch.device = CPU
    quantization: str = "none"


NAMES = ("auto", "cpu", "triton", "reference")


def choose_ops(name: str, request: OpsRequest, cores: Cores, group: Group | None = None) -> Ops:
    """The ops called name; `auto` takes the best that the device has and says so when these are the reference.

    cores: which the native ops may use
    group: of the ranks that have a part of every block each, this one among them; decoders add up the parts
    Raises: ValueError when there are none of that name, or they cannot do what is asked.
    """
    if name not in NAMES:
        raise ValueError(f"kernels must be one of {', '.join(NAMES)}, got {name!r}")
    best = "cpu" if request.device == CPU else "triton"
    try:
        match best if name == "auto" else name:
            case "cpu":
                return _native_ops(request, cores, group)
            case "triton":
                return _triton_ops(request, group)
            case _:
                return _reference_ops(request, group)
    except NoOps as error:
        if name != "auto" or request.quantization != "none":
            raise ValueError(f"kernels {best if name == 'auto' else name}: {error}") from error
        logger.warning("slow: plain PyTorch ops are used, since %s", error)
        return _reference_ops(request, group)


def _native_ops(request: OpsRequest, cores: Cores, group: Group | None) -> Ops:
    if request.device != CPU:
        raise NoOps(f"they compute on a CPU, not on {request.device}")
    sizes = request.dtype, request.head_dim, request.block_size
    return CpuOps(*sizes, cores, quantization=request.quantization, group=group)


def _triton_ops(request: OpsRequest, group: Group | None) -> Ops:
    try:
        from kernels.triton.ops import small_ops  # noqa: PLC0415: Triton is an extra
    except ImportError as error:
        raise NoOps(f"Triton cannot be imported, the extra `gpu` brings it: {error}") from error
    return ComposedOps(*small_ops(request.device, request.head_dim, request.quantization), group)


def _reference_ops(request: OpsRequest, group: Group | None) -> Ops:
    if request.quantization != "none":
        raise NoOps(f"quantization {request.quantization} is not there")
    return ComposedOps(group=group)
