"""The gated activation of a Gemma MLP."""

import torch.nn.functional as F
from torch import Tensor


def gelu_and_mul(x: Tensor) -> Tensor:
    """Multiply gelu of the first half of each row, in its form with tanh, by the second half.

    x: [num_tokens, 2 * intermediate_size], gate then up
    Returns [num_tokens, intermediate_size] in x's dtype; gelu is rounded to it before the product.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
