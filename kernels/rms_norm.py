"""RMSNorm with the residual add that precedes it."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add the residual to x, then scale each row to unit root mean square.

    x, residual:  [num_tokens, hidden_size], one dtype
    weight:       [hidden_size]
    Returns (normalized, x + residual), both in x's dtype; without a residual the second is x itself.
    The sum is rounded to x's dtype before it is squared and the rest is fp32, as transformers' Llama does it:
    in fp32 the results are equal bit for bit. Source: RMSNorm (2019).
    """
    residual = x if residual is None else x + residual
    hidden = residual.float()
    scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (hidden * scale).to(x.dtype), residual
