"""Greedy output of the real stack is transformers', token for token, in fp32."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from common.model_files import find_model
from gateway.chat_template import load_chat_template
from gateway.tokenizer import load_tokenizer
from tests.e2e.clients import ask, ask_all, completion, stream_all, token_ids
from tests.e2e.stack import Stack
from tests.model import smollm2
from tests.model.reference import chosen_greedily

NUM_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea in autumn.",
    "Explain to a child why the sky is blue.",
    "How many legs do three spiders and two dogs have together?",
    "Give me three ideas for a birthday present for my grandmother.",
    "Translate into French: The train leaves at eight o'clock.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that reverses a list in place.",
    "Summarise the story of Romeo and Juliet in two sentences.",
    "Which planets of the solar system have rings?",
    "I cannot sleep at night. What can I do?",
    "Compose an email that asks a colleague for the meeting notes.",
    "What happens when water freezes?",
    "Name five countries in South America, with their capitals.",
    "Is 97 a prime number? Explain your answer.",
    "Describe the taste of a lemon without the word sour.",
    "How do I cook rice so that it does not stick?",
    "Who wrote Don Quixote, and when?",
    "List the steps to change a bicycle tyre.",
    "What would you take along to a desert island? 🙂",
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prompts are computed in chunks of 512 tokens at most, however fast the machine is."""
    sizes = ("--kv-cache-memory=900MB", "--max-batch-prefill-tokens=512")
    running = Stack("--dtype=float32", *sizes, log_dir=tmp_path_factory.mktemp("logs"))
    yield running
    assert running.stop() == 0


def chat_prompts() -> list[list[int]]:
    """The questions in the model's chat template."""
    files = find_model("")
    tokenizer, template = load_tokenizer(files), load_chat_template(files)
    assert template is not None
    return [
        tokenizer.encode(
            template.render([{"role": "user", "content": question}], add_generation_prompt=True, variables={}),
            add_special_tokens=False,
        )
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return chat_prompts()


def text_tokens(num_tokens: int) -> list[int]:
    """Running text of exactly so many tokens: counting up, so that it never repeats itself."""
    text = " ".join(f"Line {index} of the log says that all is well." for index in range(num_tokens // 8 + 1))
    return load_tokenizer(find_model("")).encode(text, add_special_tokens=False)[:num_tokens]


def test_twenty_chat_prompts_sixteen_at_once_and_the_last_ones_alone(stack: Stack, prompts: list[list[int]]) -> None:
    bodies = [completion(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    together = [token_ids(answer) for answer in ask_all(stack.url, bodies[:16])]
    alone = [token_ids(ask(stack.url, body)) for body in bodies[14:]]
    assert [len(answer) for answer in together + alone] == [NUM_TOKENS] * (16 + 6)
    assert alone[:2] == together[14:]
    answers = together[:14] + alone
    assert answers == [chosen_greedily(smollm2.reference(), *pair) for pair in zip(prompts, answers, strict=True)]


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 47, 48, 49])
def test_prompts_around_block_boundaries(stack: Stack, num_tokens: int) -> None:
    prompt = text_tokens(num_tokens)
    answer = token_ids(ask(stack.url, completion(prompt, max_tokens=20)))
    assert answer == chosen_greedily(smollm2.reference(), prompt, answer)
    assert len(answer) == 20


@pytest.mark.parametrize("num_tokens", [1000, pytest.param(3000, marks=pytest.mark.full)])
def test_a_long_prompt_is_computed_in_chunks(stack: Stack, num_tokens: int) -> None:
    prompt = text_tokens(num_tokens)
    steps = stack.counters("prefill-0")["steps"]
    answer = token_ids(ask(stack.url, completion(prompt, max_tokens=8)))
    assert answer == chosen_greedily(smollm2.reference(), prompt, answer)
    assert len(answer) == 8
    stack.wait_until(lambda: stack.counters("prefill-0")["steps"] > steps + 1)


def test_a_prompt_given_twice_is_cached_and_gives_the_same_tokens(stack: Stack) -> None:
    body = completion(text_tokens(100)[3:], max_tokens=30)
    first, second = ask(stack.url, body), ask(stack.url, body)
    assert token_ids(first) == token_ids(second)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_a_short_request_ends_before_a_long_prompt_which_is_given_up_when_its_client_leaves(stack: Stack) -> None:
    long = completion(text_tokens(3005)[5:], max_tokens=2)
    short = completion([6] * 5, max_tokens=2)
    computed = stack.counters("prefill-0")["prompt_tokens_computed"]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=long))
            await asyncio.sleep(0.1)  # the other one comes later
            (await client.post("/v1/completions", json=short)).raise_for_status()
            assert not asking.done()
            asking.cancel()

    asyncio.run(run())
    stack.wait_until_at_rest()
    assert stack.counters("prefill-0")["prompt_tokens_computed"] - computed < 3000


def test_a_short_request_that_arrives_late_ends_before_a_long_answer(stack: Stack) -> None:
    num_running: list[float] = []

    def ask_for_little() -> None:
        ask(stack.url, completion([6] * 5, max_tokens=3))
        num_running.append(stack.metric("vllm:num_requests_running"))

    stream_all(stack.url, [completion([5] * 10, max_tokens=100)], when=[(1, ask_for_little)])
    assert num_running == [1]


def test_each_pool_computes_only_its_own_tokens_and_the_kv_goes_through_whole(stack: Stack) -> None:
    prompt = text_tokens(140)[9:]  # as no other one begins
    stack.wait_until_at_rest()
    before = {worker: stack.counters(worker) for worker in ("prefill-0", "decode-0")}

    def growth(worker: str, *counters: str) -> float:
        now = stack.counters(worker)
        return sum(now[name] - before[worker][name] for name in counters)

    assert ask(stack.url, completion(prompt, max_tokens=10))["usage"]["completion_tokens"] == 10
    stack.wait_until(lambda: growth("decode-0", "later_tokens_sampled") == 9)
    stack.wait_until(lambda: growth("prefill-0", "first_tokens_sampled") == 1)
    assert growth("prefill-0", "prompt_tokens_computed") == len(prompt)
    assert growth("prefill-0", "later_tokens_sampled") == 0
    assert growth("decode-0", "prompt_tokens_computed", "first_tokens_sampled") == 0
    num_blocks = -(-len(prompt) // 16)
    block_bytes = 30 * 2 * 3 * 16 * 64 * 4
    assert growth("decode-0", "kv_received_bytes_shm", "kv_received_bytes_tcp") == num_blocks * block_bytes
