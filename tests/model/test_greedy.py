"""In fp32, greedy output equals transformers' token for token, however the work is cut into steps."""

from pathlib import Path

import pytest

from tests.model import harness, tiny_models
from tests.model.reference import chosen_greedily

NUM_TOKENS = 24


@pytest.fixture(params=["reference", "auto"])
def kernels(request: pytest.FixtureRequest) -> str:
    """auto is native but for heads and blocks of odd sizes."""
    return request.param


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_greedy_equals_transformers(variant: str, tmp_path: Path, kernels: str) -> None:
    model = tiny_models.save(variant, tmp_path)
    prompts = tiny_models.prompts()
    answers = harness.greedy(harness.load(tmp_path, kernels=kernels), prompts, NUM_TOKENS)
    assert answers == [chosen_greedily(model, *pair) for pair in zip(prompts, answers, strict=True)]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(prompts)
    assert len({token for answer in answers for token in answer}) > NUM_TOKENS / 2, "the model repeats itself"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The folder of a tiny model, and what transformers makes of the prompts with it."""
    folder = tmp_path_factory.mktemp("grouped")
    model = tiny_models.save("grouped", folder)
    return folder, [tiny_models.greedy(model, prompt, NUM_TOKENS) for prompt in tiny_models.prompts()]


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33])
def test_chunks_of_any_length_do_not_change_the_output(
    grouped: tuple[Path, list[list[int]]], chunk: int, kernels: str
) -> None:
    folder, expected = grouped
    assert harness.greedy(harness.load(folder, kernels=kernels), tiny_models.prompts(), NUM_TOKENS, chunk) == expected


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_the_block_size_does_not_change_the_output(
    grouped: tuple[Path, list[list[int]]], block_size: int, kernels: str
) -> None:
    folder, expected = grouped
    runner = harness.load(folder, num_blocks=256, block_size=block_size, kernels=kernels)
    assert harness.greedy(runner, tiny_models.prompts(), NUM_TOKENS) == expected


def test_prompts_prefilled_together_are_as_if_alone(grouped: tuple[Path, list[list[int]]], kernels: str) -> None:
    folder, expected = grouped
    driver = harness.Driver(harness.load(folder, kernels=kernels))
    prompts = dict(zip("abc", tiny_models.prompts(), strict=True))
    for name, prompt in prompts.items():
        driver.start(name, prompt, len(prompt) + NUM_TOKENS)
    driver.step({name: len(prompt) for name, prompt in prompts.items()})
    driver.decode("abc", NUM_TOKENS - 1)
    assert [driver.sequences[name].output for name in "abc"] == expected


def test_sequences_that_decode_are_not_disturbed_by_prompts_that_join(
    grouped: tuple[Path, list[list[int]]], kernels: str
) -> None:
    folder, expected = grouped
    driver = harness.Driver(harness.load(folder, kernels=kernels))
    for name, prompt in zip("abc", tiny_models.prompts(), strict=True):
        driver.start(name, prompt, len(prompt) + NUM_TOKENS)
    driver.step({"b": 17})
    # The plan's order is not the batch's: rows with one token go first.
    driver.step({"c": 20, "b": 1, "a": 1})
    driver.step({"a": 1, "c": 24, "b": 1})
    driver.step({"c": 1, "a": 1, "b": 1})
    for name, want in zip("abc", expected, strict=True):
        driver.decode([name], NUM_TOKENS - len(driver.sequences[name].output))
        assert driver.sequences[name].output == want


def test_a_prompt_whose_prefix_is_already_cached_goes_on_from_there(
    grouped: tuple[Path, list[list[int]]], kernels: str
) -> None:
    folder, expected = grouped
    driver = harness.Driver(harness.load(folder, kernels=kernels))
    prompt = tiny_models.prompts()[2]
    driver.start("first", prompt, len(prompt))
    driver.prefill("first")
    driver.start("second", prompt, len(prompt) + NUM_TOKENS)
    second = driver.sequences["second"]
    second.block_table[:2] = driver.sequences["first"].block_table[:2]
    second.num_computed = 32
    driver.prefill("second")
    driver.decode(["second"], NUM_TOKENS - 1)
    assert second.output == expected[2]
