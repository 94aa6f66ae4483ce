"""Stand-ins that are deterministic and check what they are given."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from common.engine.step import ScheduledSequence, StepPlan, StepResult
from common.ids import BlockId, PeerId
from common.kv_layout import KVLayout, head_checksums
from common.kv_source import KVShard, KVSource
from common.sampling import SamplingParams

VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 10_000
TOKEN_BYTES = 4


def fake_layout(block_size: int = 4, num_kv_heads: int = 1) -> KVLayout:
    """A layout whose blocks hold one int32 a token: 1 layer, K and V of half a float32 each would not exist."""
    return KVLayout(
        name="fake",
        dtype="float32",
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=1,
        block_size=block_size,
        model_hash="fake-model",
    )


def fake_source(peer: PeerId, layout: KVLayout, num_blocks: int) -> KVSource:
    """Of a group of one rank, at an address where nobody is."""
    shard = KVShard(
        peer=peer,
        data_address="tcp://prefill:1",
        shm_name="",
        shm_nonce="",
        first_head=0,
        num_heads=layout.num_kv_heads,
    )
    return KVSource(peer=peer, layout=layout, num_blocks=num_blocks, shards=(shard,))


def next_token(token_ids: Sequence[int], sampling: SamplingParams) -> int:
    """The fake model: a hash of all tokens before it and, unless greedy, of the seed."""
    seed = 0 if sampling.is_greedy else sampling.seed
    data = array("Q", (seed, *token_ids)).tobytes()
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little") % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What an undisturbed request gets from the fake model (no end tokens)."""
    token_ids = list(prompt)
    for _ in range(sampling.max_tokens):
        token_ids.append(next_token(token_ids, sampling))
    return token_ids[len(prompt) :]


class FakeRunner:
    """Keeps token ids where a model keeps KV, and checks that they are right before it samples.

    So a block that was shared, moved or overwritten wrongly fails the test that caused it.
    memory: [num_blocks, block_bytes], written in place; the tail of a block's bytes stays zero.
    """

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        self.layout = layout
        self.memory = bytearray(num_blocks * layout.block_bytes)

    def block(self, block_id: BlockId) -> memoryview:
        size = self.layout.block_bytes
        return memoryview(self.memory)[block_id * size : (block_id + 1) * size]

    def claim_cores(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def others_want_cores(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        for sequence in plan.sequences:
            self._write(sequence)
        sampled = {s.key: self._sample(s, s.sampling) for s in plan.sequences if s.sampling is not None}
        sealed = {block_id for s in plan.sequences for block_id in s.seal}
        checksums = {block_id: head_checksums(self.block(block_id), self.layout.head_bytes) for block_id in sealed}
        return StepResult(sampled=sampled, checksums=checksums, duration_s=0.001)

    def _slot(self, sequence: ScheduledSequence, position: int) -> memoryview:
        block_size = self.layout.block_size
        block = self.block(sequence.block_table[position // block_size])
        offset = position % block_size * TOKEN_BYTES
        return block[offset : offset + TOKEN_BYTES]

    def _write(self, sequence: ScheduledSequence) -> None:
        for index, token_id in enumerate(sequence.token_ids):
            self._slot(sequence, sequence.start + index)[:] = token_id.to_bytes(TOKEN_BYTES, "little")

    def _sample(self, sequence: ScheduledSequence, sampling: SamplingParams) -> int:
        token_ids = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        assert len(token_ids) == sequence.start + len(sequence.token_ids)
        stored = [int.from_bytes(self._slot(sequence, position), "little") for position in range(len(token_ids))]
        assert stored == token_ids, f"{sequence.key}: the cache holds {stored}, the sequence is {token_ids}"
        return next_token(token_ids, sampling)
