"""The blocks of kernels/blocks.py in C++. Hidden states between blocks are fp32."""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kernels.blocks import (
    AttentionWeights,
    Decoder,
    Embedding,
    LayerWeights,
    LinearWeight,
    MLPWeights,
    NormWeight,
)
from kernels.composed import BlockDecoder, ComposedEmbedding
from kernels.cpu.cores import Cores
from kernels.cpu.group import NativeGroup
from kernels.cpu.library import (
    PHASES,
    AttentionStruct,
    BatchStruct,
    CacheStruct,
    MLPStruct,
    NoNativeOps,
    best_library,
    load_library,
)
from kernels.cpu.memory import HugeBuffer, HugeMemory
from kernels.cpu.packing import LANES, alternate, pack, pack_quantised
from kernels.cpu.structs import OwnedLinear, OwnedNorm, addresses, batch_struct, cache_struct
from kernels.group import Group, GroupBroken
from kernels.paged_kv import LayerKV
from kernels.sample import sample
from kernels.staging import gather_blocks, scatter_blocks
from kernels.token_rows import TokenRows

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_MAX_HEAD_DIM = 256


class CpuOps:
    """Runs blocks on the calling thread and its helpers. One thread at a time may call it.

    Owns the helpers, which end with it. Mutable state: the last step's rows as the library takes them, and the hidden
    states, which the next step overwrites.
    """

    sample = staticmethod(sample)
    gather_blocks = staticmethod(gather_blocks)
    scatter_blocks = staticmethod(scatter_blocks)

    def __init__(
        self,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        cores: Cores,
        *,
        quantization: str = "none",
        level: str | None = None,
        group: Group | None = None,
    ) -> None:
        """quantization: of linears, by the names of packing.py.

        level: an instruction level by the names of build.py; None: the best of this machine
        group: of the ranks that have a part of every block each, this one among them; None: blocks are whole

        Raises: NoNativeOps.
        """
        if dtype not in _SUFFIXES:
            raise NoNativeOps(f"the native ops compute in {', '.join(map(str, _SUFFIXES))}, not in {dtype}")
        if head_dim % LANES or head_dim > _MAX_HEAD_DIM:
            raise NoNativeOps(f"head_dim must be a multiple of {LANES} up to {_MAX_HEAD_DIM}, got {head_dim}")
        if block_size % LANES:
            raise NoNativeOps(f"block_size must be a multiple of {LANES}, got {block_size}")
        if quantization != "none" and dtype != torch.bfloat16:
            raise NoNativeOps(f"quantization {quantization} needs dtype bfloat16, got {dtype}")
        self._quantization = quantization
        self._group = group
        self.level, self._library = (level, load_library(level)) if level else best_library()
        self.name = f"cpu ({self.level})" if quantization == "none" else f"cpu ({self.level}, {quantization})"
        self._dtype, self._suffix = dtype, _SUFFIXES[dtype]
        self._cores = cores  # keeps the board mapped
        address = ctypes.addressof(ctypes.c_char.from_buffer(cores.board))
        self._worker = self._library.baton_worker(address, cores.num_cores, cores.worker, cores.borrows)
        self._memory = HugeMemory()
        self._rows: TokenRows | None = None
        self._batch = BatchStruct()
        self._hidden_memory = HugeBuffer()
        self._hidden: list[Tensor] = []
        self._phase_ns = (ctypes.c_uint64 * 0)()

    def __del__(self) -> None:
        if worker := getattr(self, "_worker", None):
            self._library.baton_delete(worker)

    def linear_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._quantization == "none" else torch.float32

    def pack(self, weight: Tensor, bias: Tensor | None) -> OwnedLinear:
        return self._pack(weight, bias, self._quantization)

    def pack_head(self, weight: Tensor, bias: Tensor | None) -> OwnedLinear:
        """Never in less than 8 bits: every error of a logit is seen, and GGUF's converters do the same."""
        return self._pack(weight, bias, "none" if self._quantization == "none" else "int8")

    def _pack(self, weight: Tensor, bias: Tensor | None, quantization: str) -> OwnedLinear:
        if quantization == "none":
            return OwnedLinear(pack(weight, bias, self._memory))
        return OwnedLinear(pack_quantised(weight, bias, quantization, self._memory))

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def allow_binding(self) -> None:
        self._library.baton_allow_binding(self._worker)

    def claim_cores(self) -> None:
        self._library.baton_claim(self._worker)

    def begin_step(self) -> None:
        self._library.baton_begin(self._worker)

    def rest(self) -> None:
        self._library.baton_rest(self._worker)

    def others_want_cores(self) -> bool:
        """Whether another worker of this host has work."""
        return bool(self._library.baton_others_want(self._worker))

    @property
    def num_helped(self) -> int:
        """Tasks that helpers have run so far."""
        return self._library.baton_num_helped(self._worker)

    def time_phases(self) -> Callable[[], dict[str, float]]:
        """From now on the blocks' time is counted. Returns what tells the seconds of each phase so far, by PHASES."""
        self._phase_ns = (ctypes.c_uint64 * len(PHASES))()
        self._library.baton_time_phases(self._worker, self._phase_ns)
        return lambda: {name: ns / 1e9 for name, ns in zip(PHASES, self._phase_ns, strict=True)}

    def embedding(self, weight: Tensor) -> Embedding:
        return ComposedEmbedding(weight)

    def tied(self, norm: NormWeight, weight: Tensor) -> tuple[Embedding, "CpuHead"]:
        head = CpuHead(self, norm, LinearWeight(weight))
        if self._quantization == "none":
            return PackedEmbedding(self, head.linear, weight.shape[1]), head
        return ComposedEmbedding(weight.to(self._dtype)), head

    def attention(self, weights: AttentionWeights) -> "CpuAttention":
        return CpuAttention(self, weights)

    def mlp(self, weights: MLPWeights) -> "CpuMLP":
        return CpuMLP(self, weights)

    def decoder(self, layers: Iterable[LayerWeights]) -> Decoder:
        if self._group is None or isinstance(self._group, NativeGroup):
            return CpuDecoder(self, layers, self._group)
        return BlockDecoder([(self.attention(layer.attention), self.mlp(layer.mlp)) for layer in layers], self._group)

    def head(self, norm: NormWeight, weight: LinearWeight) -> "CpuHead":
        return CpuHead(self, norm, weight)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, size = logits.shape
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        maxima, indices = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        pointers = maxima.data_ptr(), indices.data_ptr()
        self._library.baton_argmax(self._worker, logits.data_ptr(), num_rows, size, *pointers)
        return maxima, indices

    def function(self, name: str) -> Callable[..., int | None]:
        """One of the library's functions for our dtype, on our worker."""
        return functools.partial(getattr(self._library, f"baton_{name}_{self._suffix}"), self._worker)

    def batch_of(self, rows: TokenRows) -> int:
        """The address of the library's form of rows. All layers of a step ask with the same rows."""
        if rows is not self._rows:
            self._rows, self._batch = rows, batch_struct(rows)
        return ctypes.addressof(self._batch)

    def hidden(self, num_rows: int, hidden_size: int) -> list[Tensor]:
        """Hidden states of a step, each [num_rows, hidden_size]: the residual, attention's output, the MLP's."""
        if not self._hidden or self._hidden[0].shape != (num_rows, hidden_size):
            self._hidden = list(self._hidden_memory.take(3 * num_rows, hidden_size).chunk(3))
        return self._hidden


