"""The collectives of groups: every kind of group, of two and three processes."""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.blocks import AttentionWeights, LayerWeights, LinearWeight, MLPWeights
from kernels.composed import ComposedOps
from kernels.cpu.cores import private_cores
from kernels.cpu.group import NativeGroup
from kernels.cpu.group_memory import GroupMemory
from kernels.cpu.library import best_library
from kernels.cpu.ops import CpuOps
from kernels.group import GroupBroken
from tests.kernels.group_ranks import NativeMeeting, Ranks, decode_layers, gather_each, play, reduce_each
from tests.kernels.paged import make_kv
from tests.kernels.test_cpu_ops import BLOCK_SIZE, Random, assert_close, make_attention, make_rows

KINDS = ["native", "torch"]
SIZES = [2, 3]
SHAPES = [(1,), (1, 576), (3, 577), (130, 576), (7, 20_011)]
"""One value, one row, no multiple of a vector, more than a chunk, more than two."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(max(SIZES))
    yield ranks
    ranks.close()


def in_order(parts: list[Tensor]) -> Tensor:
    """Their sum in fp32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_the_bits_of_the_sum_in_order_of_ranks(ranks: Ranks, kind: str, size: int) -> None:
    random = torch.Generator().manual_seed(0)
    cases = list(itertools.product(SHAPES, (torch.float32, torch.bfloat16)))
    parts = [[torch.randn(shape, generator=random).to(dtype) for shape, dtype in cases] for _ in range(size)]
    with ranks.meet(kind, size) as meeting:
        results = ranks.run(meeting, reduce_each, [(each,) for each in parts])
    for case, *each in zip(cases, *parts, strict=True):
        wanted, got = in_order(each), [result[cases.index(case)] for result in results]
        assert all(torch.equal(one, wanted) for one in got), case


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_all_ranks_come_side_by_side_to_the_first(ranks: Ranks, kind: str, size: int) -> None:
    random = torch.Generator().manual_seed(0)
    num_columns = [columns[:size] for columns in ([1, 2, 3], [300, 301, 7], [0, 5, 4], [70_000, 3, 140_001])]
    num_rows = [1, 250, 3, 2]
    cases = list(zip(num_rows, num_columns, strict=True))
    parts = [[torch.randn(rows, columns[rank], generator=random) for rows, columns in cases] for rank in range(size)]
    with ranks.meet(kind, size) as meeting:
        first, *others = ranks.run(meeting, gather_each, [(each, num_columns) for each in parts])
    assert all(result == [None] * len(cases) for result in others)
    for got, *each in zip(first, *parts, strict=True):
        assert torch.equal(got, torch.cat(each, dim=1))


@pytest.mark.parametrize(("kind", "size", "num_calls"), [("native", 2, 2000), ("native", 3, 2000), ("torch", 3, 100)])
def test_calls_of_all_kinds_and_sizes_mix(ranks: Ranks, kind: str, size: int, num_calls: int) -> None:
    with ranks.meet(kind, size) as meeting:
        ranks.run(meeting, play, [(num_calls,)] * size)


def test_counters_may_wrap(ranks: Ranks) -> None:
    memory = GroupMemory.create(3)
    for rank in memory.ranks:
        rank.arrived = 2**32 - 20
    ranks.run(NativeMeeting(memory.fd, 3), play, [(50,)] * 3)
    assert 0 < memory.ranks[0].arrived < 2**31


def wait_until_asleep(memory: GroupMemory, awaited: int, num_ranks: int) -> None:
    """Until so many wait for this rank. A process that sleeps tells nobody: look again and again."""
    while memory.ranks[awaited].num_waiting < num_ranks:
        time.sleep(0.001)


def test_abort_ends_the_calls_of_ranks_that_wait(ranks: Ranks) -> None:
    memory = GroupMemory.create(3)
    meeting = NativeMeeting(memory.fd, 3)
    ranks.begin(0, meeting, reduce_each, [torch.ones(5)])
    ranks.begin(1, meeting, gather_each, [torch.ones(1, 2)], [[1, 2, 3]])
    wait_until_asleep(memory, awaited=2, num_ranks=2)
    aborted_s = time.monotonic()
    memory.abort()
    for rank in (0, 1):
        with pytest.raises(GroupBroken):
            raise ranks.end(rank)
    assert time.monotonic() - aborted_s < 1


def test_an_aborted_group_refuses_every_call() -> None:
    memory = GroupMemory.create(1)
    group = NativeGroup(best_library()[1], memory, 0, spin=False)
    group.all_reduce(torch.ones(3))
    memory.abort()
    assert memory.is_aborted
    with pytest.raises(GroupBroken):
        group.all_reduce(torch.ones(3))
    with pytest.raises(GroupBroken):
        group.gather(torch.ones(1, 3), [3])


