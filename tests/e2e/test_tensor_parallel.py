"""Workers whose model is split over processes give the tokens of those that have it whole, whatever the sizes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import SAMPLINGS, ask_all, completion, token_ids
from tests.e2e.stack import START_S, Command, Stack
from tests.e2e.test_greedy import chat_prompts
from tests.e2e.tiny import BLOCK_BYTES, save_tiny
from tests.model import smollm2
from tests.model.reference import chosen_greedily
from tests.service.kv_rig import NEEDS_NIXL

NUM_BLOCKS = 20
"""Of the smallest pool: enough for each request alone, and for no three of them."""
TINY_BLOCK_BYTES = BLOCK_BYTES // 2
"""Of one KV head."""
SMOLLM2_BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 4
NUM_TOKENS = 150
NUM_SMOLLM2_TOKENS = 64
NUM_FEW_TOKENS = 16

SIZES = [(prefill, decode) for prefill in (1, 2, 3) for decode in (1, 2, 3) if (prefill, decode) != (1, 1)]


def start(sizes: tuple[int, int], num_cache_bytes: int, *options: str, log_dir: Path) -> Stack:
    prefill, decode = sizes
    return Stack(
        *(f"--prefill-tp={prefill}", f"--decode-tp={decode}", "--dtype=float32"),
        *(f"--kv-cache-memory={num_cache_bytes}", *options),
        log_dir=log_dir,
    )


def tiny_requests() -> list[dict[str, Any]]:
    prompts = [[(index * 31 + number) % 256 for index in range(30)] for number in range(8)]
    return [
        completion(prompt, max_tokens=NUM_TOKENS, **SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(prompts)
    ]


def smollm2_requests() -> list[dict[str, Any]]:
    return [
        completion(prompt, max_tokens=NUM_SMOLLM2_TOKENS, **SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(chat_prompts()[:8])
    ]


@dataclass(frozen=True)
class Expected:
    """What workers with the whole model answer. options: of `baton serve`."""

    options: tuple[str, ...]
    requests: list[dict[str, Any]]
    answers: list[list[int]]


def ask_whole_workers(options: tuple[str, ...], requests: list[dict[str, Any]], log_dir: Path) -> Expected:
    """Tokens with room for all."""
    stack = start((1, 1), 200_000_000, *options, log_dir=log_dir)
    try:
        answers = [token_ids(answer) for answer in ask_all(stack.url, requests)]
    finally:
        assert stack.stop() == 0
    return Expected(options, requests, answers)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """One KV head, of which all ranks have a copy. The greedy answers are those of transformers."""
    folder = tmp_path_factory.mktemp("one_kv_head")
    model = save_tiny(folder / "model", "one_kv_head")
    expected = ask_whole_workers((f"--model={folder / 'model'}",), tiny_requests(), folder)
    for index in (0, 4):
        answer = expected.answers[index]
        assert answer == chosen_greedily(model, expected.requests[index]["prompt"], answer)
    return expected


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """The built-in model: 9 heads, 3 KV heads. The greedy answers are those of transformers."""
    expected = ask_whole_workers((), smollm2_requests(), tmp_path_factory.mktemp("built_in"))
    for index in (0, 4):
        answer = expected.answers[index]
        assert answer == chosen_greedily(smollm2.reference(), expected.requests[index]["prompt"], answer)
    return expected


def check(expected: Expected, sizes: tuple[int, int], num_cache_bytes: int, *options: str, log_dir: Path) -> None:
    """All requests at once, in so little memory that some are preempted."""
    stack = start(sizes, num_cache_bytes, *expected.options, *options, log_dir=log_dir)
    try:
        answers = [token_ids(answer) for answer in ask_all(stack.url, expected.requests)]
        stack.wait_until_at_rest()
        prefill, decode = stack.counters("prefill-0"), stack.counters("decode-0")
    finally:
        assert stack.stop() == 0
    assert answers == expected.answers
    assert (prefill.get("ranks", 1), decode.get("ranks", 1)) == sizes
    assert decode["preemptions"] > 0


def check_tiny(tiny: Expected, sizes: tuple[int, int], *options: str, log_dir: Path) -> None:
    check(tiny, sizes, NUM_BLOCKS * max(sizes) * TINY_BLOCK_BYTES, *options, log_dir=log_dir)


@pytest.mark.parametrize(
    "sizes", [(2, 3), *(pytest.param(sizes, marks=pytest.mark.full) for sizes in SIZES if sizes != (2, 3))], ids=str
)
def test_a_model_of_one_key_value_head_gives_the_same_tokens(
    sizes: tuple[int, int], tiny: Expected, tmp_path: Path
) -> None:
    check_tiny(tiny, sizes, log_dir=tmp_path)


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_keys_and_values_that_go_another_way_give_the_same_tokens(
    transport: str, tiny: Expected, tmp_path: Path
) -> None:
    check_tiny(tiny, (3, 1), f"--kv-transport={transport}", log_dir=tmp_path)


def test_sums_by_gloo_give_the_same_tokens(tiny: Expected, tmp_path: Path) -> None:
    check_tiny(tiny, (1, 2), "--collectives=gloo", log_dir=tmp_path)


def test_an_aggregated_worker_gives_the_same_tokens(tiny: Expected, tmp_path: Path) -> None:
    memory = f"--kv-cache-memory={NUM_BLOCKS * 2 * TINY_BLOCK_BYTES}"
    stack = Stack(
        *("--role=both", "--aggregated-tp=2", "--dtype=float32", memory, *tiny.options),
        log_dir=tmp_path,
    )
    try:
        answers = [token_ids(answer) for answer in ask_all(stack.url, tiny.requests)]
        stack.wait_until_at_rest(num_workers=1)
        counters = stack.counters("aggregated-0")
    finally:
        assert stack.stop() == 0
    assert answers == tiny.answers
    assert counters["ranks"] == 2
    assert counters["preemptions"] > 0


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_built_in_model_gives_the_same_tokens(sizes: tuple[int, int], built_in: Expected, tmp_path: Path) -> None:
    check(built_in, sizes, NUM_BLOCKS * SMOLLM2_BLOCK_BYTES, log_dir=tmp_path)


def test_three_ranks_of_the_built_in_model_decode_what_transformers_generates(tmp_path: Path) -> None:
    prompts = chat_prompts()[:8]
    stack = start((1, 3), 100_000_000, log_dir=tmp_path)
    try:
        bodies = [completion(prompt, max_tokens=NUM_FEW_TOKENS) for prompt in prompts]
        answers = [token_ids(answer) for answer in ask_all(stack.url, bodies)]
    finally:
        assert stack.stop() == 0
    assert answers == [chosen_greedily(smollm2.reference(), *pair) for pair in zip(prompts, answers, strict=True)]
    assert [len(answer) for answer in answers] == [NUM_FEW_TOKENS] * len(prompts)


def test_more_ranks_than_the_model_can_be_split_into_are_refused_at_start_with_those_that_can_be(
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path / "model", "one_kv_head")
    options = (f"--model={tmp_path / 'model'}", "--kv-cache-memory=2MB", f"--log-dir={tmp_path}")
    serve = Command("serve", "--port=0", "--decode-tp=4", *options)
    try:
        told = serve.wait_for(r"(.*tensor_parallel_size.*)", START_S)
        assert serve.wait(START_S) == 2
    finally:
        serve.close()
    assert "must be 1 to 3 for 4 heads, 1 KV heads, 80 columns of the MLP and 257 tokens, got 4" in told
