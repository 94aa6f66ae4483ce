"""A thread that owns ZeroMQ sockets: how it is started and closed, and what is left of it however it ends."""

import threading
from collections.abc import Callable

import zmq

from common.link_socket import MAX_SOCKETS, Wakeup


class SocketThread:
    """A context, a wakeup, and the thread that uses them.

    work: runs in the thread until `is_closing`, which `wakeup` tells it to look at

    However work ends, sockets that it leaves open are closed and drop what they have: nothing waits for them.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.wakeup = Wakeup()
        self.is_closing = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """False before `start`, and from the moment at which work has ended, be it by `close` or by a bug of ours."""
        return self._thread.is_alive() and not self._is_over

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started, and everything in the context. Idempotent; not for the thread itself."""
        assert threading.current_thread() is not self._thread, "close would wait for itself"
        self.is_closing = True
        self.wakeup.set()
        if self._thread.ident is None:
            self._close_sockets()
        else:
            self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._is_over = True
            self._close_sockets()

    def _close_sockets(self) -> None:
        self.context.destroy(linger=0)
        self.wakeup.close()
