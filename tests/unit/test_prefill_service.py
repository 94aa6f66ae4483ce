"""What a prefill worker does when requests come twice, gateways go, steps break, and it is told to leave."""

from dataclasses import replace

import pytest

from common.engine.step import StepResult
from common.engine.worker import GATEWAY_TIMEOUT_S
from common.ids import PeerId, RequestId, SequenceKey
from common.sampling import FinishReason, SamplingParams
from common.service import LinkFull, LinkLost, Received, Send, Tick
from common.wire import Cancel, Ended, EndReason, PrefillDone, PrefillRequest
from kvtransfer.transport import Publish, Withdraw
from tests.unit.test_worker_services import GATEWAY, KEY, STATUS, Prefill, ended_reason

OTHER = PeerId("gateway-2#1")


def prompt(name: str, length: int = 9, attempt: int = 0) -> PrefillRequest:
    return PrefillRequest(
        request_id=RequestId(name),
        attempt=attempt,
        prompt_token_ids=tuple(range(length)),
        output_token_ids=(),
        sampling=SamplingParams(max_tokens=5, temperature=0),
        age_s=0,
    )


def done(effects: list[object]) -> PrefillDone:
    (message,) = (e.message for e in effects if isinstance(e, Send) and isinstance(e.message, PrefillDone))
    return message


def test_a_request_that_comes_twice_is_computed_once() -> None:
    prefill = Prefill()
    prefill.ask()
    prefill.ask()
    assert len(prefill.step()) == 2
    assert prefill.ask() == []
    assert prefill.step() == []
    assert prefill.service.status(0.0).counters["first_tokens_sampled"] == 1


def test_a_request_that_ends_with_its_first_token_is_never_published() -> None:
    prefill = Prefill()
    prefill.ask(max_tokens=1)
    effects = prefill.step()
    assert not any(isinstance(effect, Publish) for effect in effects)
    assert (done(effects).finish_reason, done(effects).kv) == (FinishReason.LENGTH, None)
    assert prefill.blocks.num_owned == 0


def test_the_tokens_so_far_of_a_resumed_request_are_computed_with_its_prompt() -> None:
    prefill = Prefill()
    resumed = replace(prompt("a", attempt=1), output_token_ids=(70, 71))
    prefill.service.handle(Received(GATEWAY, resumed), 0.0)
    message = done(prefill.step())
    assert message.index == 2
    assert message.kv is not None
    assert message.kv.num_tokens == 11


@pytest.mark.parametrize(
    ("length", "num_steps", "num_owned"), [(9, 0, 0), (100, 1, 25), (9, 1, 3)], ids=["waiting", "running", "handoff"]
)
def test_a_cancel_frees_a_prompt_at_every_stage(length: int, num_steps: int, num_owned: int) -> None:
    prefill = Prefill(num_blocks=32)
    prefill.ask(length=length)
    for _ in range(num_steps):
        prefill.step()
    assert prefill.blocks.num_owned == num_owned
    cancel = Received(GATEWAY, Cancel(request_id=KEY.request_id, attempt=3))
    assert prefill.service.handle(cancel, 0.0) == [Withdraw(KEY)]
    assert prefill.service.handle(cancel, 0.0) == []
    assert prefill.blocks.num_owned == 0
    assert prefill.service.is_drained


def test_a_lost_link_ends_what_its_gateway_asked_for_and_nothing_else() -> None:
    prefill = Prefill()
    prefill.service.handle(Received(GATEWAY, prompt("a")), 0.0)
    prefill.service.handle(Received(OTHER, prompt("b")), 0.0)
    prefill.step()
    withdraw, told = prefill.service.handle(LinkLost(GATEWAY, "gap"), 0.0)
    assert withdraw == Withdraw(KEY)
    assert ended_reason(told) is EndReason.LINK_LOST
    assert prefill.service.status(0.0).counters["handoffs"] == 1


def test_a_gateway_that_still_talks_keeps_its_handoffs() -> None:
    prefill = Prefill()
    prefill.ask()
    prefill.step()
    prefill.service.handle(Received(GATEWAY, STATUS), GATEWAY_TIMEOUT_S)
    assert prefill.service.handle(Tick(), GATEWAY_TIMEOUT_S + 0.1) == []


def test_what_could_not_be_sent_to_a_gateway_is_forgotten_with_it() -> None:
    prefill = Prefill()
    prefill.ask()
    _, send = prefill.step()
    assert isinstance(send, Send)
    prefill.service.handle(LinkFull(GATEWAY, send.message), 0.1)
    effects = prefill.service.handle(LinkLost(GATEWAY, "gone"), 0.2)
    told = Ended(request_id=KEY.request_id, attempt=0, reason=EndReason.LINK_LOST, detail="gone")
    assert effects == [Withdraw(KEY), Send(GATEWAY, told)]
    prefill.service.handle(LinkFull(GATEWAY, told), 0.2)
    assert prefill.service.is_drained, "nothing is kept for a gateway that is gone"
    assert prefill.service.handle(Tick(), 0.3) == []


def test_a_step_that_breaks_on_one_prompt_reports_it_and_goes_on_with_the_others() -> None:
    prefill = Prefill()
    for name in "ab":
        prefill.service.handle(Received(GATEWAY, prompt(name)), 0.0)
    plan, _ = prefill.service.plan(0.0)
    assert plan is not None
    good = prefill.runner.execute(plan)
    bad = SequenceKey(RequestId("b"), 0)
    result = StepResult(
        sampled={KEY: good.sampled[KEY]}, failed={bad: "logits are not finite"}, checksums=good.checksums
    )
    effects = prefill.service.complete(plan, result, 0.0)
    assert done([*effects]).request_id == "a"
    (failure,) = (e for e in effects if isinstance(e, Send) and isinstance(e.message, Ended))
    assert ended_reason(failure) is EndReason.FAILED
    assert prefill.blocks.num_owned == 3


def test_draining_gives_up_what_has_not_begun_and_leaving_gives_up_the_rest() -> None:
    prefill = Prefill(num_blocks=4)
    prefill.service.handle(Received(GATEWAY, prompt("a")), 0.0)
    prefill.step()
    prefill.service.handle(Received(GATEWAY, replace(prompt("b"), prompt_token_ids=tuple(range(50, 59)))), 0.0)
    assert prefill.step() == [], "there are no blocks for it"
    (given_up,) = prefill.service.drain()
    assert ended_reason(given_up) is EndReason.DRAINING
    assert prefill.service.status(0.0).is_draining
    withdraw, told = prefill.service.abandon()
    assert withdraw == Withdraw(KEY)
    assert ended_reason(told) is EndReason.DRAINING
    assert prefill.service.is_drained
    assert prefill.blocks.num_owned == 0
