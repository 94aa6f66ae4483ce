"""A stream whose decode worker dies has its prompt computed once: its KV has stayed where it was computed."""

import signal
from pathlib import Path

from tests.e2e.clients import ask, completion, stream_all, token_ids
from tests.e2e.stack import Stack
from tests.e2e.tiny import BLOCK_BYTES, save_tiny

NUM_BLOCKS = 40
NUM_PROMPT = 200
NUM_BEHIND_THE_LAST_FULL_BLOCK = NUM_PROMPT % 16
NUM_TOKENS = 300
NUM_OTHERS = 3
NUM_PROMPT_OF_OTHERS = 300
"""All of them together do not fit into the cache, so of what nobody protects nothing is left that is older."""


def test_a_prompt_is_computed_once_however_many_come_between_its_attempts(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    options = [f"--model={tmp_path / 'model'}", "--dtype=float32", f"--kv-cache-memory={NUM_BLOCKS * BLOCK_BYTES}"]
    stack = Stack(*options, "--kv-lease=3", log_dir=tmp_path)

    def compute_others_and_strike() -> None:
        stack.signal("decode-0", signal.SIGSTOP)  # the stream is still far from its end when they are computed
        for number in range(NUM_OTHERS):
            ask(stack.url, completion([number] * NUM_PROMPT_OF_OTHERS, max_tokens=1))
        stack.signal("decode-0", signal.SIGKILL)

    try:
        body = completion([index * 23 % 256 for index in range(NUM_PROMPT)], max_tokens=NUM_TOKENS)
        (stream,) = stream_all(stack.url, [body], when=[(1, compute_others_and_strike)])
        stack.wait_until(lambda: stack.counters("prefill-0")["later_tokens_sampled"] == 1)
        num_computed = stack.counters("prefill-0")["prompt_tokens_computed"]
        undisturbed = token_ids(ask(stack.url, body))
    finally:
        assert stack.stop() == 0
    assert num_computed == NUM_PROMPT + NUM_OTHERS * NUM_PROMPT_OF_OTHERS + NUM_BEHIND_THE_LAST_FULL_BLOCK
    assert stream.token_ids == undisturbed
