"""The built library and the structures that it takes, field by field as in its headers and blocks.cpp."""

import ctypes
import functools
from ctypes import Structure, c_float, c_int32, c_int64, c_uint64, c_void_p

from kernels.cpu.build import BuildError, build, cpu_levels
from kernels.errors import NoOps


class NoNativeOps(NoOps):
    """The native ops cannot do what is asked, or cannot be built; says why."""


class LinearStruct(Structure):
    """Linear."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("format", c_int32),
    )


class NormStruct(Structure):
    """Norm."""

    _fields_ = (("weight", c_void_p), ("size", c_int64), ("eps", c_float))


class BatchStruct(Structure):
    """Batch."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_decode", c_int32),
        ("num_prefill", c_int32),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("decode_tables", c_void_p),
        ("decode_lens", c_void_p),
        ("prefill_tables", c_void_p),
        ("prefill_lens", c_void_p),
        ("cu_seqlens", c_void_p),
        ("decode_stride", c_int64),
        ("prefill_stride", c_int64),
    )


class CacheStruct(Structure):
    """Cache."""

    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("values_offset", c_int64),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
    )


class AttentionStruct(Structure):
    """AttentionBlock."""

    _fields_ = (
        ("norm", NormStruct),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("cos_sin", c_void_p),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("scale", c_float),
    )


class MLPStruct(Structure):
    """MlpBlock."""

    _fields_ = (("norm", NormStruct), ("gate_up", LinearStruct), ("down", LinearStruct))


class GroupStruct(Structure):
    """Group."""

    _fields_ = (
        ("is_aborted", c_void_p),
        ("ranks", c_void_p),
        ("halves", c_void_p),
        ("half_bytes", c_int64),
        ("rank", c_int32),
        ("size", c_int32),
        ("spin_ns", c_int32),
    )


_SIGNATURES = {
    "attention": (c_void_p,) * 7,
    "mlp": (*(c_void_p,) * 5, c_int32),
    "decoder": (c_void_p, c_int32, *(c_void_p,) * 8),
    "norm_linear": (*(c_void_p,) * 6, c_int32),
    "embedding": (*(c_void_p,) * 4, c_int32, c_int64),
}
"""Structures go by address: a call then costs 1 us, if all that it needs is in the cache."""

_RESULTS = {"decoder": c_int32}
"""Of functions that return something."""

PHASES = ("norm", "qkv", "rope_and_cache", "attention", "out", "gate_up", "down", "all_reduce", "head")
"""Phase: what blocks spend their caller's time on."""

DTYPE_SUFFIXES = ("bf16", "f32")


@functools.cache
def load_library(level: str) -> ctypes.CDLL:
    """Build and load the ops of one instruction level.

    Raises: NoNativeOps.
    """
    try:
        library = ctypes.CDLL(str(build(level)))
    except (BuildError, OSError) as error:
        raise NoNativeOps(str(error)) from error
    if level == "amx" and not library.baton_allows_amx():
        raise NoNativeOps("the system does not let this process use AMX")
    for name, argtypes in _SIGNATURES.items():
        for suffix in DTYPE_SUFFIXES:
            function = getattr(library, f"baton_{name}_{suffix}")
            function.argtypes, function.restype = argtypes, _RESULTS.get(name)
    library.baton_worker.argtypes, library.baton_worker.restype = (c_void_p, c_int32, c_int32, c_int32), c_void_p
    library.baton_others_want.argtypes, library.baton_others_want.restype = (c_void_p,), c_int32
    library.baton_num_helped.argtypes, library.baton_num_helped.restype = (c_void_p,), c_uint64
    library.baton_time_phases.argtypes, library.baton_time_phases.restype = (c_void_p, c_void_p), None
    library.baton_argmax.argtypes, library.baton_argmax.restype = (
        (*[c_void_p] * 2, c_int32, c_int64, *[c_void_p] * 2),
        None,
    )
    library.baton_all_reduce.argtypes, library.baton_all_reduce.restype = (c_void_p, c_void_p, c_int64), c_int32
    library.baton_gather.argtypes, library.baton_gather.restype = (
        (*[c_void_p] * 2, c_int64, *[c_void_p] * 2),
        c_int32,
    )
    for name in ("delete", "allow_binding", "claim", "begin", "rest"):
        function = getattr(library, f"baton_{name}")
        function.argtypes, function.restype = (c_void_p,), None
    return library


def usable_levels() -> list[str]:
    """The levels that this machine can run now, best first."""
    levels = cpu_levels()
    if "amx" in levels:
        try:
            load_library("amx")
        except NoNativeOps:
            levels.remove("amx")
    return levels


def best_library() -> tuple[str, ctypes.CDLL]:
    """Raises: NoNativeOps if not even the best one that the CPU has can be built."""
    level = usable_levels()[0]
    return level, load_library(level)
