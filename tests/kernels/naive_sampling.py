"""Sampling written token by token in plain Python and fp64: slow, obvious, and independent of the kernels."""

import math
from collections import Counter
from collections.abc import Sequence


def penalized(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> list[float]:
    counts = Counter(output)
    seen = set(prompt) | set(output)
    result = []
    for token_id, logit in enumerate(logits):
        if token_id in seen:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * counts[token_id]
        if counts[token_id]:
            logit -= presence
        result.append(logit)
    return result


def support(logits: Sequence[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that may be drawn: min_p and top_k first, then top_p of the mass that is left."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    largest = logits[order[0]]
    weights = {token_id: math.exp(logits[token_id] - largest) for token_id in order}
    order = [token_id for token_id in order if weights[token_id] >= min_p]
    if top_k:
        order = order[:top_k]
    if top_p >= 1.0:
        return set(order)
    total = math.fsum(weights[token_id] for token_id in order)
    kept: set[int] = set()
    mass = 0.0
    for token_id in order:
        if mass >= top_p * total and kept:
            break
        kept.add(token_id)
        mass += weights[token_id]
    return kept
