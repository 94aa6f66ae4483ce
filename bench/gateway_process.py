"""Real `baton gateway`s as children, and the CPU that they use."""

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from bench.exchange import BenchError
from common.config import GatewayCommand, GatewayOptions, HttpOptions, ModelOptions
from common.flags import to_argv
from common.supervisor.channel import Listening, PoolsLive
from common.supervisor.plan import GATEWAY, child_environ
from common.supervisor.process import ChildProcess
from common.supervisor.runtime_dir import RuntimeDir

_START_S = 30.0
_NUM_LAST_LINES = 15


class GatewayProcess:
    """A gateway that answers HTTP and waits for workers.

    folder:   private, for the workers' sockets as well
    address:  where workers join
    Mutable state: what it reported so far.
    """

    def __init__(self, process: ChildProcess, folder: Path, address: str) -> None:
        """Blocks until it listens. Raises: BenchError when it does not."""
        self.folder = folder
        self.address = address
        self.url = ""
        self._has_pools = False
        self._process = process
        self._wait_until(lambda: bool(self.url))

    def wait_for_workers(self) -> None:
        """Blocks until both pools have one. Raises: BenchError."""
        self._wait_until(lambda: self._has_pools)

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, by its clock of nanoseconds: /proc has hundredths of a second.

        Source: clock_getcpuclockid(3); the number of a process's clock is its kernel's encoding of the id.
        """
        return time.clock_gettime(~self._process.pid << 3 | 2)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.channel, selectors.EVENT_READ)
            while not is_so():
                selector.select(max(0.0, deadline - time.monotonic()))
                events = self._process.read_events()
                if events is None or time.monotonic() >= deadline:
                    raise BenchError(
                        "the gateway did not start:\n" + "\n".join(self._process.last_lines(_NUM_LAST_LINES))
                    )
                for event in events:
                    self.url = event.url if isinstance(event, Listening) else self.url
                    self._has_pools |= isinstance(event, PoolsLive)


@contextlib.contextmanager
def gateway_processes(
    program: Sequence[str], model: str, number: int, max_concurrent: int
) -> Generator[list[GatewayProcess]]:
    """Gateways on free ports, killed on leaving.

    program: what runs `baton`, such as (python, baton.py)
    Raises: BenchError when one does not start.
    """
    with RuntimeDir() as runtime_dir, contextlib.ExitStack() as stack:
        gateways: list[GatewayProcess] = []
        for name in (f"{GATEWAY}-{i}" for i in range(number)):
            address = f"ipc://{runtime_dir.path}/{name}"
            command = GatewayCommand(
                model=ModelOptions(model=model),
                http=HttpOptions(port=0),
                gateway=GatewayOptions(bind=address, name=name, max_concurrent_requests=max_concurrent),
            )
            log_path = runtime_dir.path / f"{name}.log"
            stack.callback(log_path.unlink, missing_ok=True)
            argv = (*program, GATEWAY, *to_argv(command))
            process = ChildProcess(argv, child_environ(dict(os.environ), {}), log_path)
            stack.callback(process.channel.close)
            stack.callback(process.kill)
            gateways.append(GatewayProcess(process, runtime_dir.path, address))
        yield gateways
