"""Which content of a cache is still wanted, by whom, and until when. Pure bookkeeping, free of torch."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from common.block_hashes import BlockHash
from common.ids import RequestId


@dataclass(slots=True)
class Lease:
    """What one request wants, and until when, which changes."""

    hashes: Sequence[BlockHash]
    until_s: float


class Leases:
    """At most one lease a request. Several may name the same content.

    A lease names content and no blocks, which may hold something else by the time it ends. All last equally long from
    when they are granted or renewed, so they end in the order of that, and to renew one costs the same however many
    blocks it names.
    Mutable state: the leases, the one that ends first in front, and by how many each content is named.
    """

    def __init__(self) -> None:
        self._leases: OrderedDict[RequestId, Lease] = OrderedDict()
        self._num_holders: Counter[BlockHash] = Counter()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._num_holders

    def grant(self, holder: RequestId, hashes: Sequence[BlockHash], until_s: float) -> list[BlockHash]:
        """In place of what it had so far. Returns what nobody wants any more."""
        self._num_holders.update(hashes)
        dropped = self.end(holder)
        self._leases[holder] = Lease(hashes, until_s)
        return dropped

    def renew(self, holder: RequestId, until_s: float) -> None:
        """Nothing happens when it has none, or none any more."""
        if lease := self._leases.get(holder):
            lease.until_s = until_s
            self._leases.move_to_end(holder)

    def end(self, holder: RequestId) -> list[BlockHash]:
        """Returns what nobody wants any more, in the order in which it was named."""
        lease = self._leases.pop(holder, None)
        return self._drop(lease) if lease else []

    def end_first(self) -> list[BlockHash]:
        """End the one that is the first to run out; there is one. Returns what nobody wants any more."""
        _, lease = self._leases.popitem(last=False)
        return self._drop(lease)

    def end_expired(self, now: float) -> list[BlockHash]:
        """Returns what nobody wants any more."""
        dropped: list[BlockHash] = []
        while self._leases and next(iter(self._leases.values())).until_s < now:
            dropped += self.end_first()
        return dropped

    def _drop(self, lease: Lease) -> list[BlockHash]:
        dropped: list[BlockHash] = []
        for block_hash in lease.hashes:
            self._num_holders[block_hash] -= 1
            if self._num_holders[block_hash] == 0:
                del self._num_holders[block_hash]
                dropped.append(block_hash)
        return dropped
