"""Chunks, prefixes, handoffs and their ends on the prefill side, by stories and random event orders."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.block_manager import BlockManager
from common.engine.step import StepPlan
from common.ids import PeerId, RequestId, SequenceKey
from common.sampling import SamplingParams
from common.wire import PrefillRequest
from prefill.chunks import assign_chunks
from prefill.scheduler import MIN_BUDGET_TOKENS, Prefilled, PrefillEvent, PrefillScheduler, Tenants
from tests.fakes import FakeRunner, fake_layout

GATEWAY = PeerId("gateway#0")


class Bench:
    """A scheduler with a fake runner."""

    def __init__(self, num_blocks: int = 16, max_batch_tokens: int = 16, hold_share: float = 0.0) -> None:
        layout = fake_layout(block_size=4)
        self.blocks = BlockManager(num_blocks, layout.block_size)
        self.runner = FakeRunner(num_blocks, layout)
        self.scheduler = PrefillScheduler(
            self.blocks, max_batch_tokens=max_batch_tokens, max_step_s=0, hold_share=hold_share, lease_s=10
        )
        self.now = 0.0

    def add(self, name: str, token_ids: tuple[int, ...], max_tokens: int = 5, attempt: int = 0) -> SequenceKey:
        request = PrefillRequest(
            request_id=RequestId(name),
            attempt=attempt,
            prompt_token_ids=token_ids,
            output_token_ids=(),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0),
            age_s=0.0,
        )
        self.scheduler.add(request, GATEWAY, self.now)
        self.now += 0.001
        return SequenceKey(RequestId(name), attempt)

    def step(self) -> tuple[StepPlan | None, list[PrefillEvent]]:
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            return None, []
        return plan, self.scheduler.update(plan, self.runner.execute(plan), self.now)

    def run(self) -> list[PrefillEvent]:
        events: list[PrefillEvent] = []
        while True:
            plan, new = self.step()
            events += new
            if plan is None:
                return events


def tokens(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_what_a_prompt_shares_is_not_evicted_for_one_that_starts_with_it() -> None:
    """Of its prefix the first block is cached and evictable, the second one owned by somebody else."""
    bench = Bench(num_blocks=104, max_batch_tokens=64)
    bench.add("short", tokens(5), max_tokens=1)
    bench.add("long", tokens(400))
    bench.step()
    bench.add("other", tokens(12, first=500), max_tokens=1)
    bench.step()
    assert (bench.blocks.num_owned, bench.blocks.num_available) == (100, 4)
    bench.add("a", tokens(8, first=600))
    key = bench.add("b", tokens(12))
    plan, _ = bench.step()
    assert plan is not None
    assert len(plan.sequences) == 3
    sequence = bench.scheduler.get(key)
    assert sequence is not None
    assert sequence.num_cached == 8
    bench.blocks.check()


def started_beside(tenants: Tenants) -> int:
    """How many of four prompts of three blocks each start in a cache of 16."""
    bench = Bench(num_blocks=16, max_batch_tokens=64)
    for index in range(4):
        bench.add(str(index), tokens(10, first=100 * index))
    plan = bench.scheduler.schedule(bench.now, tenants)
    return len(plan.sequences) if plan else 0


def test_prompts_leave_a_block_for_each_sequence_that_runs() -> None:
    assert started_beside(Tenants(num_running=0, max_num_seqs=8)) == 4
    assert started_beside(Tenants(num_running=1, max_num_seqs=8)) == 4
    assert started_beside(Tenants(num_running=2, max_num_seqs=8)) == 3
    assert started_beside(Tenants(num_running=13, max_num_seqs=99)) == 1
    assert started_beside(Tenants(num_running=14, max_num_seqs=99)) == 0


def test_prompts_and_sequences_are_no_more_than_a_step_takes() -> None:
    assert started_beside(Tenants(num_running=2, max_num_seqs=4)) == 2
    assert started_beside(Tenants(num_running=4, max_num_seqs=4)) == 0


def test_several_prompts_share_a_step() -> None:
    bench = Bench()
    bench.add("a", tokens(5))
    bench.add("b", tokens(6, 100))
    plan, events = bench.step()
    assert plan is not None
    assert [len(sequence.token_ids) for sequence in plan.sequences] == [5, 6]
    assert len(events) == 2


def test_a_long_prompt_is_computed_in_chunks_and_a_short_late_one_overtakes_it() -> None:
    bench = Bench(num_blocks=32)
    bench.add("long", tokens(60))
    bench.step()
    bench.add("short", tokens(4, 100))
    ended = [event.sequence.key.request_id for event in bench.run()]
    assert ended == ["short", "long"]


def first_of(prompts: dict[str, tuple[int, ...]], waited_s: float) -> str:
    """Which of prompts gets the next step of 16 tokens, when the first one came so long before the others.

    A step takes a millisecond, and an earlier one has told so. Each prompt needs a whole step at least.
    """
    bench = Bench(num_blocks=64)
    bench.add("earlier", tokens(16, 900))
    bench.step()
    for index, (name, token_ids) in enumerate(prompts.items()):
        bench.now = waited_s if index else 0.0
        bench.add(name, token_ids)
    plan, _ = bench.step()
    assert plan is not None
    return max(plan.sequences, key=lambda sequence: len(sequence.token_ids)).key.request_id


def test_a_short_prompt_overtakes_a_long_one_that_came_just_before_it() -> None:
    assert first_of({"long": tokens(160), "short": tokens(16, 200)}, waited_s=0.001) == "short"


def test_a_long_prompt_that_waited_some_times_its_own_work_is_not_overtaken_by_a_short_one() -> None:
    """It computes for 10 ms and bears 50, the short one 5."""
    assert first_of({"long": tokens(160), "short": tokens(16, 200)}, waited_s=0.044) == "short"
    assert first_of({"long": tokens(160), "short": tokens(16, 200)}, waited_s=0.046) == "long"


def test_prompts_of_one_length_come_in_the_order_of_arrival() -> None:
    assert first_of({"first": tokens(32), "second": tokens(32, 200)}, waited_s=0.001) == "first"


def test_a_long_prompt_that_is_cached_but_for_its_end_is_as_urgent_as_a_short_one() -> None:
    bench = Bench(num_blocks=64)
    bench.scheduler.release(bench.add("cached", tokens(80)))
    bench.run()
    bench.add("unknown", tokens(32, 200))
    key = bench.add("known", tokens(96))
    plan, _ = bench.step()
    assert plan is not None
    assert [(sequence.key, sequence.start) for sequence in plan.sequences] == [(key, 80)]


def test_a_step_is_not_cut_so_short_that_reading_the_weights_is_most_of_it() -> None:
    bench = Bench(num_blocks=256, max_batch_tokens=1000)
    bench.scheduler = PrefillScheduler(bench.blocks, max_batch_tokens=1000, max_step_s=1e-6)
    for first in (0, 2000):
        bench.add(str(first), tokens(400, first))
    bench.step()
    plan, _ = bench.step()
    assert plan is not None
    assert plan.num_tokens == MIN_BUDGET_TOKENS


def test_a_step_has_no_more_tokens_than_it_may_however_few_these_are() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.scheduler = PrefillScheduler(bench.blocks, max_batch_tokens=8, max_step_s=60)
    bench.add("a", tokens(40))
    for _ in range(2):
        plan, _ = bench.step()
        assert plan is not None
        assert plan.num_tokens == 8


def test_a_handoff_owns_its_blocks_until_it_is_released() -> None:
    bench = Bench()
    key = bench.add("a", tokens(9))
    bench.run()
    assert bench.blocks.num_owned == 3
    assert bench.scheduler.release(key)
    assert bench.blocks.num_owned == 0
    assert not bench.scheduler.release(key)


def test_a_released_prompt_is_found_in_the_cache_but_its_last_token_is_computed_again() -> None:
    bench = Bench()
    bench.scheduler.release(bench.add("a", tokens(8)))
    bench.run()
    bench.scheduler.cancel(SequenceKey(RequestId("a"), 0))
    bench.add("b", tokens(8))
    plan, events = bench.step()
    assert plan is not None
    assert (plan.sequences[0].start, len(plan.sequences[0].token_ids)) == (4, 4)
    assert isinstance(events[0], Prefilled)
    assert events[0].sequence.num_cached == 4
    assert len(events[0].sequence.checksums) == len(events[0].sequence.block_table) == 2


def test_of_a_waiting_prompt_only_what_is_not_cached_is_still_to_be_computed() -> None:
    bench = Bench()
    key = bench.add("a", tokens(10))
    assert bench.scheduler.num_unfinished_tokens == 10
    bench.run()
    bench.scheduler.release(key)
    bench.add("b", (*tokens(8), 99))
    assert bench.scheduler.num_unfinished_tokens == 1


def test_a_request_that_ends_with_its_first_token_keeps_no_blocks() -> None:
    bench = Bench()
    bench.add("a", tokens(9), max_tokens=1)
    bench.run()
    assert bench.blocks.num_owned == 0


def test_a_lease_that_nobody_renews_runs_out() -> None:
    bench = Bench()
    renewed, forgotten = bench.add("a", tokens(4)), bench.add("b", tokens(4, 100))
    bench.run()
    bench.scheduler.renew(renewed, now=9.0)
    assert [sequence.key for sequence in bench.scheduler.pop_expired(now=15.0)] == [forgotten]
    assert bench.blocks.num_owned == 1


def test_a_released_prompt_outlives_younger_ones_in_the_cache_while_its_lease_is_renewed() -> None:
    """And so its next attempt, with the tokens so far, computes only what lies behind its last full block."""
    for is_renewed, num_cached in ((True, 8), (False, 0)):
        bench = Bench(num_blocks=6)
        key = bench.add("a", tokens(10))
        bench.run()
        bench.scheduler.release(key)
        bench.now = 9.0
        if is_renewed:
            bench.scheduler.renew(key, bench.now)
        bench.now = 15.0
        bench.scheduler.pop_expired(bench.now)
        for number in range(1, 4):
            bench.add(str(number), tokens(12, 100 * number), max_tokens=1)
            bench.run()
        bench.add("a", tokens(13), attempt=1)
        (event,) = bench.run()
        assert event.sequence.num_cached == num_cached


def test_a_handoff_that_was_cancelled_is_protected_for_the_next_attempt_as_one_that_was_released() -> None:
    bench = Bench()
    key = bench.add("a", tokens(9))
    bench.run()
    bench.scheduler.cancel(key)
    assert (bench.blocks.num_owned, bench.blocks.num_protected) == (0, 2)


def test_what_is_taken_on_in_the_same_cache_is_not_protected() -> None:
    bench = Bench()
    key = bench.add("a", tokens(9))
    bench.run()
    bench.blocks.release(bench.scheduler.take(key).block_table)
    assert bench.blocks.num_protected == 0


def test_a_prompt_waits_until_all_its_blocks_are_there_and_is_not_overtaken() -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.add("a", tokens(9)), bench.add("b", tokens(8, 100))
    third = bench.add("c", tokens(4, 200))
    assert [event.sequence.key for event in bench.run()] == [first]
    bench.scheduler.release(first)
    assert {event.sequence.key for event in bench.run()} == {second, third}


def test_resumed_sequences_start_before_new_ones() -> None:
    bench = Bench(max_batch_tokens=4)
    bench.add("new", tokens(4))
    bench.add("resumed", tokens(4, 100), attempt=1)
    assert [event.sequence.key.request_id for event in bench.run()] == ["resumed", "new"]


@given(st.lists(st.integers(1, 5000), max_size=20), st.integers(1, 4096), st.floats(0, 1))
def test_chunks_use_the_budget_and_never_pass_it(remaining: list[int], budget: int, share: float) -> None:
    chunks = assign_chunks(remaining, budget, share)
    assert sum(chunks) == min(budget, sum(remaining))
    assert all(0 <= chunk <= wanted for chunk, wanted in zip(chunks, remaining, strict=True))


@given(st.integers(2000, 9000), st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_short_prompts_behind_a_long_one_fit_into_what_is_kept_for_them(long: int, short: list[int]) -> None:
    chunks = assign_chunks([long, *short], budget=1000, short_share=0.25)
    assert chunks[1] == short[0]


class PrefillMachine(RuleBasedStateMachine):
    """Requests with shared prefixes come, compute, hand off, and end in every possible way."""

    @initialize(num_blocks=st.integers(3, 12), budget=st.integers(1, 20), hold_share=st.sampled_from([0.0, 0.5]))
    def start(self, num_blocks: int, budget: int, hold_share: float) -> None:
        self.bench = Bench(num_blocks, budget, hold_share)
        self.count = 0
        self.live: set[SequenceKey] = set()

    @rule(seed=st.integers(0, 2), length=st.integers(1, 40), max_tokens=st.integers(1, 2), attempt=st.integers(0, 1))
    def add(self, seed: int, length: int, max_tokens: int, attempt: int) -> None:
        self.count += 1
        length = min(length, self.bench.scheduler.max_context)
        self.live.add(self.bench.add(f"r{self.count}", tokens(length, seed * 1000), max_tokens, attempt))

    @rule()
    def step(self) -> None:
        for event in self.bench.step()[1]:
            if isinstance(event, Prefilled) and event.finish:
                self.live.remove(event.sequence.key)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "release"]))
    def end(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        if how == "cancel":
            self.bench.scheduler.cancel(key)
            self.live.remove(key)
        elif self.bench.scheduler.release(key):
            self.live.remove(key)

    @rule(number=st.integers(1, 20), attempt=st.integers(0, 1))
    def renew(self, number: int, attempt: int) -> None:
        self.bench.scheduler.renew(SequenceKey(RequestId(f"r{number}"), attempt), self.bench.now)

    @rule()
    def let_leases_run_out(self) -> None:
        self.bench.now += 11
        for sequence in self.bench.scheduler.pop_expired(self.bench.now):
            self.live.remove(sequence.key)

    @invariant()
    def blocks_are_owned_by_live_sequences_only(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.blocks.check()
        sequences = self.bench.scheduler.sequences()
        assert {sequence.key for sequence in sequences} == self.live
        owned = {block_id for sequence in sequences for block_id in sequence.block_table}
        assert self.bench.blocks.num_owned == len(owned)

    def teardown(self) -> None:
        """Whatever happened, what is left can be completed as handoffs go, and nothing stays owned."""
        if not hasattr(self, "bench"):
            return
        for _ in range(200):
            self.bench.run()
            for sequence in self.bench.scheduler.sequences():
                self.bench.scheduler.release(sequence.key)
        assert self.bench.scheduler.sequences() == []
        assert self.bench.blocks.num_owned == 0
        self.bench.scheduler.pop_expired(self.bench.now + 11)
        assert self.bench.blocks.num_protected == 0


TestPrefillMachine = PrefillMachine.TestCase
