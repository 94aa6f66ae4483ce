"""How a model is split over ranks: everything once, key and value heads more often only where ranks are more."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.parallel import Shard, split_model, whole
from common.errors import ConfigError


@dataclass(frozen=True)
class Sizes:
    num_heads: int
    num_kv_heads: int
    intermediate_size: int = 1536
    vocab_size: int = 49152


def heads(shards: Sequence[Shard]) -> list[tuple[int, int]]:
    return [(len(shard.heads), len(shard.kv_heads)) for shard in shards]


def is_everything_once(parts: Iterable[range], count: int) -> bool:
    return list(chain.from_iterable(parts)) == list(range(count))


def test_sizes_that_divide_give_equal_shards() -> None:
    shards = split_model(Sizes(9, 3), 3)
    assert heads(shards) == [(3, 1)] * 3
    assert [len(shard.mlp) for shard in shards] == [512] * 3
    assert [len(shard.vocab) for shard in shards] == [16384] * 3


def test_where_key_value_heads_do_not_divide_the_first_ranks_have_more() -> None:
    assert heads(split_model(Sizes(9, 3), 2)) == [(6, 2), (3, 1)]


def test_where_ranks_are_more_than_key_value_heads_they_share_one_and_split_its_queries() -> None:
    assert heads(split_model(Sizes(4, 1), 3)) == [(2, 1), (1, 1), (1, 1)]
    assert [shard.kv_heads for shard in split_model(Sizes(8, 2), 4)] == [range(1), range(1), range(1, 2), range(1, 2)]


def test_one_rank_adds_the_bias_of_a_sum() -> None:
    assert [shard.adds_bias for shard in split_model(Sizes(9, 3), 3)] == [True, False, False]


@pytest.mark.parametrize("size", [0, 10])
def test_a_size_that_leaves_ranks_without_heads_is_refused_with_those_that_can_be(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size must be 1 to 9 for 9 heads, 3 KV heads.*got {size}"):
        split_model(Sizes(9, 3), size)


def test_a_size_that_leaves_ranks_without_columns_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1 to 2 for 9 heads, .*, 64 columns of the MLP"):
        split_model(Sizes(9, 3, intermediate_size=64), 3)


@given(
    num_kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    intermediate_size=st.integers(1, 700),
    vocab_size=st.integers(1, 700),
    data=st.data(),
)
def test_every_part_of_a_model_is_at_one_rank(
    num_kv_heads: int, group: int, intermediate_size: int, vocab_size: int, data: st.DataObject
) -> None:
    model = Sizes(num_kv_heads * group, num_kv_heads, intermediate_size, vocab_size)
    largest = min(model.num_heads, -(-intermediate_size // 32), -(-vocab_size // 16))
    shards = split_model(model, data.draw(st.integers(1, largest)))
    assert is_everything_once((shard.heads for shard in shards), model.num_heads)
    assert is_everything_once((shard.mlp for shard in shards), intermediate_size)
    assert is_everything_once((shard.vocab for shard in shards), vocab_size)
    for shard in shards:
        assert all((shard.heads, shard.kv_heads, shard.mlp, shard.vocab))
        assert len(shard.heads) % len(shard.kv_heads) == 0
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        assert shard.vocab_sizes == tuple(len(other.vocab) for other in shards)
    if len(shards) <= num_kv_heads:
        assert set(Counter(chain.from_iterable(shard.kv_heads for shard in shards)).values()) == {1}
    sizes = [len(shard.mlp) for shard in shards]
    assert all(first >= second for first, second in pairwise(sizes))


def test_a_model_that_is_not_split_is_one_shard() -> None:
    shard = whole(Sizes(9, 3))
    assert (shard.heads, shard.kv_heads, shard.mlp, shard.vocab) == (range(9), range(3), range(1536), range(49152))