class CpuAttention:
    """Owns its packed weights."""

    def __init__(self, ops: CpuOps, weights: AttentionWeights) -> None:
        self._ops = ops
        self._norm = OwnedNorm(weights.norm)
        self._qkv = ops.pack(weights.qkv.weight, weights.qkv.bias)
        self._out = ops.pack(weights.out.weight, weights.out.bias)
        self._cos_sin = weights.cos_sin.contiguous()
        self._struct = AttentionStruct(
            self._norm.struct,
            self._qkv.struct,
            self._out.struct,
            self._cos_sin.data_ptr(),
            weights.num_heads,
            weights.num_kv_heads,
            weights.head_dim,
            weights.scale,
        )
        self._hidden_size = self._out.struct.out_size
        self._run = ops.function("attention")
        self.address = ctypes.addressof(self._struct)
        self._kv: LayerKV | None = None
        self._cache = CacheStruct()

    def __call__(self, x: Tensor, residual: Tensor | None, rows: TokenRows, kv: LayerKV) -> tuple[Tensor, Tensor]:
        added = None if residual is None else x.data_ptr()
        own_residual, out, _ = self._ops.hidden(len(x), self._hidden_size)
        residual = own_residual.copy_(x) if residual is None else residual
        batch, cache = self._ops.batch_of(rows), self._cache_of(kv)
        self._run(self.address, batch, cache, added, residual.data_ptr(), out.data_ptr())
        return out, residual

    def _cache_of(self, kv: LayerKV) -> int:
        """The address of the library's form of kv: the same one in every step."""
        if kv is not self._kv:
            self._kv, self._cache = kv, cache_struct(kv)
        return ctypes.addressof(self._cache)