def test_a_rank_that_waits_for_another_takes_no_time_of_its_core() -> None:
    memory = GroupMemory.create(2)
    group = NativeGroup(best_library()[1], memory, 0, spin=True)
    used_s: list[float] = []

    def wait() -> None:
        with pytest.raises(GroupBroken):
            group.all_reduce(torch.ones(5))
        used_s.append(time.thread_time())

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until_asleep(memory, awaited=1, num_ranks=1)
    threading.Event().wait(0.3)
    memory.abort()
    thread.join()
    assert used_s[0] < 0.05


def test_without_a_rank_torch_s_calls_end_too(ranks: Ranks) -> None:
    with ranks.meet("torch", 2) as meeting:
        ranks.begin(0, meeting, reduce_each, [torch.ones(5)])
        ranks.begin(1, meeting, reduce_each, [])
        with pytest.raises(GroupBroken):
            raise ranks.end(0)
        assert ranks.end(1) == []


def test_a_rank_is_silent_until_it_gives_a_sign_of_life() -> None:
    memory = GroupMemory.create(3)
    assert memory.silent_ranks(for_s=60) == []
    memory.ranks[1].beat_ns -= 100 * 10**9
    assert memory.silent_ranks(for_s=60) == [1]
    memory.beat(1)
    assert memory.silent_ranks(for_s=60) == []
    assert memory.last_beat_s(1) == pytest.approx(time.monotonic(), abs=5)


def split_out(weight: LinearWeight, columns: slice, *, has_bias: bool) -> LinearWeight:
    return LinearWeight(weight.weight[:, columns], weight.bias if has_bias else None)


def split_rows(weight: LinearWeight, rows: list[slice]) -> LinearWeight:
    index = torch.cat([torch.arange(part.start, part.stop) for part in rows])
    return LinearWeight(weight.weight[index], None if weight.bias is None else weight.bias[index])


def split_attention(weights: AttentionWeights, rank: int, size: int) -> AttentionWeights:
    num_heads, num_kv_heads, dim = weights.num_heads // size, weights.num_kv_heads // size, weights.head_dim
    kv_begin = weights.num_heads + rank * num_kv_heads
    begins = rank * num_heads, kv_begin, kv_begin + weights.num_kv_heads
    counts = num_heads, num_kv_heads, num_kv_heads
    rows = [slice(begin * dim, (begin + count) * dim) for begin, count in zip(begins, counts, strict=True)]
    return replace(
        weights,
        qkv=split_rows(weights.qkv, rows),
        out=split_out(weights.out, rows[0], has_bias=rank == 0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )


def split_mlp(weights: MLPWeights, rank: int, size: int) -> MLPWeights:
    width = weights.down.weight.shape[1]
    own = slice(rank * width // size, (rank + 1) * width // size)
    return replace(
        weights,
        gate_up=split_rows(weights.gate_up, [own, slice(width + own.start, width + own.stop)]),
        down=split_out(weights.down, own, has_bias=rank == 0),
    )


def make_layers(num_layers: int) -> list[LayerWeights]:
    random = Random(torch.float32)
    return [
        LayerWeights(
            make_attention(random, 6, 2, 16, hidden=75),
            MLPWeights(random.norm(75), random.linear(2 * 66, 75), random.linear(75, 66)),
        )
        for _ in range(num_layers)
    ]


@pytest.mark.parametrize("ops_name", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_half_of_every_block_compute_what_one_does(ranks: Ranks, kind: str, ops_name: str) -> None:
    layers = make_layers(3)
    rows, num_blocks = make_rows([5, 20], [(3, 3), (7, 40)])
    x = torch.randn(len(rows.positions), 75, generator=torch.Generator().manual_seed(6))
    caches = [make_kv(num_blocks, 2, BLOCK_SIZE, 16, torch.float32, fill=0.0) for _ in layers]
    wanted = torch.add(*ComposedOps().decoder(layers)(x.clone(), rows, caches))
    halves = [
        [LayerWeights(split_attention(each.attention, rank, 2), split_mlp(each.mlp, rank, 2)) for each in layers]
        for rank in range(2)
    ]
    with ranks.meet(kind, 2) as meeting:
        got = ranks.run(meeting, decode_layers, [(ops_name, half, x, rows, num_blocks) for half in halves])
    assert torch.equal(got[0], got[1])
    assert_close(got[0], wanted, torch.float32)


def test_all_layers_in_one_call_end_when_the_group_is_aborted_and_tell_how_long_they_added_up() -> None:
    memory = GroupMemory.create(1)
    layers = make_layers(2)
    group = NativeGroup(best_library()[1], memory, 0, spin=False)
    ops = CpuOps(torch.float32, 16, BLOCK_SIZE, private_cores(1), group=group)
    decoder = ops.decoder(layers)
    rows, num_blocks = make_rows([5], [])
    caches = [make_kv(num_blocks, 2, BLOCK_SIZE, 16, torch.float32, fill=0.0) for _ in layers]
    phases_s = ops.time_phases()
    decoder(torch.randn(1, 75), rows, caches)
    assert phases_s()["all_reduce"] > 0
    memory.abort()
    with pytest.raises(GroupBroken):
        decoder(torch.randn(1, 75), rows, caches)
