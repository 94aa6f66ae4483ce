"""Which KV block belongs to whom: paging with prefix sharing. Pure bookkeeping, free of torch.

Every block is in exactly one of three states:

    free      holds nothing
    owned     referenced by one or more sequences (ref count >= 1)
    cached    referenced by nobody, content known by its hash; evicted least recently used first

A full block whose content is final is *sealed*: its hash makes it shareable at once, also while owned.
Source: PagedAttention (Kwon et al., SOSP 2023, section 4) for paging; hash-chained prefix blocks as in
vLLM's automatic prefix caching.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from common.block_hashes import BlockHash
from common.ids import BlockId
from common.kv_layout import HeadChecksums


class BlockManager:
    """Hands out and takes back the blocks of one worker's cache.

    Mutable state: `_refs`, and for sealed blocks `_hashes`/`_checksums` with their index `_by_hash`;
    `_free` and `_cached` hold the unreferenced ones.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._free = deque(BlockId(index) for index in range(num_blocks))
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._hashes: dict[BlockId, BlockHash] = {}
        self._checksums: dict[BlockId, HeadChecksums] = {}
        self._by_hash: dict[BlockHash, BlockId] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free, or cached and evictable."""
        return len(self._free) + len(self._cached)

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
        return sum(block_id in self._cached for block_id in block_ids)

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Take a reference to blocks that `match` found."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
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
            if block_id in self._hashes:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def check(self) -> None:
        """Assert that every block is in exactly one state and that the index is right. For tests."""
        owned = {BlockId(index) for index, refs in enumerate(self._refs) if refs > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (owned & free | owned & cached | free & cached), "a block is in two states"
        assert len(owned) + len(free) + len(cached) == self.num_blocks, "a block is in no state"
        assert {self._by_hash[h] for h in self._hashes.values()} == set(self._hashes), "hash index is off"
        assert not free & set(self._hashes), "a free block has a hash"
