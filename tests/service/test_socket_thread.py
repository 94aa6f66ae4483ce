"""Connections and the threads that own them: what is left of them when sockets run out, or their work breaks."""

import os
import threading
import time
from contextlib import suppress

import pytest
import zmq

from common.errors import ConfigError
from common.link_socket import Connection
from common.socket_thread import SocketThread
from tests.service.link_nodes import DEADLINE_S


def joined(close: threading.Thread) -> bool:
    close.join(DEADLINE_S)
    return not close.is_alive()


def test_a_thread_whose_work_breaks_is_dead_and_leaves_no_socket_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def work() -> None:
        socket = thread.context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, -1)
        socket.connect("ipc:///nowhere")
        socket.send(b"nobody reads this")
        raise ValueError("a bug")

    thread = SocketThread("test", work)
    thread.start()
    closing = threading.Thread(target=thread.close, daemon=True)
    closing.start()
    assert joined(closing), "close waits for a socket that nobody reads from"
    assert not thread.is_alive
    assert seen == [ValueError]


def test_a_thread_is_dead_as_soon_as_its_work_has_ended() -> None:
    linger_s = 0.5

    def work() -> None:
        with thread.context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
            socket.connect("ipc:///nowhere")
            socket.send(b"what is on its way may still be sent while the context ends")
        has_ended.set()

    has_ended = threading.Event()
    thread = SocketThread("test", work)
    thread.start()
    assert has_ended.wait(DEADLINE_S)
    while thread.is_alive:
        os.sched_yield()
    assert any(other.name == "test" for other in threading.enumerate()), "it was only dead once everything was closed"
    thread.close()


def test_a_thread_that_never_started_is_closed_with_its_sockets() -> None:
    num_descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        thread = SocketThread("test", lambda: None)
        socket = thread.context.socket(zmq.PUSH)
        thread.close()
        thread.close()
        assert socket.closed
        assert not thread.is_alive
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


def test_a_connection_without_a_socket_left_is_an_error_and_leaves_none_behind() -> None:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8)

    def connect() -> Connection:
        return Connection(context, zmq.PUSH, "ipc:///nowhere", max_queued=1)

    connections = [connect(), connect()]  # six sockets
    for _ in range(8):
        with pytest.raises(ConfigError, match="cannot connect to 'ipc:///nowhere': Too many open files"):
            connect()
    connections.pop().close()
    deadline_s = time.monotonic() + DEADLINE_S
    while len(connections) < 2:  # ZeroMQ's own thread gives sockets back
        with suppress(ConfigError):
            connections.append(connect())
        assert time.monotonic() < deadline_s
    context.destroy(linger=0)
