"""Admission, pulls, growth and preemption on the decode side, by stories and random event orders."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.block_manager import BlockManager
from common.engine.step import StepResult
from common.ids import BlockId, PeerId, RequestId, SequenceKey
from common.kv_source import KVDescriptor
from common.sampling import SamplingParams
from common.wire import DecodeRequest
from decode.scheduler import DecodeEvent, DecodeFailed, DecodeScheduler, DecodeSequence
from tests.fakes import fake_layout, fake_source

BLOCK_SIZE = 4
GATEWAY = PeerId("gateway#0")
SOURCE = fake_source(PeerId("prefill#0"), fake_layout(BLOCK_SIZE), num_blocks=100)


def request(name: str, num_prompt: int, max_tokens: int, *, attempt: int = 0, first: int = 0) -> DecodeRequest:
    """With token 0 out already, and the KV of the prompt at its source."""
    num_blocks = -(-num_prompt // BLOCK_SIZE)
    return DecodeRequest(
        request_id=RequestId(name),
        attempt=attempt,
        prompt_token_ids=tuple(range(first, first + num_prompt)),
        output_token_ids=(7,),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0),
        age_s=0.0,
        kv=KVDescriptor(
            source=SOURCE,
            num_tokens=num_prompt,
            block_ids=tuple(BlockId(50 + index) for index in range(num_blocks)),
            checksums=tuple((index,) for index in range(num_blocks)),
        ),
    )


class Bench:
    """A scheduler whose steps sample the index of the token."""

    def __init__(self, num_blocks: int = 16, max_num_seqs: int = 8) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = DecodeScheduler(self.blocks, max_num_seqs=max_num_seqs)
        self.now = 0.0

    def add(self, name: str, num_prompt: int, max_tokens: int = 9, *, attempt: int = 0, first: int = 0) -> SequenceKey:
        self.now += 1.0
        self.scheduler.add(request(name, num_prompt, max_tokens, attempt=attempt, first=first), GATEWAY, self.now)
        return SequenceKey(RequestId(name), attempt)

    def admit_and_pull(self) -> list[SequenceKey]:
        admitted = [sequence.key for sequence in self.scheduler.admit()]
        for key in admitted:
            self.scheduler.pulled(key, is_complete=True)
        return admitted

    def step(self, failing: SequenceKey | None = None) -> tuple[list[DecodeEvent], list[DecodeSequence]]:
        plan, preempted = self.scheduler.schedule()
        if plan is None:
            return [], preempted
        sampled = {s.key: len(s.output_token_ids) for s in plan.sequences if s.key != failing}
        failed = {} if failing is None else {failing: "broken"}
        return self.scheduler.update(plan, StepResult(sampled=sampled, failed=failed)), preempted


def test_a_sequence_runs_after_its_pull_until_its_length() -> None:
    bench = Bench()
    key = bench.add("a", num_prompt=6, max_tokens=4)
    assert bench.step() == ([], [])
    assert bench.admit_and_pull() == [key]
    events = [event for _ in range(3) for event in bench.step()[0]]
    assert [event.index for event in events if not isinstance(event, DecodeFailed)] == [1, 2, 3]
    assert bench.scheduler.sequences() == []
    assert bench.blocks.num_owned == 0


def test_only_blocks_that_are_not_cached_are_pulled() -> None:
    bench = Bench()
    bench.add("a", num_prompt=10)
    bench.admit_and_pull()
    bench.add("b", num_prompt=10)
    (second,) = bench.scheduler.admit()
    (copy,) = bench.scheduler.copies(second)
    assert (copy.source, copy.checksums) == (52, (2,))
    assert second.block_table[:2] == bench.scheduler.sequences()[1].block_table[:2]


def test_a_pull_that_failed_gives_its_blocks_back_and_caches_nothing() -> None:
    bench = Bench()
    key = bench.add("a", num_prompt=8)
    bench.scheduler.admit()
    assert bench.scheduler.pulled(key, is_complete=False) is not None
    assert bench.blocks.num_owned == 0
    bench.add("b", num_prompt=8)
    (second,) = bench.scheduler.admit()
    assert second.num_shared == 0


def test_blocks_of_a_cancelled_pull_stay_reserved_until_it_has_ended() -> None:
    bench = Bench()
    key = bench.add("a", num_prompt=8)
    bench.scheduler.admit()
    owned = bench.blocks.num_owned
    assert bench.scheduler.cancel(key)
    assert not bench.scheduler.cancel(key), "the pull is aborted once"
    assert bench.blocks.num_owned == owned
    assert bench.scheduler.pulled(key, is_complete=False) is None
    assert bench.blocks.num_owned == 0


def test_nobody_is_overtaken_while_waiting_for_blocks() -> None:
    bench = Bench(num_blocks=6)
    bench.add("a", num_prompt=11)
    bench.admit_and_pull()
    bench.add("large", num_prompt=15, first=100)
    bench.add("small", num_prompt=3, first=200)
    assert bench.admit_and_pull() == []


def test_resumed_sequences_are_admitted_first() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("new", num_prompt=3)
    resumed = bench.add("resumed", num_prompt=3, attempt=1, first=100)
    assert bench.admit_and_pull() == [resumed]


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    bench = Bench(num_blocks=7)
    old = bench.add("old", num_prompt=11, max_tokens=14)
    young = bench.add("young", num_prompt=7, max_tokens=14, first=100)
    assert bench.admit_and_pull() == [old, young]
    preempted: list[SequenceKey] = []
    for _ in range(13):
        preempted += [sequence.key for sequence in bench.step()[1]]
    assert preempted == [young]
    assert bench.scheduler.sequences() == []
    assert bench.blocks.num_owned == 0


def test_a_sequence_that_breaks_the_step_ends_alone() -> None:
    bench = Bench()
    bad, good = bench.add("bad", num_prompt=3), bench.add("good", num_prompt=3, first=100)
    bench.admit_and_pull()
    events, _ = bench.step(failing=bad)
    assert [type(event).__name__ for event in events] == ["DecodeFailed", "Decoded"]
    assert [sequence.key for sequence in bench.scheduler.sequences()] == [good]


class DecodeMachine(RuleBasedStateMachine):
    """Sequences come, are pulled or not, run, and end in every possible way."""

    @initialize(num_blocks=st.integers(4, 14), max_num_seqs=st.integers(1, 4))
    def start(self, num_blocks: int, max_num_seqs: int) -> None:
        self.bench = Bench(num_blocks, max_num_seqs)
        self.count = 0
        self.pulling: set[SequenceKey] = set()

    @rule(length=st.integers(1, 20), max_tokens=st.integers(2, 12), kind=st.integers(0, 2), attempt=st.integers(0, 1))
    def add(self, length: int, max_tokens: int, kind: int, attempt: int) -> None:
        if length + max_tokens > self.bench.scheduler.max_context:
            return
        self.count += 1
        self.bench.add(f"r{self.count}", length, max_tokens, attempt=attempt, first=kind * 1000)

    @rule()
    def admit(self) -> None:
        self.pulling |= {sequence.key for sequence in self.bench.scheduler.admit()}

    @precondition(lambda self: self.pulling)
    @rule(data=st.data(), is_complete=st.booleans())
    def end_a_pull(self, data: st.DataObject, is_complete: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.pulling)))
        self.pulling.remove(key)
        self.bench.scheduler.pulled(key, is_complete)

    @rule()
    def step(self) -> None:
        running = {s.key: s for s in self.bench.scheduler.sequences() if s.block_table and s.key not in self.pulling}
        oldest = min(running.values(), key=lambda s: s.age_order, default=None)
        _, preempted = self.bench.step()
        assert oldest is None or oldest.key not in {sequence.key for sequence in preempted}

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if keys := sorted(sequence.key for sequence in self.bench.scheduler.sequences()):
            self.bench.scheduler.cancel(data.draw(st.sampled_from(keys)))

    @invariant()
    def blocks_are_owned_by_live_sequences_only(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.blocks.check()
        owned = {block_id for s in self.bench.scheduler.sequences() for block_id in s.block_table}
        assert self.bench.blocks.num_owned == len(owned)
        assert self.bench.scheduler.num_pulling == len(self.pulling)

    def teardown(self) -> None:
        """Left alone, everything ends: the oldest always makes progress."""
        if not hasattr(self, "bench"):
            return
        for key in self.pulling:
            self.bench.scheduler.pulled(key, is_complete=True)
        for _ in range(1000):
            self.bench.admit_and_pull()
            self.bench.step()
            if not self.bench.scheduler.sequences():
                break
        assert self.bench.scheduler.sequences() == []
        assert self.bench.blocks.num_owned == 0


TestDecodeMachine = DecodeMachine.TestCase
