"""What a request's parameters do to its logits before a token is chosen. All functions change logits in place."""

from torch import Tensor


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, biases: Tensor) -> None:
    """Add biases[i] to logits[rows[i], token_ids[i]].

    logits: [n, vocab_size] fp32;  rows, token_ids: [num_biases] int64;  biases: [num_biases] fp32
    """
    logits.index_put_((rows, token_ids), biases, accumulate=True)


def mask_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Make the pairs (rows[i], token_ids[i]) impossible."""
    logits[rows, token_ids] = float("-inf")


def penalize(
    logits: Tensor, is_seen: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Make tokens that already occurred less likely.

    logits:         [n, vocab_size] fp32
    is_seen:        [n, vocab_size] bool, occurs in prompt or output
    output_counts:  [n, vocab_size] fp32, occurrences in the output
    repetition, presence, frequency: [n] fp32

    repetition divides positive and multiplies negative logits of what is_seen (CTRL, 2019); frequency is
    subtracted for each occurrence in the output and presence once, after it.
    """
    factor = repetition.unsqueeze(1)
    logits.copy_(logits.where(~is_seen, (logits / factor).where(logits > 0, logits * factor)))
    logits.sub_(frequency.unsqueeze(1) * output_counts)
    logits.sub_(presence.unsqueeze(1) * (output_counts > 0))
