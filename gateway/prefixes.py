"""What a worker's prefix cache probably holds. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from common.block_hashes import BlockHash

MAX_REMEMBERED = 65_536
"""Blocks of one worker: 10 MB, and prompts of a million tokens where a block has 16."""


class SentPrefixes:
    """Blocks of the prompts that this gateway sent to one incarnation of a worker.

    Other gateways send to it as well, and it evicts as it likes: this is a guess, which costs at most a prompt that is
    computed where it need not be.

    num_blocks: of the worker's cache; it cannot hold more
    Mutable state: hashes, those that were sent least recently first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = min(num_blocks, MAX_REMEMBERED)
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these, from the first on, were sent."""
        return next((index for index, known in enumerate(hashes) if known not in self._hashes), len(hashes))

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """A prompt of these blocks was sent. Its head is forgotten last, as the worker's cache evicts it last."""
        for block_hash in reversed(hashes):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)
