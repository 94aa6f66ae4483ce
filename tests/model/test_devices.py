"""What is known without a GPU of how one is used: where ranks go, what fits, and steps and blocks on a device."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from common.config import AggregatedCommand, DecodeCommand, PrefillCommand, WorkerCommand
from common.engine.batch import Batch
from common.engine.cuda_graphs import DecodeGraphs, Replay, graph_sizes
from common.engine.device_cache import DeviceKVCache
from common.engine.devices import CPU, Placement, place_ranks, spread
from common.engine.gpu_memory import Usage, largest_step
from common.engine.kv_cache import KVCache, kv_layout
from common.engine.model_config import read_model_config
from common.engine.runner import ModelRunner, load_model
from common.errors import ConfigError
from common.ids import BlockId
from common.kv_layout import KVLayout
from common.model_files import find_model
from common.worker_config import DecodeOptions, PrefillOptions, WorkerOptions
from kernels.composed import ComposedOps
from kernels.cpu.cores import private_cores
from tests.fakes import fake_layout
from tests.model import harness, tiny_models

GB = 10**9
NUM_TOKENS = 8


@pytest.fixture
def num_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_worker_computes_on_its_own_gpu(num_gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    num_gpus(2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for place in [*place_ranks(WorkerOptions(first_rank=1, host_ranks=2)), Placement(CPU)]:
        place.make_current()
    assert current == [torch.device("cuda", 1)]


def test_where_there_is_no_gpu_auto_is_the_cpu_and_cuda_is_refused(num_gpus: Callable[[int], None]) -> None:
    num_gpus(0)
    assert place_ranks(WorkerOptions(tensor_parallel_size=2)) == [Placement(CPU)] * 2
    with pytest.raises(ConfigError, match=r"device cuda: PyTorch .* finds no GPU"):
        place_ranks(WorkerOptions(device="cuda"))


def test_a_cpu_can_be_asked_for_where_there_are_gpus(num_gpus: Callable[[int], None]) -> None:
    num_gpus(2)
    assert place_ranks(WorkerOptions(device="cpu")) == [Placement(CPU)]


def test_ranks_of_a_worker_need_a_gpu_each(num_gpus: Callable[[int], None]) -> None:
    num_gpus(2)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be at most 2, one GPU a rank, got 3"):
        place_ranks(WorkerOptions(tensor_parallel_size=3))


def test_workers_of_a_host_take_its_gpus_in_turn_and_know_who_is_beside_them() -> None:
    placed = [spread(first, size, host_ranks=5, num_gpus=3) for first, size in ((0, 2), (2, 3))]
    assert [[place.device.index for place in places] for places in placed] == [[0, 1], [2, 0, 1]]
    assert [[place.num_sharing for place in places] for places in placed] == [[2, 2], [1, 2, 2]]


@pytest.mark.parametrize(
    ("usage", "num_sharing", "wanted"),
    [
        (Usage(total=80 * GB, free=60 * GB, weights=16 * GB, step=2 * GB), 1, 50_926),
        (Usage(total=80 * GB, free=60 * GB, weights=16 * GB, step=2 * GB), 2, 14_926),
        (Usage(total=80 * GB, free=10 * GB, weights=16 * GB, step=2 * GB), 1, 8_000),
    ],
    ids=["alone", "beside another one", "where others take more than their part"],
)
def test_the_cache_gets_what_weights_and_steps_leave(usage: Usage, num_sharing: int, wanted: int) -> None:
    assert usage.num_blocks(block_bytes=10**6, utilization=0.9, num_sharing=num_sharing) == wanted


def test_weights_that_leave_no_room_are_refused_with_what_takes_it() -> None:
    usage = Usage(total=24 * GB, free=7 * GB, weights=16 * GB, step=2 * GB)
    with pytest.raises(ConfigError, match=r"0.9 gives .* of 24.0 GB 10.8 GB, .* weights 16.0 GB, steps 4.0 GB"):
        usage.num_blocks(block_bytes=10**6, utilization=0.9, num_sharing=2)


@pytest.mark.parametrize(
    ("command", "lens"),
    [
        (PrefillCommand(prefill=PrefillOptions(max_batch_prefill_tokens=250)), [100, 100, 50]),
        (DecodeCommand(decode=DecodeOptions(max_num_seqs=3)), [1, 1, 1]),
        (
            AggregatedCommand(
                prefill=PrefillOptions(max_batch_prefill_tokens=120), decode=DecodeOptions(max_num_seqs=2)
            ),
            [1, 1, 100, 20],
        ),
    ],
    ids=["prefill", "decode", "aggregated"],
)
def test_the_largest_step_has_all_that_a_worker_takes_at_once(command: WorkerCommand, lens: list[int]) -> None:
    step = largest_step(command, max_model_len=100, block_size=16)
    assert [len(sequence.token_ids) for sequence in step.sequences] == lens
    assert all(len(sequence.block_table) * 16 >= len(sequence.token_ids) for sequence in step.sequences)


def device_cache(layout: KVLayout, num_blocks: int) -> DeviceKVCache:
    """On a CPU: what is copied to a GPU and back elsewhere is copied here as well."""
    return DeviceKVCache(layout, num_blocks, CPU, ComposedOps())


def random_cache(layout: KVLayout, num_blocks: int) -> DeviceKVCache:
    cache = device_cache(layout, num_blocks)
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(0)))
    return cache


def test_blocks_are_read_as_the_hosts_cache_has_them() -> None:
    layout = replace(fake_layout(), num_kv_heads=4)
    cache, own = random_cache(layout, 6), KVCache(layout, 6)
    own.blocks.copy_(cache.blocks[:6].view(own.blocks.shape))
    ids, first = [BlockId(4), BlockId(0), BlockId(5)], 8
    assert cache.checksums(ids) == own.checksums(ids)
    for heads in (range(first, first + layout.num_kv_heads), range(first + 1, first + 2)):
        read = cache.shard_memory(range(first, first + layout.num_kv_heads)).read(ids, heads)
        wanted = own.shard_memory(range(first, first + layout.num_kv_heads)).read(ids, heads)
        assert [bytes(piece) for piece in read] == [bytes(piece) for piece in wanted]


def test_what_was_verified_is_written_and_nothing_else() -> None:
    layout = replace(fake_layout(), num_kv_heads=4)
    source, target = random_cache(layout, 6), device_cache(layout, 6)
    heads = range(1, layout.num_kv_heads)
    whole = range(layout.num_kv_heads)
    ids = [BlockId(block) for block in (3, 0, 2)]
    arrivals = target.shard_memory(whole).arrivals(ids, heads)
    for place, piece in zip(arrivals.pieces, source.shard_memory(whole).read(ids, heads), strict=True):
        place[:] = piece
    assert not target.blocks.any(), "nothing is kept yet"
    arrivals.keep([0, 2])
    wanted = torch.zeros_like(target.blocks)
    wanted[[3, 2], 1:] = source.blocks[[3, 2], 1:]
    assert torch.equal(target.blocks, wanted)


def test_graphs_are_of_few_sizes_and_the_largest_batch() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(27) == [1, 2, 4, 8, 16, 24, 27]
    assert len(graph_sizes(256)) == 27
    sizes = graph_sizes(1000)
    assert all(after <= before * 9 / 8 for before, after in pairwise(sizes) if before >= 64)


class StandInCapture:
    """Captures as a GPU does in what matters: it computes at once, and again from the same tensors at each replay."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        out = run()

        def replay() -> Tensor:
            self.num_replays += 1
            return out.copy_(run())

        return replay


