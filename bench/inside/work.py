"""What each phase of a step must read and compute, whatever the implementation. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.engine.model_config import ModelConfig
from common.kv_layout import DTYPE_BYTES

_SCALE_BYTES = 4 / 32
"""A scale and an offset in fp16 for 32 weights."""
_WEIGHT_BYTES = {"int8": 1 + _SCALE_BYTES, "int4": 0.5 + _SCALE_BYTES}


@dataclass(frozen=True, slots=True)
class Work:
    """num_bytes: of weights, KV or logits, read once;  num_flops: a multiplication and an addition are two."""

    num_bytes: float
    num_flops: float


@dataclass(frozen=True, slots=True)
class StepShape:
    """num_rows: tokens that are computed;  num_sampled: of them those whose logits are wanted.

    num_keys:   that are read from the cache
    num_pairs:  of a query and a key that it may look at
    """

    num_rows: int
    num_sampled: int
    num_keys: int
    num_pairs: int


def decode_shape(contexts: Sequence[int]) -> StepShape:
    """A token of each sequence."""
    return StepShape(len(contexts), len(contexts), sum(contexts), sum(contexts))


def prompt_shape(num_tokens: int) -> StepShape:
    return StepShape(num_tokens, 1, num_tokens, num_tokens * (num_tokens + 1) // 2)


def work_of_phases(config: ModelConfig, dtype: str, quantization: str, shape: StepShape) -> Mapping[str, Work]:
    """By the names of kernels.cpu.library.PHASES, of all layers, and `sampling`; norms and rotations are left out.

    quantization: none, int8 or int4
    """
    plain = DTYPE_BYTES[dtype]
    linear_bytes = _WEIGHT_BYTES.get(quantization, plain)
    head_bytes = plain if quantization == "none" else _WEIGHT_BYTES["int8"]
    layers, hidden, dim = config.num_layers, config.hidden_size, config.head_dim

    def linear(num_weights: int, num_rows: int, weight_bytes: float) -> Work:
        return Work(num_weights * weight_bytes, 2.0 * num_weights * num_rows)

    attention_bytes = layers * shape.num_keys * 2 * config.num_kv_heads * dim * plain
    return {
        "qkv": linear(
            layers * hidden * (config.num_heads + 2 * config.num_kv_heads) * dim, shape.num_rows, linear_bytes
        ),
        "attention": Work(attention_bytes, 4.0 * layers * shape.num_pairs * config.num_heads * dim),
        "out": linear(layers * hidden * config.num_heads * dim, shape.num_rows, linear_bytes),
        "gate_up": linear(2 * layers * hidden * config.intermediate_size, shape.num_rows, linear_bytes),
        "down": linear(layers * hidden * config.intermediate_size, shape.num_rows, linear_bytes),
        "head": linear(config.vocab_size * hidden, shape.num_sampled, head_bytes),
        "sampling": Work(4.0 * config.vocab_size * shape.num_sampled, 0),
    }