class CpuMLP:
    """Owns its packed weights."""

    def __init__(self, ops: CpuOps, weights: MLPWeights) -> None:
        self._ops = ops
        self._norm = OwnedNorm(weights.norm)
        self._gate_up = ops.pack(*alternate(weights.gate_up.weight, weights.gate_up.bias))
        self._down = ops.pack(weights.down.weight, weights.down.bias)
        self._struct = MLPStruct(self._norm.struct, self._gate_up.struct, self._down.struct)
        self._hidden_size = self._down.struct.out_size
        self._run = ops.function("mlp")
        self.address = ctypes.addressof(self._struct)

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = len(residual)
        out = self._ops.hidden(num_rows, self._hidden_size)[2]
        self._run(self.address, x.data_ptr(), residual.data_ptr(), out.data_ptr(), num_rows)
        return out, residual


class CpuDecoder:
    """All blocks in one call: between two calls Python's own data comes back into the cache, 15 to 30 us for each."""

    def __init__(self, ops: CpuOps, layers: Iterable[LayerWeights], group: NativeGroup | None = None) -> None:
        self._ops = ops
        self._group = group
        self._blocks = [(CpuAttention(ops, layer.attention), CpuMLP(ops, layer.mlp)) for layer in layers]
        self._attention = addresses([attention.address for attention, _ in self._blocks])
        self._mlp = addresses([mlp.address for _, mlp in self._blocks])
        self._run = ops.function("decoder")
        self._layers: Sequence[LayerKV] = ()
        self._caches: list[CacheStruct] = []
        self._cache_addresses = addresses([])

    def __call__(self, x: Tensor, rows: TokenRows, layers: Sequence[LayerKV]) -> tuple[Tensor, Tensor]:
        assert len(layers) == len(self._blocks), f"{len(self._blocks)} layers, the cache has {len(layers)}"
        if layers is not self._layers:
            self._layers, self._caches = layers, [cache_struct(kv) for kv in layers]
            self._cache_addresses = addresses([ctypes.addressof(cache) for cache in self._caches])
        residual, attended, out = self._ops.hidden(*x.shape)
        if x is not residual:
            residual.copy_(x)
        blocks = len(self._blocks), self._attention, self._mlp, self._cache_addresses
        group = None if self._group is None else self._group.address
        hidden = residual.data_ptr(), attended.data_ptr(), out.data_ptr()
        if not self._run(*blocks, group, self._ops.batch_of(rows), *hidden):
            raise GroupBroken("the group was aborted")
        return out, residual


class PackedEmbedding:
    """Reads a token's row out of the panels of the head, so that no second copy of it is kept (57 MB of SmolLM2-135M).

    A row lies in as many cache lines as it has words.
    """

    def __init__(self, ops: CpuOps, linear: OwnedLinear, hidden_size: int) -> None:
        """linear: not quantised."""
        self._ops = ops
        self._linear = linear
        self._hidden_size = hidden_size
        self._run = ops.function("embedding")

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self._ops.hidden(len(token_ids), self._hidden_size)[0]
        linear = ctypes.addressof(self._linear.struct)
        self._run(linear, token_ids.data_ptr(), rows.data_ptr(), len(token_ids), self._hidden_size)
        return rows


class CpuHead:
    """Owns its packed weight, `linear`, and the logits, which the next step overwrites."""

    def __init__(self, ops: CpuOps, norm: NormWeight, weight: LinearWeight) -> None:
        self._ops = ops  # its worker must live as long as we do
        self._run = ops.function("norm_linear")
        self._norm = OwnedNorm(norm)
        self.linear = ops.pack_head(weight.weight, weight.bias)
        self._logits = HugeBuffer()

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        out = self._logits.take(len(residual), self.linear.struct.out_size)
        weights = ctypes.addressof(self._norm.struct), ctypes.addressof(self.linear.struct)
        self._run(*weights, x.data_ptr(), residual.data_ptr(), out.data_ptr(), len(residual))
        return out
