"""What a service tells its supervisor, and how it notices that the supervisor is gone.

One socket pair per child; the child writes one JSON object a line and never gets anything but the end of file.
"""

import logging
import os
import signal
import socket
import threading

import msgspec

from common.errors import WireError

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 3.0


class Progress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """Still starting. what: the activity, such as "loading weights"; fraction: of it, 0 to 1, if known."""

    what: str
    fraction: float | None = None


class Listening(msgspec.Struct, frozen=True, tag_field="event", tag="listening"):
    """The gateway answers HTTP at this URL, which a client on this machine can use."""

    url: str


class Ready(msgspec.Struct, frozen=True, tag_field="event", tag="ready"):
    """This service does its work from now on."""


class PoolsLive(msgspec.Struct, frozen=True, tag_field="event", tag="pools_live"):
    """The gateway knows a live worker of every pool."""


Event = Progress | Listening | Ready | PoolsLive

_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return _encode(event) + b"\n"


def decode_event(line: bytes) -> Event:
    """Raises: WireError for a line that is no event."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise WireError(f"supervisor channel: got {line!r}: {error}") from error


class SupervisorChannel:
    """The child's end. Thread-safe. From construction on, this process ends when its supervisor does.

    fd: inherited open descriptor of a stream socket; owned from now on, and not passed on to children
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()
        threading.Thread(target=self._exit_with_supervisor, name="supervisor-watch", daemon=True).start()

    def progress(self, what: str, fraction: float | None = None) -> None:
        self._send(Progress(what, fraction))

    def listening(self, url: str) -> None:
        self._send(Listening(url))

    def ready(self) -> None:
        self._send(Ready())

    def pools_live(self) -> None:
        self._send(PoolsLive())

    def _send(self, event: Event) -> None:
        try:
            with self._lock:
                self._socket.sendall(encode_event(event))
        except ConnectionError:
            logger.debug("supervisor is gone; its end of the channel ends this process")

    def _exit_with_supervisor(self) -> None:
        """Leave as after SIGTERM; leave at once when that takes too long, whatever the main thread is stuck in."""
        while self._socket.recv(64):
            logger.warning("unexpected bytes from the supervisor")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.main_thread().join(_EXIT_GRACE_S)
        os._exit(1)
