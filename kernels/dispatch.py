"""The one place that chooses between implementations of the ops."""

from kernels.decode_attention import decode_attention
from kernels.linear import pack_linear
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from kernels.rope_and_cache import rope_and_cache
from kernels.silu_and_mul import silu_and_mul


class ReferenceOps:
    """Plain PyTorch, on every device."""

    name = "reference"
    rms_norm = staticmethod(rms_norm)
    rope_and_cache = staticmethod(rope_and_cache)
    prefill_attention = staticmethod(prefill_attention)
    decode_attention = staticmethod(decode_attention)
    silu_and_mul = staticmethod(silu_and_mul)
    pack_linear = staticmethod(pack_linear)


Ops = ReferenceOps
"""What a model is built from: given to it once, never looked up."""

OPS: dict[str, type[Ops]] = {"reference": ReferenceOps}


def choose_ops(name: str = "auto") -> Ops:
    """The ops called name; `auto` takes the best that this machine has.

    Raises: ValueError when there are none of that name.
    """
    if name == "auto":
        name = "reference"
    if name not in OPS:
        raise ValueError(f"kernels must be one of auto, {', '.join(OPS)}, got {name!r}")
    return OPS[name]()
