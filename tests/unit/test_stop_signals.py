"""A worker that is told to stop while it starts: no failure, whatever becomes of the exception on its way."""

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from common.engine.stop_signals import STOP_SIGNALS, call_on_stop, unwind_on_stop


@pytest.fixture(autouse=True)
def same_handlers_afterwards() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@unwind_on_stop()
def start(load: Callable[[], None]) -> None:
    load()


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_unwinds_the_start(number: signal.Signals, raised: type[BaseException]) -> None:
    undone: list[str] = []

    def load() -> None:
        try:
            signal.raise_signal(number)
        finally:
            undone.append("cache")

    with pytest.raises(raised) as caught:
        start(load)
    assert undone == ["cache"]
    assert number == signal.SIGINT or caught.value.args == (0,)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_of_which_native_code_makes_another_error_is_no_failure(
    number: signal.Signals, raised: type[BaseException]
) -> None:
    def load() -> None:
        try:
            signal.raise_signal(number)
        except BaseException as error:
            raise ValueError("could not determine the shape of object type") from error

    with pytest.raises(raised):
        start(load)


def test_an_error_of_the_start_stays_what_it_is() -> None:
    def load() -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        start(load)


def test_a_signal_that_native_code_swallows_stops_the_worker_when_it_serves() -> None:
    stops: list[str] = []

    def load() -> None:
        with suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        call_on_stop(lambda: stops.append("told"))
        assert stops == ["told"]
        signal.raise_signal(signal.SIGINT)

    start(load)
    assert stops == ["told", "told"]


@pytest.mark.parametrize("has_begun", [True, False], ids=["while serving", "swallowed before"])
def test_an_error_while_serving_is_a_failure_also_after_a_signal(has_begun: bool) -> None:
    def load() -> None:
        if has_begun:
            call_on_stop(lambda: None)
        with suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        if not has_begun:
            call_on_stop(lambda: None)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        start(load)
