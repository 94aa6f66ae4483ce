"""What both worker services do with messages: stale, doubled, overtaking, from gateways that go."""

from dataclasses import replace

from common.engine.block_manager import BlockManager
from common.engine.worker import GATEWAY_TIMEOUT_S, WorkerIdentity
from common.ids import PeerId, RequestId, SequenceKey
from common.kv_layout import KVLayout
from common.sampling import SamplingParams
from common.service import LinkFull, LinkLost, Received, Send, Tick
from common.wire import (
    Cancel,
    DecodeRequest,
    Ended,
    EndReason,
    GatewayStatus,
    PrefillDone,
    PrefillRequest,
    Tokens,
)
from decode.scheduler import DecodeScheduler
from decode.service import DecodeService
from kvtransfer.transport import AbortPull, KVReleased, Publish, PullFinished, SendRelease, StartPull, Withdraw
from prefill.scheduler import PrefillScheduler
from prefill.service import PrefillService
from tests.fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeRunner, fake_layout
from tests.unit.test_decode_scheduler import SOURCE, request

GATEWAY = PeerId("gateway#1")
LAYOUT = fake_layout(block_size=4)
KEY = SequenceKey(RequestId("a"), 0)
STATUS = GatewayStatus(name="gateway", address="tcp://gateway:1", leases=())


class Prefill:
    """A prefill service with a fake runner."""

    def __init__(self, num_blocks: int = 16, max_batch_tokens: int = 64) -> None:
        self.blocks = BlockManager(num_blocks, LAYOUT.block_size)
        self.runner = FakeRunner(num_blocks, LAYOUT)
        scheduler = PrefillScheduler(self.blocks, max_batch_tokens=max_batch_tokens, max_step_s=0, lease_s=10)
        identity = WorkerIdentity("prefill", "tcp://prefill:1", LAYOUT, num_blocks, VOCAB_SIZE, MAX_MODEL_LEN)
        self.service = PrefillService(identity, SOURCE, self.blocks, scheduler)

    def ask(self, length: int = 9, attempt: int = 0, max_tokens: int = 5) -> list[object]:
        message = PrefillRequest(
            request_id=KEY.request_id,
            attempt=attempt,
            prompt_token_ids=tuple(range(length)),
            output_token_ids=(),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0),
            age_s=0,
        )
        return [*self.service.handle(Received(GATEWAY, message), 0.0)]

    def step(self, now: float = 0.0) -> list[object]:
        plan, _ = self.service.plan(now)
        return [] if plan is None else [*self.service.complete(plan, self.runner.execute(plan), now)]


