"""The built-in model: our reading of its GGUF file, and our computation, against transformers' own."""

import pytest
import torch

from common.engine.model_config import read_model_config
from common.engine.parallel import whole
from common.engine.runner import ModelRunner
from common.engine.weights import open_weights
from common.model_files import find_model
from tests.model import harness, smollm2
from tests.model.reference import chosen_greedily

NUM_TOKENS = 32
PROMPTS = {
    "The sea was calm that morning, and the": [504, 3426, 436, 9071, 338, 5738, 28, 284, 260],
    "def fibonacci(n):\n": [1604, 3987, 46477, 24, 94, 727, 198],
    "Water boils at": [12615, 36411, 418],
}
# "What is the capital of France?" in the model's chat template, with its default system prompt.
CAPITAL_OF_FRANCE = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
    *(1, 520, 9531, 198),
]
PARIS = 7042


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return harness.load("")


def test_every_tensor_equals_the_one_that_transformers_reads() -> None:
    files = find_model("")
    config = read_model_config(files)
    weights = open_weights(files, config, torch.float32, whole(config), lambda fraction: None)
    for name, expected in smollm2.reference_tensors().items():
        assert torch.equal(weights.take(name, *expected.shape), expected), name
    weights.finish()


def test_greedy_equals_transformers(runner: ModelRunner) -> None:
    prompts = list(PROMPTS.values())
    answers = harness.greedy(runner, prompts, NUM_TOKENS)
    assert answers == [chosen_greedily(smollm2.reference(), *pair) for pair in zip(prompts, answers, strict=True)]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(prompts)


def test_chunks_do_not_change_the_output(runner: ModelRunner) -> None:
    prompt = [token for prompt in PROMPTS.values() for token in prompt] * 4
    assert harness.greedy(runner, [prompt], 8, chunk=13) == harness.greedy(runner, [prompt], 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_capital_of_france_is_paris_in_half_precision(dtype: str) -> None:
    assert PARIS in harness.greedy(harness.load("", dtype=dtype), [CAPITAL_OF_FRANCE], 10)[0]


def test_the_capital_of_france_is_paris(runner: ModelRunner) -> None:
    assert PARIS in harness.greedy(runner, [CAPITAL_OF_FRANCE], 10)[0]
