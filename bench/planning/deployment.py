"""What is planned for: how many workers, and what each of them is like. Pure."""

from dataclasses import dataclass

from bench.planning.costs import Fit, StepCosts
from bench.planning.host import StepTime
from common.engine.block_manager import BlockManager
from common.engine.step import StepPlan
from common.engine.worker import WorkerIdentity
from common.ids import PeerId
from common.kv_layout import KVLayout
from common.kv_source import KVShard, KVSource
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService

MODEL_HASH = "planned"
_ADDRESS = "tcp://nowhere:1"


@dataclass(frozen=True, slots=True)
class Pools:
    """How many workers of each kind."""

    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return f"{self.num_prefill}:{self.num_decode}"

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """What every worker is like. What is not said here is named as the options of workers are.

    steps:         costs, with all cores of its host
    shared_steps:  the same while another worker computes: all are on one host then; None: each has a host for itself
    handoff:       costs, by tokens
    link_s:        of a message between client and gateway, or gateway and worker, with what the gateway itself takes
    """

    steps: StepCosts
    shared_steps: StepCosts | None
    handoff: Fit
    link_s: float
    vocab_size: int
    block_size: int
    num_blocks: int
    max_batch_prefill_tokens: int
    max_step_s: float
    max_num_seqs: int
    itl_target_s: float
    kv_lease_s: float

    def prompt_time(self, plan: StepPlan) -> StepTime:
        return StepTime(self.steps.prompt_s(plan), (self.shared_steps or self.steps).prompt_s(plan))

    def decode_time(self, plan: StepPlan) -> StepTime:
        return StepTime(self.steps.decode_s(plan), (self.shared_steps or self.steps).decode_s(plan))

    def pull_s(self, num_blocks: int) -> float:
        return self.handoff.seconds((1, num_blocks * self.block_size))

    def prefill_service(self, peer: PeerId) -> PrefillService:
        blocks = BlockManager(self.num_blocks, self.block_size)
        scheduler = PrefillScheduler(
            blocks,
            max_batch_tokens=self.max_batch_prefill_tokens,
            max_step_s=self.max_step_s,
            lease_s=self.kv_lease_s,
        )
        return PrefillService(self._identity(peer), self._source(peer), blocks, scheduler)

    def decode_service(self, peer: PeerId) -> DecodeService:
        blocks = BlockManager(self.num_blocks, self.block_size)
        return DecodeService(self._identity(peer), blocks, DecodeScheduler(blocks, max_num_seqs=self.max_num_seqs))

    def _identity(self, peer: PeerId) -> WorkerIdentity:
        max_model_len = self.num_blocks * self.block_size
        return WorkerIdentity(peer, _ADDRESS, self._layout, self.num_blocks, self.vocab_size, max_model_len)

    def _source(self, peer: PeerId) -> KVSource:
        shard = KVShard(peer=peer, data_address=_ADDRESS, shm_name="", shm_nonce="", first_head=0, num_heads=1)
        return KVSource(peer=peer, layout=self._layout, num_blocks=self.num_blocks, shards=(shard,))

    @property
    def _layout(self) -> KVLayout:
        """Of blocks that hold nothing."""
        return KVLayout(
            name=MODEL_HASH,
            dtype="float32",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=self.block_size,
            model_hash=MODEL_HASH,
        )
