"""In fp32, a model that is split over ranks generates what transformers does, token for token."""

import gc
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from torch import Tensor

from common.engine.runner import ModelRunner
from common.errors import ConfigError
from tests.model import harness, tiny_models
from tests.model.ranks import Ranks
from tests.model.reference import chosen_greedily

NUM_TOKENS = 24


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("variant", ["grouped", "tied", "biases", "multi_query", "one_kv_head", "wide_heads"])
def test_a_split_model_generates_what_transformers_does(variant: str, kernels: str, size: int, tmp_path: Path) -> None:
    model = tiny_models.save(variant, tmp_path)
    prompts = tiny_models.prompts()
    with Ranks(tmp_path, size, kernels=kernels) as ranks:
        answers = harness.greedy(ranks, prompts, NUM_TOKENS, chunk=20)
    assert answers == [chosen_greedily(model, *pair) for pair in zip(prompts, answers, strict=True)]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(prompts)


def test_no_rank_has_more_than_its_part_of_the_cache(tmp_path: Path) -> None:
    tiny_models.save("multi_head", tmp_path)
    with Ranks(tmp_path, 3) as ranks:
        assert [runner.kv_cache.layout.num_kv_heads for runner in ranks.runners] == [2, 2, 2]


def held_bytes(runner: ModelRunner) -> int:
    """Of the cache, and of every tensor that the runner holds otherwise: its weights, after nothing was computed."""
    seen: set[int] = {id(runner.kv_cache)}
    left: list[object] = [runner]
    sizes: dict[int, int] = {}
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            sizes[one.data_ptr()] = max(one.nbytes, sizes.get(one.data_ptr(), 0))
        left += gc.get_referents(one)
    return runner.kv_cache.blocks.nbytes + sum(sizes.values())


def test_each_of_three_ranks_of_the_built_in_model_holds_at_most_two_fifths_of_what_one_alone_does() -> None:
    with Ranks("", 1) as alone, Ranks("", 3) as ranks:
        (whole,) = map(held_bytes, alone.runners)
        parts = list(map(held_bytes, ranks.runners))
    assert whole > 134_000_000 * 4
    assert max(parts) <= 0.4 * whole


def test_ranks_that_have_the_same_head_store_the_same_bytes(tmp_path: Path) -> None:
    tiny_models.save("one_kv_head", tmp_path)
    with Ranks(tmp_path, 3) as ranks:
        harness.greedy(ranks, tiny_models.prompts(), 2)
        memories = [runner.kv_cache.blocks.numpy().tobytes() for runner in ranks.runners]
    assert any(memories[0])
    assert memories == [memories[0]] * 3


def test_a_size_that_the_model_cannot_be_split_into_is_refused(tmp_path: Path) -> None:
    tiny_models.save("one_kv_head", tmp_path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size must be 1 to 3 for 4 heads, .* 80 columns .*, got 4"):
        Ranks(tmp_path, 4)
