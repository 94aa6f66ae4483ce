"""An asyncio loop on virtual time: as much of one as the gateway's engine and its readers use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tests.sim.process import Process


class VirtualLoop(asyncio.AbstractEventLoop):
    """Of one process; its callbacks are what happens there."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def time(self) -> float:
        return self._process.clock.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def run(self, callback: Callable[..., object], *args: object) -> None:
        """Call it now, as the loop does."""
        asyncio._set_running_loop(self)
        try:
            callback(*args)
        finally:
            asyncio._set_running_loop(None)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        self._process.soon(lambda: self.run(callback, *args))

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        self.call_soon(callback, *args)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        self._process.after(delay, lambda: self.run(callback, *args))

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return asyncio.Task(coro, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tasks of a run that failed are not awaited, and those of others are asked for their exceptions."""

    async def sleep(self, delay_s: float) -> None:
        woken = self.create_future()
        self.call_later(delay_s, lambda: woken.done() or woken.set_result(None))
        await woken
