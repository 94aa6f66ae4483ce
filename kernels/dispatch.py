"""The one place that chooses between implementations of the ops."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.argmax import argmax
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
    ReferenceAttention,
    ReferenceDecoder,
    ReferenceEmbedding,
    ReferenceHead,
    ReferenceMLP,
)
from kernels.cpu.cores import Cores
from kernels.cpu.library import NoNativeOps
from kernels.cpu.ops import CpuOps
from kernels.group import Group

logger = logging.getLogger(__name__)


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


class ReferenceOps:
    """Plain PyTorch, on every device."""

    name = "reference"
    embedding = staticmethod(ReferenceEmbedding)
    attention = staticmethod(ReferenceAttention)
    mlp = staticmethod(ReferenceMLP)
    head = staticmethod(ReferenceHead)
    argmax = staticmethod(argmax)

    def __init__(self, group: Group | None = None) -> None:
        """group: see choose_ops."""
        self._group = group

    def decoder(self, layers: Iterable[LayerWeights]) -> Decoder:
        return ReferenceDecoder(layers, self._group)

    def tied(self, norm: NormWeight, weight: Tensor) -> tuple[Embedding, Head]:
        return ReferenceEmbedding(weight), ReferenceHead(norm, LinearWeight(weight))

    def linear_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def begin_step(self) -> None:
        pass

    def rest(self) -> None:
        pass

    @property
    def num_helped(self) -> int:
        return 0

    def others_want_cores(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsRequest:
    """What a model asks of its ops; not all of them can do everything."""

    dtype: torch.dtype
    head_dim: int
    block_size: int
    quantization: str = "none"


NAMES = ("auto", "cpu", "reference")


def choose_ops(name: str, request: OpsRequest, cores: Cores, group: Group | None = None) -> Ops:
    """The ops called name; `auto` takes the best that this machine has and says so when that is not native.

    cores: which the native ops may use
    group: of the ranks that have a part of every block each, this one among them; decoders add up the parts
    Raises: ValueError when there are none of that name, or they cannot do what is asked.
    """
    if name not in NAMES:
        raise ValueError(f"kernels must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "reference":
        if request.quantization != "none":
            raise ValueError(f"quantization {request.quantization} is not there for kernels reference")
        return ReferenceOps(group)
    try:
        sizes = request.dtype, request.head_dim, request.block_size
        return CpuOps(*sizes, cores, quantization=request.quantization, group=group)
    except NoNativeOps as error:
        if name == "cpu" or request.quantization != "none":
            raise ValueError(f"kernels cpu: {error}") from error
        logger.warning("slow: plain PyTorch ops are used, since %s", error)
        return ReferenceOps(group)
