"""How a step's tokens are shared out. Pure."""

from collections.abc import Sequence

SHORT_SHARE = 0.25
"""Part of each step's budget kept for prompts that fit it whole, so that a long prompt cannot starve short ones."""


def assign_chunks(remaining: Sequence[int], budget: int, short_share: float) -> list[int]:
    """Split one step's token budget over prompts, in their order.

    The open part of the budget goes to the first ones; the rest is for prompts that fit it whole; what those leave goes
    to the first ones again.

    remaining: tokens that each prompt is to get, >= 0.  Returns tokens for each, summing to at most budget.
    """
    chunks = [0] * len(remaining)
    reserve = int(budget * short_share)
    open_budget = budget - reserve
    for index, wanted in enumerate(remaining):
        chunks[index] = min(wanted, open_budget)
        open_budget -= chunks[index]
    left = reserve + open_budget
    for index, wanted in enumerate(remaining):
        missing = wanted - chunks[index]
        if missing <= left:
            chunks[index] += missing
            left -= missing
    for index, wanted in enumerate(remaining):
        extra = min(wanted - chunks[index], left)
        chunks[index] += extra
        left -= extra
    return chunks
