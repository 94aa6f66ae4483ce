"""Blocks are in exactly one state, and prefixes are shared by content."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.block_hashes import hash_blocks
from common.engine.block_manager import BlockManager
from common.ids import BlockId, RequestId


def seal_all(blocks: BlockManager, block_ids: list[BlockId], token_ids: list[int]) -> None:
    for block_id, block_hash in zip(block_ids, hash_blocks(token_ids, blocks.block_size), strict=False):
        blocks.seal(block_id, block_hash, checksums=(block_id,))


def test_released_blocks_are_found_again_by_their_tokens() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    owned = blocks.allocate(2)
    seal_all(blocks, owned, [1, 2, 3, 4])
    blocks.release(owned)
    assert blocks.match(hash_blocks([1, 2, 3, 4, 5], 2)) == owned
    assert blocks.match(hash_blocks([1, 2, 9, 9], 2)) == owned[:1]
    assert blocks.match(hash_blocks([9, 2, 3, 4], 2)) == []


def test_the_tail_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    old, new = blocks.allocate(2), blocks.allocate(2)
    seal_all(blocks, old, [1, 2])
    seal_all(blocks, new, [3, 4])
    blocks.release(old)
    blocks.release(new)
    blocks.allocate(1)
    assert len(blocks.match(hash_blocks([1, 2], 1))) == 1
    blocks.allocate(1)
    assert blocks.match(hash_blocks([1, 2], 1)) == []
    assert len(blocks.match(hash_blocks([3, 4], 1))) == 2


def test_a_shared_block_is_free_only_when_everybody_released_it() -> None:
    blocks = BlockManager(num_blocks=2, block_size=1)
    owned = blocks.allocate(1)
    seal_all(blocks, owned, [1])
    blocks.share(owned)
    blocks.release(owned)
    assert blocks.num_owned == 1
    blocks.release(owned)
    assert blocks.num_owned == 0


def test_a_salt_keeps_users_apart() -> None:
    assert hash_blocks([1, 2], 2, salt="a") != hash_blocks([1, 2], 2, salt="b")


@given(st.lists(st.integers(0, 2**31), max_size=40), st.integers(1, 8))
def test_a_hash_depends_on_every_token_before_it_and_none_after(token_ids: list[int], block_size: int) -> None:
    hashes = hash_blocks(token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    for index in range(len(hashes)):
        end = (index + 1) * block_size
        assert hash_blocks(token_ids[:end], block_size) == hashes[: index + 1]
        changed = [token_ids[0] + 1, *token_ids[1:]]
        assert hash_blocks(changed, block_size)[index] != hashes[index]


class BlockManagerMachine(RuleBasedStateMachine):
    """Random sequences over a small alphabet start, seal and end in random order, some of them protected by leases."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.sequences: list[tuple[list[BlockId], list[int]]] = []
        self.now = 0

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, token_ids: list[int]) -> None:
        cached = self.blocks.match(hash_blocks(token_ids, self.blocks.block_size))
        fresh = self.blocks.num_blocks_for(len(token_ids)) - len(cached)
        if fresh + self.blocks.num_evictable(cached) > self.blocks.num_available:
            return
        self.blocks.share(cached)
        self.sequences.append((cached + self.blocks.allocate(fresh), token_ids))

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        if self.sequences:
            seal_all(self.blocks, *data.draw(st.sampled_from(self.sequences)))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.sequences:
            index = data.draw(st.integers(0, len(self.sequences) - 1))
            self.blocks.release(self.sequences.pop(index)[0])

    @rule(holder=st.sampled_from("ab"), token_ids=st.lists(st.integers(0, 1), max_size=12))
    def protect(self, holder: str, token_ids: list[int]) -> None:
        hashes = hash_blocks(token_ids, self.blocks.block_size)
        self.blocks.protect(RequestId(holder), hashes, until_s=self.now + 3)

    @rule(holder=st.sampled_from("ab"))
    def renew(self, holder: str) -> None:
        self.blocks.renew(RequestId(holder), until_s=self.now + 3)

    @rule(holder=st.sampled_from("ab"))
    def unprotect(self, holder: str) -> None:
        self.blocks.unprotect(RequestId(holder))

    @rule()
    def let_time_pass(self) -> None:
        self.now += 1
        self.blocks.unprotect_expired(self.now)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check()
            owned = {block_id for block_ids, _ in self.sequences for block_id in block_ids}
            assert self.blocks.num_owned == len(owned)


TestBlockManagerMachine = BlockManagerMachine.TestCase
