"""What SIGTERM and SIGINT do to a worker: they unwind its start, and end its serving in an orderly way."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Unwinding:
    """The handler while a worker starts. told: what it raised; None: no signal has come."""

    def __init__(self) -> None:
        self.told: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.told = SystemExit(0) if number == signal.SIGTERM else KeyboardInterrupt()
        raise self.told


@contextmanager
def unwind_on_stop() -> Iterator[None]:
    """Until `call_on_stop`: a signal ends the start by an exception, so that what it has made so far is removed.

    Native code that the exception comes through may make another one of it (PyTorch: a ValueError about the shape of a
    storage), which does not hide that this is no failure.

    Raises: SystemExit for SIGTERM, KeyboardInterrupt for SIGINT.
    """
    handler = _Unwinding()
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    try:
        yield
    except BaseException as error:
        if handler.told in (None, error):
            raise
        raise handler.told from error


def call_on_stop(stop: Callable[[], None]) -> None:
    """From now on a signal calls this: at once, if one came before and its exception was swallowed on the way."""
    for number in STOP_SIGNALS:
        before = signal.signal(number, lambda *_: stop())
        if isinstance(before, _Unwinding) and before.told:
            before.told = None  # what fails from now on is a failure
            stop()
