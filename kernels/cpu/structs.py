"""What the library takes, made of what Python has: weights with the memory that they are in, rows of a step, caches."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from kernels.blocks import NormWeight
from kernels.cpu.library import BatchStruct, CacheStruct, LinearStruct, NormStruct
from kernels.cpu.packing import PackedWeight
from kernels.paged_kv import LayerKV
from kernels.token_rows import TokenRows


class OwnedNorm:
    """A norm's weight in fp32, and the structure that points into it."""

    def __init__(self, norm: NormWeight) -> None:
        self._weight = norm.weight.float().contiguous()
        self.struct = NormStruct(self._weight.data_ptr(), len(norm.weight), norm.eps)


class OwnedLinear:
    """A packed weight, and the structure that points into it."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed
        self.struct = LinearStruct(
            packed.panels.data_ptr(),
            _address(packed.bias),
            packed.in_size,
            packed.out_size,
            packed.format,
        )


def addresses(values: Sequence[int]) -> "ctypes.Array[ctypes.c_void_p]":
    """Of structures, which must outlive what is done with them."""
    return (ctypes.c_void_p * len(values))(*values)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def batch_struct(rows: TokenRows) -> BatchStruct:
    """Points into the rows' tensors, which must outlive it."""
    decode, prefill = rows.decode, rows.prefill
    struct = BatchStruct(
        len(rows.positions), rows.num_decode_rows, 0, rows.positions.data_ptr(), rows.slot_mapping.data_ptr()
    )
    if decode:
        struct.decode_tables, struct.decode_lens = decode.block_tables.data_ptr(), decode.context_lens.data_ptr()
        struct.decode_stride = decode.block_tables.stride(0)
    if prefill:
        struct.num_prefill = len(prefill.context_lens)
        struct.prefill_tables, struct.prefill_lens = prefill.block_tables.data_ptr(), prefill.context_lens.data_ptr()
        struct.cu_seqlens, struct.prefill_stride = prefill.cu_seqlens.data_ptr(), prefill.block_tables.stride(0)
    return struct


def cache_struct(kv: LayerKV) -> CacheStruct:
    """Points into the layer's cache, which must outlive it."""
    assert kv.keys[0, 0].is_contiguous(), "a head's keys are one piece"
    assert kv.values[0, 0].is_contiguous(), "a head's values are one piece"
    strides = kv.keys.stride()[:2]
    assert kv.values.stride()[:2] == strides, "keys and values lie alike"
    return CacheStruct(
        kv.keys.data_ptr(),
        *(stride * kv.dtype.itemsize for stride in strides),
        kv.values.data_ptr() - kv.keys.data_ptr(),
        kv.num_kv_heads,
        kv.block_size,
        kv.head_dim,
    )