@pytest.fixture
def load(tmp_path: Path) -> Callable[[int], tuple[ModelRunner, StandInCapture]]:
    tiny_models.save("grouped", tmp_path)
    files = find_model(str(tmp_path))
    config = read_model_config(files)

    def load(max_num_seqs: int) -> tuple[ModelRunner, StandInCapture]:
        layout, capture = kv_layout(config, "float32", 16, files.model_hash), StandInCapture()
        loaded = load_model(files, config, layout, 512, private_cores(1), "reference")
        cache = device_cache(layout, 64)
        graphs = DecodeGraphs(loaded.model, cache, graph_sizes(max_num_seqs), 512, capture) if max_num_seqs else None
        return ModelRunner(loaded, cache, graphs), capture

    return load


def test_graphs_give_the_tokens_that_steps_without_them_give(
    load: Callable[[int], tuple[ModelRunner, StandInCapture]],
) -> None:
    prompts = [*tiny_models.prompts(), [5, 6, 7], [9] * 30]
    (without, _), (with_graphs, capture) = load(0), load(16)
    wanted = harness.greedy(without, prompts, NUM_TOKENS)
    assert harness.greedy(with_graphs, prompts, NUM_TOKENS) == wanted
    assert capture.num_replays >= NUM_TOKENS - 1, "all decode steps, and a prompt of one token"
    got, expected = with_graphs.kv_cache.blocks[:64], without.kv_cache.blocks[:64]
    torch.testing.assert_close(got, expected, msg="rows of nobody write into the spare block only")


def test_a_larger_batch_than_any_graph_is_computed_without_one(
    load: Callable[[int], tuple[ModelRunner, StandInCapture]],
) -> None:
    (without, _), (with_graphs, capture) = load(0), load(2)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert harness.greedy(with_graphs, prompts, 3) == harness.greedy(without, prompts, 3)
    assert capture.num_replays == 0


def test_prompts_and_rows_that_are_not_sampled_are_no_decode_steps() -> None:
    graphs = SimpleNamespace(_sizes=[8])

    def takes(num_rows: int, num_sampled: int, prefill: object = None) -> bool:
        rows = SimpleNamespace(prefill=prefill, num_decode_rows=num_rows)
        batch: Batch = SimpleNamespace(rows=rows, sampled_rows=range(num_sampled))  # pyright: ignore[reportAssignmentType]
        return DecodeGraphs.takes(graphs, batch)  # pyright: ignore[reportArgumentType]

    assert [takes(4, 4), takes(8, 8)] == [True, True]
    assert [takes(4, 3), takes(9, 9), takes(0, 0, prefill="rows")] == [False, False, False]
