"""What carries messages between the simulated processes: in order on each connection, and as badly as it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random

import zmq

from bench.planning.clock import Clock
from common.wire import Buffer
from tests.sim.process import Process
from tests.sim.sockets import Connector, Lane, Listener, Socket

MAX_DELAY_S = 0.02
WAKE_UP_S = 0.002
NOTICED_S = 0.1
"""A connection to a process that died is reset, and its other end learns of it within this time."""
SILENT_S = 5.0
"""ZeroMQ's heartbeats: a connection breaks that brought nothing for so long."""
LATE_S = 1.0
"""By which heartbeats, and attempts to connect again, may be late."""


@dataclass(slots=True)
class Weather:
    """Between two processes, in one direction. All of it is mutable.

    loss, repeats, garbles: chances that a message is lost, arrives again later, or has bytes flipped in its data
    delay_s:         added at most
    is_stuffed:      the other end does not read, and what lies between is full
    silent_until_s:  nothing comes through before; connections stay for as long as heartbeats allow
    is_cut:          connections are refused
    """

    loss: float = 0.0
    repeats: float = 0.0
    garbles: float = 0.0
    delay_s: float = 0.0
    is_stuffed: bool = False
    silent_until_s: float = 0.0
    is_cut: bool = False


class Network:
    """Mutable state: who listens where, who is connected or wants to be, and the weather by pair of names."""

    def __init__(self, clock: Clock, random: Random, trace: Callable[[Process, Process, list[Buffer], str], None]):
        self._clock = clock
        self._random = random
        self._trace = trace
        self._numbers = count()
        self._listeners: dict[str, Listener] = {}
        self._connectors: dict[bytes, Connector] = {}
        self._weather: dict[tuple[str, str], Weather] = {}

    def draw_wake_up_s(self) -> float:
        """How long a thread takes that was called."""
        return self._random.random() * WAKE_UP_S

    def next_number(self) -> int:
        return next(self._numbers)

    def connector(self, identity: bytes) -> Connector | None:
        return self._connectors.get(identity)

    def weather(self, sender: str, receiver: str) -> Weather:
        return self._weather.setdefault((sender, receiver), Weather())

    def is_stuffed(self, sender: Process, receiver: Process) -> bool:
        weather = self._weather.get((sender.name, receiver.name))
        return weather is not None and weather.is_stuffed

    def carry(self, sender: Process, lane: Lane, to: Socket, frames: list[Buffer]) -> None:
        """Bytes of caches are copied now, or when they arrive: ZeroMQ reads them at some moment in between."""
        if len(frames) > 1 and self._random.random() < 0.5:
            frames = [bytes(frame) for frame in frames]
        start_s, delay_s, repeats = self._clock.now, self._random.random() * MAX_DELAY_S, False
        if weather := self._weather.get((sender.name, to.process.name)):
            if self._random.random() < weather.loss:
                self._trace(sender, to.process, frames, "lost")
                return
            frames = self._garble(frames, weather.garbles)
            delay_s += self._random.random() * weather.delay_s
            start_s = max(start_s, weather.silent_until_s)
            repeats = self._random.random() < weather.repeats
        lane.last_arrival_s = max(start_s + delay_s, lane.last_arrival_s)
        self._trace(sender, to.process, frames, "")
        self._schedule(lane.last_arrival_s, lane, to, frames)
        if repeats:
            self._schedule(lane.last_arrival_s + self._random.random(), lane, to, frames)

    def _garble(self, frames: list[Buffer], chance: float) -> list[Buffer]:
        """Shorten or change what travels behind a header."""
        if chance == 0 or len(frames) < 2 or self._random.random() >= chance:
            return frames
        header, first, *others = frames
        return [header, self._random.choice([bytes(len(first)), bytes(first)[:-1]]), *others]

    def _schedule(self, arrival_s: float, lane: Lane, to: Socket, frames: list[Buffer]) -> None:
        epoch = lane.epoch

        def arrive() -> None:
            if lane.epoch == epoch or self._clock.now <= lane.cut_s:
                to.process.enter(lambda: to.take(lane.identity, frames))

        self._clock.at(arrival_s, arrive)

    def bind(self, listener: Listener) -> None:
        """Whoever still takes the one before for alive is told that it is not."""
        assert listener.endpoint not in self._listeners, f"{listener.endpoint} is taken"
        self._listeners[listener.endpoint] = listener
        for connector in self._connectors.values():
            if connector.address == listener.endpoint and connector.is_up and connector.listener is None:
                self._notice(connector, self._random.uniform(0, LATE_S))
        self.connect_again()

    def unbind(self, listener: Listener) -> None:
        if self._listeners.get(listener.endpoint) is listener:
            del self._listeners[listener.endpoint]
            for connector in self._connectors.values():
                if connector.listener is listener:
                    self.break_connection(connector, self._random.uniform(0, NOTICED_S))

    def connect(self, connector: Connector) -> None:
        self._connectors[connector.out.identity] = connector
        self._try_after(connector, self._random.uniform(0, MAX_DELAY_S))

    def disconnect(self, connector: Connector) -> None:
        """Closed by its owner: what it has sent still arrives."""
        self._connectors.pop(connector.out.identity, None)
        connector.listener, connector.is_up = None, False

    def relieve(self) -> None:
        """Somebody reads again."""
        for connector in list(self._connectors.values()):
            connector.thread.wake()

    def connect_again(self) -> None:
        """Something has changed that connections may have failed by."""
        for connector in self._connectors.values():
            if not connector.is_up:
                self._try_after(connector, self._random.uniform(0, LATE_S / 3))

    def _try_after(self, connector: Connector, delay_s: float) -> None:
        connector.process.after(delay_s, lambda: self._try(connector))

    def _try(self, connector: Connector) -> None:
        if connector.is_closed or connector.is_up:
            return
        listener = self._listeners.get(connector.address)
        if listener is None or self._is_cut(connector.process, listener.process):
            connector.report(zmq.EVENT_CONNECT_RETRIED)
        elif listener.process.is_frozen or self._is_silent(connector.process, listener.process):
            connector.process.after(SILENT_S, lambda: connector.is_up or connector.report(zmq.EVENT_CONNECT_RETRIED))
        else:
            connector.come_up(listener)

    def _is_cut(self, one: Process, other: Process) -> bool:
        weather = self._weather.get((one.name, other.name))
        return weather is not None and weather.is_cut

    def _is_silent(self, one: Process, other: Process) -> bool:
        weather = self._weather.get((one.name, other.name))
        return weather is not None and self._clock.now < weather.silent_until_s

    def break_connection(self, connector: Connector, noticed_after_s: float) -> None:
        """What is under way arrives up to some moment, and the rest is lost."""
        if connector.listener is None:
            return
        connector.listener = None
        for lane in (connector.out, connector.back):
            lane.epoch += 1
            lane.last_arrival_s = 0.0
            lane.cut_s = self._clock.now + self._random.random() * MAX_DELAY_S
        self._notice(connector, noticed_after_s)

    def _notice(self, connector: Connector, after_s: float) -> None:
        connection = connector.out.epoch

        def lose() -> None:
            if connector.is_up and connector.listener is None and connector.out.epoch == connection:
                connector.is_up = False
                connector.report(zmq.EVENT_DISCONNECTED)
                self._try_after(connector, self._random.uniform(0, LATE_S / 3))

        connector.process.after(after_s, lose)

    def connections(self, one: str, other: str | None = None) -> list[Connector]:
        """Between two processes, whoever made them; of one with anybody."""
        found: list[Connector] = []
        for connector in self._connectors.values():
            if connector.listener is not None:
                ends = {connector.process.name, connector.listener.process.name}
                if one in ends and (other is None or other in ends):
                    found.append(connector)
        return found

    def end(self, process: Process, *, silently: bool) -> None:
        """A process is gone. silently: with its host, so that nobody is told."""
        for connector in [c for c in self._connectors.values() if c.process is process]:
            self.break_connection(connector, 0)
            connector.is_closed = True
            del self._connectors[connector.out.identity]
        for listener in [each for each in self._listeners.values() if each.process is process]:
            listener.is_closed = True
            del self._listeners[listener.endpoint]
            for connector in [c for c in self._connectors.values() if c.listener is listener]:
                late_s = SILENT_S + self._random.uniform(0, LATE_S) if silently else self._random.uniform(0, NOTICED_S)
                self.break_connection(connector, late_s)

    def pause(self, one: str, other: str | None, duration_s: float) -> None:
        """Nothing was heard between these for so long: heartbeats end their connections if it lasts."""
        if duration_s > SILENT_S:
            late_s = SILENT_S + self._random.uniform(0, min(LATE_S, duration_s - SILENT_S))
            connections = self.connections(one, other)
            self._clock.after(late_s, lambda: [self.break_connection(connection, 0) for connection in connections])
