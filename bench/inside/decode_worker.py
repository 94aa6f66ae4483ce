"""A decode worker's service in this process, with sequences that run: what is around the model in a step."""

from common.engine.block_manager import BlockManager
from common.engine.worker import WorkerIdentity
from common.ids import BlockId, PeerId, RequestId, SequenceKey
from common.kv_layout import KVLayout
from common.kv_source import KVDescriptor, KVShard, KVSource
from common.sampling import SamplingParams
from common.service import Received
from common.wire import DecodeRequest
from decode.scheduler import WATERMARK, DecodeScheduler
from decode.service import DecodeService
from kvtransfer.transport import PullFinished, StartPull

GATEWAY = PeerId("gateway#1")
WORKER = PeerId("decode#1")
PREFILL = PeerId("prefill#1")


def num_cache_blocks(batch: int, num_tokens: int, block_size: int) -> int:
    """For sequences that grow to so many tokens, with what admission leaves free."""
    num_blocks = batch * -(-num_tokens // block_size)
    return num_blocks + int(num_blocks * 2 * WATERMARK) + 2


def start_worker(
    layout: KVLayout, num_blocks: int, vocab_size: int, batch: int, context: int, num_steps: int
) -> DecodeService:
    """A service whose next step has `batch` sequences of `context` tokens each, and which runs so many steps."""
    blocks = BlockManager(num_blocks, layout.block_size)
    identity = WorkerIdentity(
        "decode", "tcp://127.0.0.1:1", layout, num_blocks, vocab_size, num_blocks * layout.block_size
    )
    service = DecodeService(identity, blocks, DecodeScheduler(blocks, max_num_seqs=batch))
    source = KVSource(
        peer=PREFILL,
        layout=layout,
        num_blocks=num_blocks,
        shards=(
            KVShard(
                peer=PREFILL,
                data_address="tcp://127.0.0.1:1",
                shm_name="",
                shm_nonce="",
                first_head=0,
                num_heads=layout.num_kv_heads,
            ),
        ),
    )
    for number in range(batch):
        request = _request(number, source, vocab_size, context, num_steps)
        service.handle(Received(GATEWAY, request), 0.0)
        _, effects = service.plan(0.0)
        for effect in effects:  # the cache's random values stand for what would be pulled
            if isinstance(effect, StartPull):
                service.handle(PullFinished(effect.key, "", 0), 0.0)
    return service


def key_of(number: int) -> SequenceKey:
    return SequenceKey(RequestId(str(number)), 0)


def _request(number: int, source: KVSource, vocab_size: int, context: int, num_steps: int) -> DecodeRequest:
    """Prompts differ from their first token on, so that no two share a block."""
    num_prompt = context - 1
    num_blocks = -(-num_prompt // source.layout.block_size)
    key = key_of(number)
    return DecodeRequest(
        request_id=key.request_id,
        attempt=key.attempt,
        prompt_token_ids=tuple((number + 7919 * index) % vocab_size for index in range(num_prompt)),
        output_token_ids=(0,),
        sampling=SamplingParams(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True),
        age_s=0.0,
        kv=KVDescriptor(
            source=source,
            num_tokens=num_prompt,
            block_ids=tuple(BlockId(index) for index in range(num_blocks)),
            checksums=((0,) * source.layout.num_kv_heads,) * num_blocks,
        ),
    )
