"""Runs a plan to its end, and looks whether everything is as it must be."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.gateway import Client
from tests.sim.network import Weather
from tests.sim.plan import (
    Break,
    Crash,
    Drain,
    FailRank,
    Fault,
    Freeze,
    Join,
    Partition,
    Plan,
    Slow,
    Storm,
    Stuff,
)
from tests.sim.worker import Worker
from tests.sim.world import World, simulated

ALLOWED_S = 60.0
"""In which what is left must come to its end once nothing goes wrong any more."""
REST_S = 20.0
"""By which every lease, pull and memory of somebody who was silent has run out."""
CALM_REST_S = 1.0
"""By which everybody was told who has to know, where nothing is lost."""
SOON_S, LATE_S = 0.2, 1.5
"""By which what was sent last has arrived; where messages are late, or come twice."""
GLANCE_S = 0.05
LOOK_S = 0.25


class Violation(AssertionError):
    """A plan does not end as it must. at_s: when that was seen."""

    def __init__(self, problem: str, at_s: float) -> None:
        super().__init__(problem)
        self.problem = problem
        self.at_s = at_s

    @property
    def kind(self) -> str:
        """Without names and numbers."""
        return " ".join(word for word in self.problem.split() if word.isalpha())[:40]


def run(plan: Plan, log: Callable[[str], None] | None = None) -> World:
    """Returns what is left of it. Raises: Violation."""
    world: World | None = None
    try:
        with simulated(lambda: World(plan, log)) as world:
            Scenario(world).run()
            return world
    except Exception as error:
        if world is None:
            raise
        raise Violation(f"{type(error).__name__}: {error}", world.now) from error


class Scenario:
    """A plan under way. Mutable state: until when something goes wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._plan = world.plan
        self._spoilt_until_s = 0.0

    def run(self) -> None:
        world, plan = self._world, self._plan
        for arrival in plan.arrivals:
            world.clock.at(arrival.at_s, lambda arrival=arrival: world.submit(arrival))
        for fault in plan.faults:
            world.clock.at(fault.at_s, lambda fault=fault: self._begin(fault))
        self._spoil(max((each.at_s for each in (*plan.arrivals, *plan.faults)), default=0.0))
        world.clock.run_for(self._spoilt_until_s)
        while not self._is_over():
            world.clock.run_for(GLANCE_S)
        for client in world.clients:
            self._check_end(client)
        within_s = CALM_REST_S if plan.is_calm else REST_S
        self._rest(within_s)
        world.clock.run_for(LATE_S if any(isinstance(fault, Storm) for fault in plan.faults) else SOON_S)
        self._rest(within_s)
        if plan.is_calm:
            self._check_retries()
        for worker in world.workers:
            worker.blocks.check()

    def _is_over(self) -> bool:
        """Whether every client has its terminal frame, for which there is time enough once all is well."""
        still_open = [client.request_id for client in self._world.clients if not client.is_ended]
        patience_s = ALLOWED_S if self._plan.is_patient else ALLOWED_S + self._plan.policy.request_timeout_s
        is_late = bool(still_open) and self._world.now > self._spoilt_until_s + patience_s
        assert not is_late, f"not ended {patience_s:g} s after the last fault: {still_open}"
        return not still_open

    def _check_retries(self) -> None:
        """Nothing is tried again but for want of blocks."""
        num_retries = sum(gateway.requests.totals["retries"] for gateway in self._world.gateways)
        num_preemptions = sum(worker.counters().get("preemptions", 0) for worker in self._world.workers)
        assert num_retries <= num_preemptions, f"{num_retries} retries of {num_preemptions} preempted sequences"

    def _rest(self, within_s: float) -> None:
        """Nothing is left behind; at once, or after some time in which it is given up."""
        world = self._world
        limit_s = max(world.now, self._spoilt_until_s) + within_s
        while unrest := world.unrest():
            assert world.now < limit_s, unrest
            world.clock.run_for(LOOK_S)

    def _check_end(self, client: Client) -> None:
        """An error must be one that the plan allows."""
        if client.has_left or client.finish:
            return
        assert client.error is not None
        code, policy = client.error.code, self._plan.policy
        match code:
            case "too_many_attempts":
                is_legal = client.is_poison or self._may_be_blamed(client)
            case "request_timeout":
                is_legal = client.ended_s - client.arrival_s >= policy.request_timeout_s
            case "no_worker":
                is_legal = not self._plan.is_patient
            case _:
                is_legal = False
        is_legal &= not client.is_poison or code == "too_many_attempts"
        assert is_legal, f"{client.request_id} ended with {client.error}"

    def _may_be_blamed(self, client: Client) -> bool:
        """A gateway finds out who kills its workers, but for what other gateways send to them."""
        if self._plan.is_poisoned:
            return all(other.gateway != client.gateway for other in self._world.clients if other.is_poison)
        return not (self._plan.is_patient or self._plan.is_calm)

    def _begin(self, fault: Fault) -> None:
        """Now, or at a certain event of its service after now. Nothing if that is not there."""
        process = self._world.processes.get(fault.service)
        if process is not None:
            process.on_event(fault.on_event, lambda: self._do(fault))

    def _do(self, fault: Fault) -> None:
        world = self._world
        process = world.processes.get(fault.service)
        if process is None:
            return
        world.trace("%s", fault)
        match fault:
            case Crash(back_s=back_s, silently=silently):
                world.kill(process, silently=silently)
                self._come_back(fault.service, back_s)
            case FailRank(hangs_s=hangs_s):
                if isinstance(process, Worker):
                    process.runner.hangs_s = hangs_s
                    self._spoil(hangs_s)
            case Freeze(for_s=for_s, timers_first=timers_first):
                world.freeze(process, for_s, timers_first=timers_first)
                self._spoil(for_s)
            case Slow(for_s=for_s, slowness=slowness):
                if isinstance(process, Worker):
                    process.runner.slowness = slowness
                    self._later(for_s, lambda: setattr(process.runner, "slowness", 1.0))
            case Drain(back_s=back_s):
                process.leave() if isinstance(process, Worker) else process.shut_down()
                self._come_back(fault.service, back_s)
            case Join(worker=worker):
                if worker.name not in world.processes:
                    world.start_worker(worker)
            case Break(service=one, other=other):
                for connection in world.network.connections(one, other):
                    world.network.break_connection(connection, world.random.uniform(0, 0.1))
                self._spoil(0)
            case Partition(service=one, other=other, for_s=for_s, resets=resets):
                self._part(one, other, for_s, resets)
            case Storm(service=one, other=other, for_s=for_s):
                self._storm(world.network.weather(one, other), fault)
            case Stuff(service=one, other=other, for_s=for_s):
                weather = world.network.weather(one, other)
                weather.is_stuffed = True
                self._later(for_s, lambda: self._unstuff(weather))
            case _:
                raise AssertionError(f"unknown fault {fault}")

    def _spoil(self, for_s: float) -> None:
        self._spoilt_until_s = max(self._spoilt_until_s, self._world.now + for_s)

    def _later(self, for_s: float, action: Callable[[], None]) -> None:
        self._spoil(for_s)
        self._world.clock.after(for_s, action)

    def _come_back(self, name: str, after_s: float | None) -> None:
        """Not while the one before still leaves."""
        if after_s is None:
            return
        if name in self._world.processes and after_s == 0:
            after_s = LOOK_S

        def start_again() -> None:
            if name in self._world.processes:
                self._come_back(name, LOOK_S)
            else:
                self._world.start_again(name)

        self._later(after_s, start_again)

    def _part(self, one: str, other: str, for_s: float, resets: bool) -> None:
        network = self._world.network
        both = network.weather(one, other), network.weather(other, one)
        if resets:
            for weather in both:
                weather.is_cut = True
            for connection in network.connections(one, other):
                network.break_connection(connection, self._world.random.uniform(0, 0.1))
        else:
            for weather in both:
                weather.silent_until_s = self._world.now + for_s
            network.pause(one, other, for_s)

        def heal() -> None:
            for weather in both:
                weather.is_cut = False
            network.connect_again()

        self._later(for_s, heal)

    def _storm(self, weather: Weather, storm: Storm) -> None:
        weather.loss, weather.repeats, weather.garbles = storm.loss, storm.repeats, storm.garbles
        weather.delay_s = storm.delay_s

        def clear() -> None:
            weather.loss = weather.repeats = weather.garbles = weather.delay_s = 0.0

        self._later(storm.for_s, clear)

    def _unstuff(self, weather: Weather) -> None:
        weather.is_stuffed = False
        self._world.network.relieve()
