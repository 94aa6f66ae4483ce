"""Which part of a model each rank of a worker group has: tensor parallelism as in Megatron-LM. Pure.

Queries, keys, values, gate and up are split by their outputs, the projections behind them by their inputs, so a rank
goes through half a layer by itself, and what all ranks computed is then added up. Embedding and head are split by
vocabulary. Source: Shoeybi et al., Megatron-LM (2019), section 3.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from common.errors import ConfigError

MLP_UNIT = 32
"""Columns of an MLP that stay together: a group of quantised weights."""
VOCAB_UNIT = 16
"""Tokens that stay together: a panel of packed weights."""


class Sizes(Protocol):
    """Of a model, as its config names them."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank: contiguous ranges of the whole model's heads, MLP columns and token ids, none empty.

    kv_heads:     those that `heads` attend to, the same number of heads each; another rank may have them, too, where
                  there are more ranks than KV heads
    vocab_sizes:  tokens of every rank
    """

    rank: int
    size: int
    heads: range
    kv_heads: range
    mlp: range
    vocab: range
    vocab_sizes: tuple[int, ...]

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias of a projection whose parts are added up: one of them does."""
        return self.rank == 0


def whole(model: Sizes) -> Shard:
    """All of the model."""
    (shard,) = split_model(model, 1)
    return shard


def split_model(model: Sizes, size: int) -> list[Shard]:
    """The shards of ranks 0 to size - 1. Where sizes do not divide, the first ranks have more.

    Raises: ConfigError naming the sizes that this model can be split into.
    """
    largest = _largest_size(model)
    if not 1 <= size <= largest:
        raise ConfigError(
            f"tensor_parallel_size must be 1 to {largest} for {model.num_heads} heads, {model.num_kv_heads} KV heads,"
            f" {model.intermediate_size} columns of the MLP and {model.vocab_size} tokens, got {size}"
        )
    heads = _split_heads(model.num_heads, model.num_kv_heads, size)
    mlp = _split(model.intermediate_size, size, MLP_UNIT)
    vocab = _split(model.vocab_size, size, VOCAB_UNIT)
    vocab_sizes = tuple(map(len, vocab))
    return [Shard(rank, size, *heads[rank], mlp[rank], vocab[rank], vocab_sizes) for rank in range(size)]


def _largest_size(model: Sizes) -> int:
    num_units = (-(-model.intermediate_size // MLP_UNIT), -(-model.vocab_size // VOCAB_UNIT))
    return min(model.num_heads, *num_units)


def _split_heads(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[range, range]]:
    """Heads and KV heads of each rank: whole KV heads with their heads, or a part of one KV head's."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        parts = _split(num_kv_heads, size)
        return [(range(part.start * group, part.stop * group), part) for part in parts]
    shards: list[tuple[range, range]] = []
    for kv_head, ranks in enumerate(_split(size, num_kv_heads)):
        first = kv_head * group
        for part in _split(group, len(ranks)):
            shards.append((range(first + part.start, first + part.stop), range(kv_head, kv_head + 1)))
    return shards


def _split(count: int, size: int, unit: int = 1) -> list[range]:
    """Cut range(count) into ranges of whole units, the last unit maybe a part of one."""
    each, extra = divmod(-(-count // unit), size)
    ends = [min(count, (each * rank + min(rank, extra)) * unit) for rank in range(size + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
