"""What link tests are made of: a real node, a peer driven frame by frame, and a relay that loses bytes."""

import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from common.ids import PeerId, RequestId
from common.links import Links
from common.service import LinkEvent, LinkFull, LinkLost, Received
from common.wire import Buffer, Cancel, Envelope, GatewayStatus, LinkBroken, Message, decode, encode

DEADLINE_S = 10.0
T = TypeVar("T")


def cancel(number: int) -> Cancel:
    return Cancel(request_id=RequestId("r"), attempt=number)


class Node:
    """Links whose events are kept, for tests to wait on."""

    def __init__(self, name: str, bind_to: str = "tcp://127.0.0.1:*", incarnation: int = 1) -> None:
        self.id = PeerId(f"{name}#{incarnation}")
        self.events: list[LinkEvent] = []
        self.num_statuses_made = 0
        self._name = name
        self._changed = threading.Condition()
        self._is_built = threading.Event()
        self.links = Links(self.id, bind_to, None, self._make_status, self._deliver)
        self.links.start()
        self.address = self.links.address
        self._is_built.set()

    def _make_status(self, peer: PeerId | None) -> GatewayStatus:
        self._is_built.wait(DEADLINE_S)
        self.num_statuses_made += 1
        return GatewayStatus(name=self._name, address=self.address, leases=())

    def _deliver(self, event: LinkEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, found: Callable[[], T | None]) -> T:
        """Wait until events are such that `found` returns something true."""
        with self._changed:
            result = self._changed.wait_for(found, DEADLINE_S)
            assert result, f"not within {DEADLINE_S} s; events: {self.events[-20:]}, {self.links.counters()}"
            return result

    def numbers_from(self, peer: PeerId) -> list[int]:
        """The attempts of all cancels received from the peer, in order."""
        return [
            event.message.attempt
            for event in self.events
            if isinstance(event, Received) and event.peer == peer and isinstance(event.message, Cancel)
        ]

    def losses_of(self, peer: PeerId) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, LinkLost) and event.peer == peer]

    def order_from(self, peer: PeerId) -> list[int | str]:
        """Cancels by number and losses as "lost", in order."""
        order: list[int | str] = []
        for event in self.events:
            assert not isinstance(event, LinkFull)
            if isinstance(event, LinkLost) and event.peer == peer:
                order.append("lost")
            elif isinstance(event, Received) and event.peer == peer and isinstance(event.message, Cancel):
                order.append(event.message.attempt)
        return order

    def knows(self, peer: PeerId) -> bool:
        return any(isinstance(event, Received) and event.peer == peer for event in self.events)

    def wait_number(self, peer: PeerId, number: int) -> None:
        self.wait_for(lambda: number in self.numbers_from(peer))

    def send_all(self, peer: PeerId, numbers: range) -> None:
        for number in numbers:
            assert self.links.send(peer, cancel(number)), f"{peer} did not take {number}"


def connect(a: Node, b: Node) -> None:
    """Let both know each other."""
    a.links.connect(b.address)
    a.wait_for(lambda: a.knows(b.id))
    b.wait_for(lambda: b.knows(a.id))


class RawPeer:
    """A peer whose every frame the test chooses."""

    def __init__(self, name: str = "raw#1", max_unread: int = 1000) -> None:
        self.id = PeerId(name)
        self._context = zmq.Context()
        self.inbox = self._context.socket(zmq.PULL)
        self.inbox.setsockopt(zmq.RCVHWM, max_unread)
        self.inbox.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self.inbox.bind("tcp://127.0.0.1:*")
        self.address = self.inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._out = self._context.socket(zmq.PUSH)

    def connect(self, address: str) -> None:
        self._out.connect(address)

    def send(self, to: PeerId, seq: int, message: Message) -> None:
        self.send_frames(encode(Envelope(self.id, to, seq, message)))

    def send_frames(self, frames: list[Buffer]) -> None:
        self._out.send_multipart(frames)

    def send_status(self, to: PeerId, last_sent: int = 0) -> None:
        self.send(to, last_sent, GatewayStatus(name="raw", address=self.address, leases=()))

    def receive(self, kind: type[Message]) -> Envelope:
        """The next message of this kind; others are read and dropped."""
        give_up_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up_s:
            envelope = decode(self.inbox.recv_multipart())
            if isinstance(envelope.message, kind):
                return envelope
        raise AssertionError(f"no {kind.__name__} in {DEADLINE_S:g} s")

    def receive_complaint(self) -> LinkBroken:
        message = self.receive(LinkBroken).message
        assert isinstance(message, LinkBroken)
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


class Relay:
    """A TCP relay before an address, which can swallow what clients send and cut their connections."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []  # guarded by _lock
        self._threads: list[threading.Thread] = []
        self._swallowed: set[socket.socket] = set()
        self.num_swallowed = threading.Semaphore(0)
        self._start(self._accept)

    def swallow(self) -> None:
        """What comes from clients connected now goes nowhere; `num_swallowed` is released for each piece."""
        with self._lock:
            self._swallowed.update(self._sockets)

    def cut(self) -> None:
        """Break every connection. New ones are relayed faithfully."""
        with self._lock:
            connections, self._sockets = self._sockets, []
        for connection in connections:
            shut(connection)

    def close(self) -> None:
        shut(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return  # closed
            with self._lock:
                self._sockets += [client, server]
            self._start(lambda source=client, sink=server: self._pump(source, sink, True))
            self._start(lambda source=server, sink=client: self._pump(source, sink, False))

    def _pump(self, source: socket.socket, sink: socket.socket, is_from_client: bool) -> None:
        try:
            while data := source.recv(65536):
                if is_from_client and source in self._swallowed:
                    self.num_swallowed.release()
                else:
                    sink.sendall(data)
        except OSError:
            return  # cut
        finally:
            source.close()


def shut(connection: socket.socket) -> None:
    """Close so that a thread which blocks in it returns."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was first
    finally:
        connection.close()
