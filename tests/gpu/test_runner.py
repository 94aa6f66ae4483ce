"""A runner on a GPU, loaded as a worker loads it: in fp32 the tokens of the CPU, with graphs and without."""

from pathlib import Path

import pytest
import torch

from tests.gpu.model import VOCAB
from tests.gpu.workers import MAX_NUM_SEQS, UTILIZATION, Quantization, decode_runner, prefill_runner
from tests.model import harness

pytestmark = pytest.mark.gpu

NUM_TOKENS = 12
LENS = (1, 3, 17, 45, 100)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in LENS]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[torch.cuda.CUDAGraph]:
    """The graphs that were replayed, in order."""
    replayed: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def replay_and_keep(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay_and_keep)
    return replayed


def test_with_graphs_and_without_a_runner_gives_the_tokens_of_the_cpu(
    model: Path, replays: list[torch.cuda.CUDAGraph]
) -> None:
    wanted = harness.greedy(harness.load(model, kernels="reference"), prompts(), NUM_TOKENS)
    assert harness.greedy(prefill_runner(model, "triton"), prompts(), NUM_TOKENS, chunk=23) == wanted
    assert not replays
    assert harness.greedy(decode_runner(model, "triton"), prompts(), NUM_TOKENS) == wanted
    assert len(replays) >= NUM_TOKENS - 1


def test_the_reference_ops_give_the_tokens_of_the_cpu_and_are_never_captured(
    model: Path, replays: list[torch.cuda.CUDAGraph]
) -> None:
    wanted = harness.greedy(harness.load(model, kernels="reference"), prompts(), NUM_TOKENS)
    assert harness.greedy(decode_runner(model, "reference"), prompts(), NUM_TOKENS) == wanted
    assert not replays


def test_a_runner_gives_the_tokens_of_transformers(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, tokens in zip(prompts(), harness.greedy(decode_runner(model, "triton"), prompts(), 4), strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
        assert tokens == logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_give_the_same_tokens_with_graphs_and_without(
    model: Path, quantization: Quantization
) -> None:
    without, with_graphs = (load(model, "triton", quantization) for load in (prefill_runner, decode_runner))
    wanted = harness.greedy(without, prompts(), NUM_TOKENS)
    assert harness.greedy(with_graphs, prompts(), NUM_TOKENS) == wanted


def test_a_batch_of_every_size_that_a_worker_takes_is_replayed(
    model: Path, replays: list[torch.cuda.CUDAGraph]
) -> None:
    runner = decode_runner(model, "triton")
    many = [[token] * 5 for token in range(1, MAX_NUM_SEQS + 1)]
    alone = [harness.greedy(runner, [prompt], 3)[0] for prompt in many[:2]]
    replays.clear()
    for size in (1, 2, 3, 9, MAX_NUM_SEQS):
        assert harness.greedy(runner, many[:size], 3)[:2] == alone[:size]
    assert len({id(graph) for graph in replays}) == 4, "of 1, 2, 4 and 16 rows"


def test_a_cache_of_no_given_size_takes_what_is_left_of_a_workers_part_of_the_gpu(
    model: Path, device: torch.device
) -> None:
    _, total = torch.cuda.mem_get_info(device)
    cache = decode_runner(model, "triton", kv_bytes=0).kv_cache
    part, taken = int(total * UTILIZATION), cache.num_blocks * cache.layout.block_bytes
    assert part / 4 < taken < part, "weights of this model are few, an allowance for CUDA is 1 GiB"
    assert torch.cuda.memory_allocated(device) < part
