"""The greedy choice."""

from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest logit of each row, the first of equals.

    logits: [num_rows, vocab_size] fp32
    Returns its value, [num_rows] fp32, and index, [num_rows] int64. A NaN is larger than everything.
    """
    maxima, token_ids = logits.max(1)
    return maxima, token_ids
