"""KV blocks travel whole by each route, and each pool does only its own part."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.e2e.clients import ask, completion, token_ids
from tests.e2e.stack import Stack
from tests.e2e.tiny import BLOCK_BYTES, save_tiny
from tests.model.reference import chosen_greedily
from tests.service.kv_rig import MODES

PROMPT = [(index * 37) % 256 for index in range(100)]
NUM_BLOCKS = 7
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("transport") / "model"
    return folder, save_tiny(folder)


@pytest.mark.parametrize("transport", MODES)
def test_kv_blocks_go_whole_by_the_chosen_route_and_each_pool_computes_its_own_tokens(
    transport: str, model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    folder, reference = model
    stack = Stack(
        *(f"--model={folder}", "--dtype=float32", "--kv-cache-memory=20MB", f"--kv-transport={transport}"),
        log_dir=tmp_path,
    )
    try:
        answer = token_ids(ask(stack.url, completion(PROMPT, max_tokens=NUM_TOKENS)))
        assert answer == chosen_greedily(reference, PROMPT, answer)
        stack.wait_until(lambda: stack.counters("decode-0")["later_tokens_sampled"] == NUM_TOKENS - 1)
        stack.wait_until(lambda: stack.counters("prefill-0")["first_tokens_sampled"] == 1)
        prefill, decode = stack.counters("prefill-0"), stack.counters("decode-0")
    finally:
        assert stack.stop() == 0
    received = {name: decode[f"kv_received_bytes_{name}"] for name in ("tcp", "shm", "nixl")}
    assert received == {"tcp": 0, "shm": 0, "nixl": 0, transport: NUM_BLOCKS * BLOCK_BYTES}
    assert prefill["prompt_tokens_computed"] == len(PROMPT)
    assert prefill["later_tokens_sampled"] == prefill["output_tokens_computed"] == 0
    assert decode["prompt_tokens_computed"] == decode["first_tokens_sampled"] == 0
