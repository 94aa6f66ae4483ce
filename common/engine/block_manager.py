"""Which KV block belongs to whom: paging with prefix sharing. Pure bookkeeping, free of torch.

Every block is in exactly one of three states:

    free      holds nothing
    owned     referenced by one or more sequences (ref count >= 1)
    cached    referenced by nobody, content known by its hash; evicted least recently used first, and after all others
              while a lease protects its content

A full block whose content is final is *sealed*: its hash makes it shareable at once, also while owned.
Source: PagedAttention (Kwon et al., SOSP 2023, section 4) for paging; hash-chained prefix blocks as in
vLLM's automatic prefix caching.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from common.block_hashes import BlockHash
from common.engine.leases import Leases
from common.ids import BlockId, RequestId
from common.kv_layout import HeadChecksums


class BlockManager:
    """Hands out and takes back the blocks of one worker's cache.

    Mutable state: `_refs`, and for sealed blocks `_hashes`/`_checksums` with their index `_by_hash`;
    `_free`, `_cached` and `_protected` hold the unreferenced ones; `_leases` says which cached ones are protected.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._free = deque(BlockId(index) for index in range(num_blocks))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._protected: set[BlockId] = set()
        self._leases = Leases()
        self._hashes: dict[BlockId, BlockHash] = {}
        self._checksums: dict[BlockId, HeadChecksums] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free, or cached and evictable."""
        return len(self._free) + len(self._cached) + len(self._protected)

    @property
    def num_protected(self) -> int:
        """Cached blocks that a lease protects."""
        return len(self._protected)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The longest known run of leading blocks. Takes no reference: use before anything is allocated."""
        matched: list[BlockId] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def num_evictable(self, block_ids: Sequence[BlockId]) -> int:
        """How many of these are cached, so that sharing them takes them off `num_available`."""
        return sum(block_id in self._cached or block_id in self._protected for block_id in block_ids)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Take a reference to blocks that `match` found."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._protected.discard(block_id)
            self._refs[block_id] += 1

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks with unknown content. The caller has looked at `num_available`."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        block_ids = [self._take_one() for _ in range(count)]
        for block_id in block_ids:
            self._refs[block_id] = 1
        return block_ids

    def _take_one(self) -> BlockId:
        if self._free:
            return self._free.popleft()
        while not self._cached:
            self._unprotect(self._leases.end_first())
        block_id, _ = self._cached.popitem(last=False)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: BlockId) -> None:
        block_hash = self._hashes.pop(block_id)
        self._checksums.pop(block_id, None)
        del self._by_hash[block_hash]

    def seal(self, block_id: BlockId, block_hash: BlockHash, checksums: HeadChecksums) -> None:
        """Make an owned, full block shareable. If another block has this content already, that one stays shared."""
        assert self._refs[block_id] > 0, f"block {block_id} is sealed by nobody who owns it"
        if block_hash in self._by_hash:
            return
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        self._checksums[block_id] = checksums

    def checksums(self, block_id: BlockId) -> HeadChecksums:
        """Of a sealed block that `match` found."""
        return self._checksums[block_id]

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Give references back. A prefix is more useful than what follows it, so the tail is evicted first."""
        for block_id in reversed(block_ids):
            assert self._refs[block_id] > 0, f"block {block_id} is released by nobody who owns it"
            self._refs[block_id] -= 1
            if self._refs[block_id] > 0:
                continue
            if block_id not in self._hashes:
                self._free.append(block_id)
            elif self._hashes[block_id] in self._leases:
                self._protected.add(block_id)
            else:
                self._cached[block_id] = None

    def protect(self, holder: RequestId, hashes: Sequence[BlockHash], until_s: float) -> None:
        """While it is cached, evict this content after all else, until then or until `unprotect`. See `Leases`."""
        self._unprotect(self._leases.grant(holder, hashes, until_s))
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is not None and block_id in self._cached:
                del self._cached[block_id]
                self._protected.add(block_id)

    def renew(self, holder: RequestId, until_s: float) -> None:
        """Protect what the holder protects for longer, in a time that does not depend on how much it is."""
        self._leases.renew(holder, until_s)

    def unprotect(self, holder: RequestId) -> None:
        self._unprotect(self._leases.end(holder))

    def unprotect_expired(self, now: float) -> None:
        self._unprotect(self._leases.end_expired(now))

    def _unprotect(self, hashes: Sequence[BlockHash]) -> None:
        """It counts as used until now. Of each prefix the tail goes first."""
        for block_hash in reversed(hashes):
            block_id = self._by_hash.get(block_hash)
            if block_id is not None and block_id in self._protected:
                self._protected.remove(block_id)
                self._cached[block_id] = None

    def check(self) -> None:
        """Assert that every block is in exactly one state and that the index is right. For tests."""
        owned = {BlockId(index) for index, refs in enumerate(self._refs) if refs > 0}
        assert not self._cached.keys() & self._protected, "a block is cached twice"
        free, cached = set(self._free), self._cached.keys() | self._protected
        assert len(free) == len(self._free), "a block is free twice"
        assert not (owned & free | owned & cached | free & cached), "a block is in two states"
        assert len(owned) + len(free) + len(cached) == self.num_blocks, "a block is in no state"
        assert {self._by_hash[h] for h in self._hashes.values()} == set(self._hashes), "hash index is off"
        assert not free & set(self._hashes), "a free block has a hash"
        wanted = {block_id for block_id in cached if self._hashes[block_id] in self._leases}
        assert wanted == self._protected, "protection is off"
