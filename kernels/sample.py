"""Choose one token from each row of logits."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.philox import MAX_GUMBEL, WORDS, gumbel_noise
from kernels.truncation import truncate


class Draws(NamedTuple):
    """How each row is drawn, tensors of [n].

    temperature, top_p, min_p: fp32; temperature 0 is greedy
    top_k:     int64, 0 is off
    seed:      int64, holding 64 unsigned bits
    position:  int64, of the token to be drawn
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    def at(self, rows: Tensor) -> "Draws":
        return Draws(*(field[rows] for field in self))


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """The most likely token of greedy rows, a drawn one of the others.

    logits: [n, vocab_size] fp32, each row's maximum finite
    Returns [n] int64. Ties go to the lower id. A row's token depends on its logits and draw alone, not on the batch.

    Temperature comes first, then truncation. The draw is the argmax of logits plus Gumbel noise, which is a draw
    from their softmax. Source: Gumbel-max trick; noise in philox.py.
    """
    token_ids = logits.argmax(1)
    rows = (draws.temperature > 0).nonzero().flatten()
    if len(rows):
        token_ids[rows] = _draw(logits[rows], draws.at(rows))
    return token_ids


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    # The maximum becomes 0 before the division, so that no temperature can overflow it.
    temperature = draws.temperature.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    logits = (logits - logits.amax(1, keepdim=True)) / temperature
    is_truncated = (draws.top_k > 0) | (draws.top_p < 1.0) | (draws.min_p > 0.0)
    rows = is_truncated.nonzero().flatten()
    if len(rows):
        some = draws.at(rows)
        logits[rows] = truncate(logits[rows], some.top_k, some.top_p, some.min_p)
    return _noisy_argmax(logits, draws.seed, draws.position)


def _noisy_argmax(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Argmax of logits plus noise. The maximum of each row of logits is 0; logits are overwritten.

    What cannot win even with the most noise that there is gets none: the token to beat is the most likely one
    with its own noise. Of a language model's vocabulary that leaves a few percent. Noise comes four tokens at a time.
    """
    logits = F.pad(logits, (0, -logits.shape[1] % WORDS), value=float("-inf"))
    top = logits.argmax(1, keepdim=True)
    to_beat = gumbel_noise(seeds, positions, top.flatten() // WORDS).gather(1, top % WORDS)
    logits.masked_fill_(logits < to_beat - MAX_GUMBEL, float("-inf"))
    groups = logits.unflatten(1, (-1, WORDS))
    rows, group_ids = groups.amax(2).isfinite().nonzero(as_tuple=True)
    groups[rows, group_ids] += gumbel_noise(seeds[rows], positions[rows], group_ids)
    return logits.argmax(1)
