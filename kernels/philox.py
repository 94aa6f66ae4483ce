"""Philox4x32-10, a random number generator without state, and the noise that sampling draws from it.

The noise of a token is a function of (seed, position, token_id) and of nothing else, so it does not depend on the
batch, the worker, or what was sampled before:

    key      seed's low 32 bits, seed's high 32 bits
    counter  token_id // 4, position's low 32 bits, position's high 32 bits, 0
    word     token_id % 4 of the four that come out

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011); Random123's known answers.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
WORDS = 4

MAX_GUMBEL = 16.64
"""No noise is larger: its uniform numbers end at 1 - 2**-24."""


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Scramble counters into random words.

    counter:  [..., 4] int64, each a 32-bit word
    key:      [..., 2] int64, each a 32-bit word; broadcast against counter
    Returns [..., 4] int64, each a uniform 32-bit word.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(NUM_ROUNDS):
        # The signed product wraps modulo 2**64, so its bits are those of the unsigned one.
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = _high_word(right) ^ c1 ^ k0, right & MASK
        c2, c3 = _high_word(left) ^ c3 ^ k1, left & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, token_groups: Tensor) -> Tensor:
    """Gumbel noise of the tokens 4 * token_group … 4 * token_group + 3.

    seeds:         [n] int64, holding 64 unsigned bits
    positions:     [n] int64
    token_groups:  [n] int64
    Returns [n, 4] fp32, all finite.
    """
    key = torch.stack((seeds & MASK, _high_word(seeds)), dim=-1)
    counter = (token_groups, positions & MASK, _high_word(positions), torch.zeros_like(positions))
    return -(-_uniform(philox4x32(torch.stack(counter, dim=-1), key)).log()).log()


def _uniform(words: Tensor) -> Tensor:
    """Map words into the open interval (0, 1): 23 bits, and half a step up, are exact in fp32."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def _high_word(x: Tensor) -> Tensor:
    return (x >> 32) & MASK