class Decode:
    """A decode service with a fake layout."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.blocks = BlockManager(num_blocks, LAYOUT.block_size)
        identity = WorkerIdentity("decode", "tcp://decode:1", LAYOUT, num_blocks, VOCAB_SIZE, MAX_MODEL_LEN)
        self.service = DecodeService(identity, self.blocks, DecodeScheduler(self.blocks, max_num_seqs=8))

    def ask(self, message: DecodeRequest) -> list[object]:
        return [*self.service.handle(Received(GATEWAY, message), 0.0)]


def ended_reason(effect: object) -> EndReason:
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Ended)
    return effect.message.reason


def test_a_handoff_is_published_before_it_is_announced_and_withdrawn_when_released() -> None:
    prefill = Prefill()
    prefill.ask()
    publish, send = prefill.step()
    assert isinstance(publish, Publish)
    assert isinstance(send, Send)
    assert isinstance(send.message, PrefillDone)
    assert send.message.kv is not None
    assert send.message.kv.block_ids == publish.block_ids
    assert prefill.service.handle(KVReleased(KEY), 0.0) == [Withdraw(KEY)]
    assert prefill.blocks.num_owned == 0


def test_a_cancel_that_overtakes_its_request_wins() -> None:
    prefill = Prefill()
    prefill.service.handle(Received(GATEWAY, Cancel(request_id=KEY.request_id, attempt=0)), 0.0)
    prefill.ask()
    assert prefill.step() == []
    prefill.ask(attempt=1)
    assert len(prefill.step()) == 2


def test_a_newer_attempt_replaces_the_older_one() -> None:
    prefill = Prefill()
    prefill.ask()
    prefill.step()
    assert prefill.ask(attempt=1) == [Withdraw(KEY)]
    assert prefill.ask(attempt=0) == []
    assert prefill.blocks.num_owned == 0


def test_a_request_that_can_never_fit_is_refused() -> None:
    (effect,) = Prefill(num_blocks=2).ask(length=9)
    assert ended_reason(effect) is EndReason.TOO_LARGE


def test_what_the_model_cannot_compute_is_refused_and_never_gets_into_a_step_with_others() -> None:
    """Its embedding has no row for such a token, its rotary table no position so far."""
    prefill, decode = Prefill(num_blocks=4000), Decode(num_blocks=4000)
    good = request("a", num_prompt=6, max_tokens=4)
    unknown = VOCAB_SIZE
    sampling = good.sampling
    for changes, reason in (
        ({"prompt_token_ids": (1, 2, unknown, 4, 5, 6)}, EndReason.REFUSED),
        ({"output_token_ids": (unknown,)}, EndReason.REFUSED),
        ({"sampling": replace(sampling, logit_bias=((unknown, 1.0),))}, EndReason.REFUSED),
        ({"sampling": replace(sampling, stop_token_ids=(unknown,))}, EndReason.REFUSED),
        ({"sampling": replace(sampling, eos_token_ids=(unknown,))}, EndReason.REFUSED),
        ({"prompt_token_ids": (1,) * MAX_MODEL_LEN}, EndReason.TOO_LARGE),
        ({"sampling": replace(sampling, max_tokens=1), "output_token_ids": (7,) * MAX_MODEL_LEN}, EndReason.TOO_LARGE),
    ):
        bad = replace(good, request_id=RequestId("bad"), **changes)
        for service, message in ((prefill.service, as_prefill(bad)), (decode.service, bad)):
            (effect,) = service.handle(Received(GATEWAY, message), 0.0)
            assert ended_reason(effect) is reason
    prefill.service.handle(Received(GATEWAY, as_prefill(good)), 0.0)
    plan, _ = prefill.service.plan(0.0)
    assert plan is not None
    assert [sequence.key for sequence in plan.sequences] == [KEY]


def as_prefill(message: DecodeRequest) -> PrefillRequest:
    shared = {name: getattr(message, name) for name in PrefillRequest.__slots__}
    return PrefillRequest(**shared)


def test_a_worker_s_context_is_its_blocks_or_its_model_s_whichever_is_less() -> None:
    for num_blocks, max_context in ((16, 64), (4000, MAX_MODEL_LEN)):
        for service in (Prefill(num_blocks).service, Decode(num_blocks).service):
            assert service.status(0.0).max_context == max_context


def test_a_lease_that_is_not_renewed_ends_the_handoff_and_says_so() -> None:
    prefill = Prefill()
    prefill.ask()
    prefill.step(now=0.0)
    lease = GatewayStatus(name="gateway", address="tcp://gateway:1", leases=((KEY.request_id, 0),))
    prefill.service.handle(Received(GATEWAY, lease), 8.0)
    prefill.service.handle(Received(GATEWAY, STATUS), 17.0)
    assert prefill.service.handle(Tick(), 17.0) == []
    prefill.service.handle(Received(GATEWAY, STATUS), 18.5)
    withdraw, send = prefill.service.handle(Tick(), 18.5)
    assert withdraw == Withdraw(KEY)
    assert ended_reason(send) is EndReason.LEASE_EXPIRED
    assert prefill.blocks.num_owned == 0


def test_a_prompt_stays_protected_in_the_cache_while_its_gateway_names_the_request() -> None:
    """With whatever attempt it is at, and however long it decodes elsewhere."""
    prefill = Prefill()
    prefill.ask()
    prefill.step(now=0.0)
    prefill.service.handle(KVReleased(KEY), 1.0)
    for second in range(2, 60):
        lease = GatewayStatus(name="gateway", address="tcp://gateway:1", leases=((KEY.request_id, second // 20),))
        prefill.service.handle(Received(GATEWAY, lease), float(second))
        prefill.service.handle(Tick(), float(second))
        assert prefill.service.status(0.0).counters["protected_blocks"] == 2
    prefill.service.handle(Received(GATEWAY, STATUS), 69.5)
    prefill.service.handle(Tick(), 69.5)
    assert prefill.service.status(0.0).counters["protected_blocks"] == 0
    assert prefill.service.is_drained


def test_a_lost_link_and_a_cancel_leave_the_prompt_protected_since_the_next_attempt_may_come() -> None:
    cancel = Received(GATEWAY, Cancel(request_id=KEY.request_id, attempt=0))
    for event in (LinkLost(GATEWAY, "gap"), cancel):
        prefill = Prefill()
        prefill.ask()
        prefill.step(now=0.0)
        prefill.service.handle(event, 1.0)
        assert (prefill.blocks.num_owned, prefill.blocks.num_protected) == (0, 2)


def test_everything_of_a_silent_gateway_is_given_up() -> None:
    prefill = Prefill()
    prefill.ask()
    prefill.step()
    _, send = prefill.service.handle(Tick(), GATEWAY_TIMEOUT_S + 0.1)
    assert ended_reason(send) is EndReason.LINK_LOST
    assert prefill.blocks.num_owned == 0


def test_what_a_full_link_did_not_take_is_sent_later() -> None:
    prefill = Prefill()
    prefill.ask()
    _, send = prefill.step()
    assert isinstance(send, Send)
    assert prefill.service.handle(LinkFull(GATEWAY, send.message), 0.1) == []
    assert not prefill.service.is_drained
    assert prefill.service.handle(Tick(), 0.2) == [send]


def test_a_draining_prefill_worker_takes_nothing_and_finishes_its_handoffs() -> None:
    prefill = Prefill()
    prefill.ask()
    prefill.step()
    assert prefill.service.drain() == []
    assert not prefill.service.is_drained
    (refusal,) = prefill.ask(attempt=1)
    assert ended_reason(refusal) is EndReason.DRAINING
    prefill.service.handle(KVReleased(KEY), 0.0)
    assert prefill.service.is_drained


def test_a_pull_is_started_released_and_decoded() -> None:
    decode = Decode()
    assert decode.ask(request("a", num_prompt=6, max_tokens=4)) == []
    plan, effects = decode.service.plan(0.0)
    assert plan is None
    (start,) = effects
    assert isinstance(start, StartPull)
    assert decode.service.handle(PullFinished(KEY, "", 1), 0.0) == [SendRelease(KEY, SOURCE)]
    plan, _ = decode.service.plan(0.0)
    assert plan is not None


def test_a_pull_that_failed_is_reported() -> None:
    decode = Decode()
    decode.ask(request("a", num_prompt=6, max_tokens=4))
    decode.service.plan(0.0)
    (send,) = decode.service.handle(PullFinished(KEY, "checksum", 0), 0.0)
    assert ended_reason(send) is EndReason.TRANSFER
    assert decode.blocks.num_owned == 0


def test_cancelling_a_pull_aborts_it_and_nothing_is_reported() -> None:
    decode = Decode()
    decode.ask(request("a", num_prompt=6, max_tokens=4))
    decode.service.plan(0.0)
    cancel = Received(GATEWAY, Cancel(request_id=KEY.request_id, attempt=0))
    assert decode.service.handle(cancel, 0.0) == [AbortPull(KEY)]
    assert decode.service.handle(cancel, 0.0) == []
    assert decode.service.handle(PullFinished(KEY, "aborted", 0), 0.0) == []
    assert decode.service.is_drained


def test_kv_of_another_layout_or_length_is_refused_by_name() -> None:
    decode = Decode()
    message = request("a", num_prompt=6, max_tokens=4)
    other = KVLayout(**{**{name: getattr(LAYOUT, name) for name in KVLayout.__slots__}, "dtype": "bfloat16"})
    source = type(SOURCE)(**{**{name: getattr(SOURCE, name) for name in SOURCE.__slots__}, "layout": other})
    for kv, named in (
        ({"source": source}, "dtype: 'float32' != 'bfloat16'"),
        ({"num_tokens": 5}, "6 tokens"),
        ({"checksums": ((1,),)}, "2 blocks"),
        ({"checksums": ((1,), (2, 3))}, "checksums of 1 heads a block are wanted, got 2"),
        ({"checksums": ((1,), ())}, "checksums of 1 heads a block are wanted, got 0"),
    ):
        descriptor = type(message.kv)(**{**{name: getattr(message.kv, name) for name in message.kv.__slots__}, **kv})
        fields = {name: getattr(message, name) for name in message.__slots__}
        (send,) = decode.ask(DecodeRequest(**{**fields, "kv": descriptor}))
        assert ended_reason(send) is EndReason.TRANSFER
        assert isinstance(send, Send)
        assert isinstance(send.message, Ended)
        assert named in send.message.detail


def test_tokens_that_a_full_link_did_not_take_join_the_next_ones() -> None:
    decode = Decode()
    runner = FakeRunner(16, LAYOUT)
    decode.ask(request("a", num_prompt=6, max_tokens=5))
    _, (start,) = decode.service.plan(0.0)
    assert isinstance(start, StartPull)
    for position in range(6):  # what the pull would have brought
        target = start.copies[position // 4].target
        runner.block(target)[position % 4 * 4 : position % 4 * 4 + 4] = position.to_bytes(4, "little")
    decode.service.handle(PullFinished(KEY, "", 1), 0.0)
    sent: list[Tokens] = []
    for _ in range(2):
        plan, _ = decode.service.plan(0.0)
        assert plan is not None
        (send,) = decode.service.complete(plan, runner.execute(plan), 0.0)
        assert isinstance(send, Send)
        assert isinstance(send.message, Tokens)
        sent.append(send.message)
        decode.service.handle(LinkFull(GATEWAY, send.message), 0.0)
    (entry,) = sent[1].entries
    assert (entry.index, len(entry.token_ids)) == (1, 2)
    (again,) = decode.service.handle(Tick(), 0.1)
    assert isinstance(again, Send)
    assert again.message == sent[1]
    decode.service.handle(LinkFull(GATEWAY, sent[1]), 0.1)
    decode.service.handle(LinkLost(GATEWAY, "gone"), 0.2)
    assert decode.service.is_drained
