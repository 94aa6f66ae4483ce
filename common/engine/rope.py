"""The frequencies of rotary position embedding, one class per way to stretch them to longer contexts.

The fields are those of Hugging Face's `rope_parameters`, so its configs convert as they are.
Source: RoFormer (2021); transformers' modeling_rope_utils.py for what each rope_type means.
"""

import math

import msgspec
import torch
from torch import Tensor


class DefaultRope(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="default"):
    """Frequencies as trained. magnitude: what cosines and sines are multiplied by."""

    rope_theta: float = 10000.0

    def inv_freq(self, head_dim: int) -> Tensor:
        """[head_dim / 2] fp32, in radians per position, the fastest first."""
        return 1.0 / self._theta_powers(head_dim)

    @property
    def magnitude(self) -> float:
        return 1.0

    def _theta_powers(self, head_dim: int) -> Tensor:
        return self.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


class LinearRope(DefaultRope, frozen=True, kw_only=True, tag_field="rope_type", tag="linear"):
    """All positions squeezed by one factor."""

    factor: float

    def inv_freq(self, head_dim: int) -> Tensor:
        return DefaultRope.inv_freq(self, head_dim) / self.factor


class Llama3Rope(DefaultRope, frozen=True, kw_only=True, tag_field="rope_type", tag="llama3"):
    """Long wavelengths squeezed, short ones kept, a smooth passage between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def inv_freq(self, head_dim: int) -> Tensor:
        kept = DefaultRope.inv_freq(self, head_dim)
        num_turns = self.original_max_position_embeddings / (2 * math.pi / kept)
        share = (num_turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0, 1)
        return (1 - share) * kept / self.factor + share * kept


class YarnRope(DefaultRope, frozen=True, kw_only=True, tag_field="rope_type", tag="yarn"):
    """Squeezed by dimension: those that turn less than beta_slow times in the original context fully,
    those that turn more than beta_fast times not at all. Source: YaRN (2023).
    """

    factor: float
    original_max_position_embeddings: float
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def inv_freq(self, head_dim: int) -> Tensor:
        kept = DefaultRope.inv_freq(self, head_dim)
        first, last = self._dim_of(self.beta_fast, head_dim), self._dim_of(self.beta_slow, head_dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first if last != first else 0.001
        squeezed_share = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        squeezed = 1.0 / (self.factor * self._theta_powers(head_dim))
        return squeezed * squeezed_share + kept * (1 - squeezed_share)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _dim_of(self, num_turns: float, head_dim: int) -> float:
        wavelength = self.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(self.rope_theta))


class FactorsRope(DefaultRope, frozen=True, kw_only=True, tag_field="rope_type", tag="factors"):
    """Each frequency divided by its own factor: how GGUF files state llama3's scaling."""

    factors: list[float]

    def inv_freq(self, head_dim: int) -> Tensor:
        return DefaultRope.inv_freq(self, head_dim) / torch.tensor(self.factors, dtype=torch.float32)


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope | FactorsRope
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors")


def cos_sin_table(rope: Rope, head_dim: int, max_len: int) -> Tensor:
    """[max_len, head_dim] fp32: for each position the cosines of the head_dim / 2 frequencies, then their sines."""
    angles = torch.arange(max_len, dtype=torch.float32).unsqueeze(1) * rope.inv_freq(head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.magnitude
