"""Content that a lease protects is evicted after all else, and never stands in anybody's way."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from common.block_hashes import BlockHash, hash_blocks
from common.engine.block_manager import BlockManager
from common.engine.leases import Leases
from common.ids import RequestId

A, B = RequestId("a"), RequestId("b")


def cache(blocks: BlockManager, token_ids: list[int]) -> list[BlockHash]:
    """Compute a prompt of so many full blocks, and give them back."""
    hashes = hash_blocks(token_ids, blocks.block_size)
    owned = blocks.allocate(len(hashes))
    for block_id, block_hash in zip(owned, hashes, strict=True):
        blocks.seal(block_id, block_hash, checksums=())
    blocks.release(owned)
    return hashes


def num_cached(blocks: BlockManager, hashes: list[BlockHash]) -> int:
    return len(blocks.match(hashes))


def test_what_is_protected_is_evicted_after_what_was_used_later() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    old = cache(blocks, [1, 2])
    blocks.protect(A, old, until_s=10.0)
    new = cache(blocks, [3, 4])
    blocks.allocate(2)
    assert (num_cached(blocks, old), num_cached(blocks, new)) == (2, 0)


def test_protection_is_no_reservation() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    hashes = cache(blocks, [1, 2, 3])
    blocks.protect(A, hashes, until_s=10.0)
    assert (blocks.num_available, blocks.num_protected, blocks.num_owned) == (4, 3, 0)
    owned = blocks.allocate(2)
    assert num_cached(blocks, hashes) == 2, "the tail goes first"
    owned += blocks.allocate(2)
    blocks.check()
    blocks.release(owned)
    assert blocks.num_available == 4


def test_of_two_leases_the_one_that_ends_first_gives_way() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    first, second = cache(blocks, [1, 2]), cache(blocks, [3, 4])
    blocks.protect(A, first, until_s=10.0)
    blocks.protect(B, second, until_s=11.0)
    blocks.renew(A, until_s=12.0)
    blocks.allocate(2)
    assert (num_cached(blocks, first), num_cached(blocks, second)) == (2, 0)


def test_protection_ends_with_the_lease_unless_it_is_renewed() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    renewed, forgotten = cache(blocks, [1, 2]), cache(blocks, [3])
    blocks.protect(A, renewed, until_s=10.0)
    blocks.protect(B, forgotten, until_s=10.0)
    blocks.renew(A, until_s=20.0)
    blocks.unprotect_expired(now=15.0)
    assert blocks.num_protected == 2
    blocks.unprotect(A)
    assert blocks.num_protected == 0
    assert num_cached(blocks, renewed) == 2, "it is evicted like everything else, and not at once"


def test_a_prefix_that_several_share_is_protected_until_the_last_lease_ends() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    hashes = cache(blocks, [1, 2, 3])
    blocks.protect(A, hashes, until_s=10.0)
    blocks.protect(B, hashes[:2], until_s=20.0)
    blocks.unprotect_expired(now=15.0)
    assert blocks.num_protected == 2
    blocks.unprotect_expired(now=25.0)
    assert blocks.num_protected == 0


def test_a_block_that_is_shared_and_released_is_protected_again() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    hashes = cache(blocks, [1, 2])
    blocks.protect(A, hashes, until_s=10.0)
    shared = blocks.match(hashes)
    assert blocks.num_evictable(shared) == 2
    blocks.share(shared)
    assert (blocks.num_protected, blocks.num_owned) == (0, 2)
    blocks.release(shared)
    assert blocks.num_protected == 2
    blocks.share(shared)
    blocks.unprotect(A)
    blocks.release(shared)
    assert blocks.num_protected == 0


def test_content_that_is_named_before_it_is_computed_is_protected_once_it_is_cached() -> None:
    blocks = BlockManager(num_blocks=4, block_size=1)
    blocks.protect(A, hash_blocks([1, 2], 1), until_s=10.0)
    cache(blocks, [1])
    assert blocks.num_protected == 1


def test_a_longer_lease_of_the_same_request_takes_the_place_of_the_first() -> None:
    blocks = BlockManager(num_blocks=6, block_size=1)
    first = cache(blocks, [1, 2])
    blocks.protect(A, first, until_s=10.0)
    other = cache(blocks, [7])
    blocks.protect(A, [*first[:1], *other], until_s=10.0)
    blocks.check()
    assert blocks.num_protected == 2


def test_what_nobody_has_cannot_be_renewed_or_ended() -> None:
    leases = Leases()
    leases.renew(A, until_s=10.0)
    assert leases.end(A) == []
    assert leases.end_expired(now=1e9) == []


class CountingHashes(list[BlockHash]):
    """Counts how often it is gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[BlockHash]:
        self.num_passes += 1
        return super().__iter__()


def test_renewing_a_lease_does_not_look_at_its_blocks() -> None:
    """Gateways renew the leases of all their requests twice a second."""
    hashes = CountingHashes(hash_blocks(list(range(500)), 1))
    leases = Leases()
    leases.grant(A, hashes, until_s=10.0)
    before = hashes.num_passes
    assert before > 0
    for second in range(100):
        leases.renew(A, until_s=11.0 + second)
    assert hashes.num_passes == before


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 5)), st.booleans())))
def test_content_is_wanted_while_any_lease_names_it(grants: list[tuple[str, set[int], bool]]) -> None:
    leases = Leases()
    model: dict[str, set[int]] = {}
    for number, (holder, content, ends) in enumerate(grants):
        wanted = set[int]().union(*model.values())
        if ends:
            dropped = leases.end(RequestId(holder))
            model.pop(holder, None)
        else:
            dropped = leases.grant(RequestId(holder), [bytes([item]) for item in sorted(content)], float(number))
            model[holder] = content
        still = set[int]().union(*model.values())
        assert {item[0] for item in dropped} == wanted - still
        assert {item for item in range(6) if bytes([item]) in leases} == still
