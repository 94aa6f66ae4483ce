"""Who is routable, after any order of joins, deaths, silences and returns, is what a plain model says."""

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.ids import PeerId
from common.wire import Role
from gateway.fleet import WORKER_TIMEOUT_S, Fleet
from tests.unit.requests_rig import status

PLACES = st.integers(0, 3)
ROLES = st.sampled_from(Role)


@dataclass
class Place:
    """An address, the incarnation that lives there, and what has been said and sent.

    said_s:  when it was last heard of; None: never, or it is known to be gone
    """

    role: Role
    incarnation: int = 0
    said_s: float | None = None
    says_draining: bool = False
    sent_tokens: int = 0


class FleetMachine(RuleBasedStateMachine):
    """Mutable state: the fleet, the model by place, and incarnations that have died without a word, by when."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet("fake-model", lambda name, problem: None)
        self.now = 0.0
        self.places = {index: Place(role) for index, role in enumerate((*Role, Role.PREFILL))}
        self.ghosts: dict[PeerId, tuple[Role, float, bool]] = {}

    def peer(self, index: int) -> PeerId:
        return PeerId(f"w{index}#{self.places[index].incarnation}")

    def say(self, index: int) -> None:
        """Its status comes."""
        place = self.places[index]
        said = status(self.peer(index), place.role, is_draining=place.says_draining)
        self.fleet.observe(self.peer(index), replace(said, address=f"tcp://10.0.0.{index}:1"), self.now)
        place.said_s, place.sent_tokens = self.now, 0

    @rule(index=PLACES)
    def a_status_comes(self, index: int) -> None:
        self.say(index)

    @rule(index=PLACES)
    def anything_else_comes(self, index: int) -> None:
        """A sign of life of a worker that is known; of others it says nothing."""
        self.fleet.heard(self.peer(index), self.now)
        if self.places[index].said_s is not None:
            self.places[index].said_s = self.now

    @rule(index=PLACES, num_tokens=st.integers(1, 100))
    def a_prompt_is_sent(self, index: int, num_tokens: int) -> None:
        if worker := self.fleet.get(self.peer(index)):
            worker.sent_tokens += num_tokens
            self.places[index].sent_tokens += num_tokens

    @rule(index=PLACES)
    def it_says_that_it_drains_and_its_status_follows(self, index: int) -> None:
        self.fleet.note_draining(self.peer(index))
        self.places[index].says_draining = True
        self.say(index)

    @rule(index=PLACES)
    def its_link_is_lost(self, index: int) -> None:
        lost = self.fleet.remove(self.peer(index), self.now)
        assert (lost is not None) == (self.places[index].said_s is not None)
        self.places[index].said_s = None

    @rule(index=PLACES, is_noticed=st.booleans())
    def another_incarnation_starts_at_its_address(self, index: int, is_noticed: bool) -> None:
        """Links tell of the old one's end before the first status of the new one, if they know of both."""
        place, old = self.places[index], self.peer(index)
        if is_noticed:
            self.fleet.remove(old, self.now)
        elif place.said_s is not None:
            self.ghosts[old] = (place.role, place.said_s, place.says_draining)
        self.places[index] = Place(place.role, place.incarnation + 1)
        self.say(index)

    @rule(index=PLACES, role=ROLES)
    def another_worker_takes_its_place(self, index: int, role: Role) -> None:
        self.fleet.remove(self.peer(index), self.now)
        self.places[index] = Place(role, self.places[index].incarnation + 1)

    @rule(seconds=st.sampled_from([0.3, 0.5, WORKER_TIMEOUT_S + 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.pop_silent(self.now)
        for place in self.places.values():
            if place.said_s is not None and self.now - place.said_s > WORKER_TIMEOUT_S:
                place.said_s = None
        self.ghosts = {peer: ghost for peer, ghost in self.ghosts.items() if self.now - ghost[1] <= WORKER_TIMEOUT_S}

    def routable(self, role: Role) -> set[PeerId]:
        """By the model."""
        there = {
            self.peer(index)
            for index, place in self.places.items()
            if place.role is role and place.said_s is not None and not place.says_draining
        }
        return there | {peer for peer, (of, _, drains) in self.ghosts.items() if of is role and not drains}

    @invariant()
    def routable_workers_are_those_of_the_model(self) -> None:
        prefill, decode, both = (self.routable(role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH))
        layout = status(PeerId("any#0"), Role.DECODE).layout
        assert {worker.peer for worker in self.fleet.matching(layout)} == decode
        assert {worker.peer for worker in self.fleet.prompt_workers()} == both | (prefill if decode else set())

    @invariant()
    def what_was_sent_is_known_of_live_incarnations_only(self) -> None:
        for index, place in self.places.items():
            worker = self.fleet.get(self.peer(index))
            assert (worker is not None) == (place.said_s is not None)
            if worker:
                assert worker.sent_tokens == place.sent_tokens


FleetMachine.TestCase.settings = settings(stateful_step_count=50, max_examples=80)
TestFleetMachine = FleetMachine.TestCase
