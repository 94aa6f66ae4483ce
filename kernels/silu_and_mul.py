"""The gated activation of a Llama MLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """Multiply silu of the first half of each row by the second half.

    x: [num_tokens, 2 * intermediate_size], gate then up
    Returns [num_tokens, intermediate_size] in x's dtype; silu is rounded to it before the product.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
