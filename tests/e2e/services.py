"""Services started by hand, which meet in one folder and serve one tiny model."""

from contextlib import ExitStack
from pathlib import Path

from tests.e2e.stack import START_S, Command
from tests.e2e.tiny import save_tiny


class Services:
    """stack: ends what is started"""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        save_tiny(folder / "model")

    def start(self, *argv: str) -> Command:
        command = Command(*argv, f"--model={self._folder / 'model'}")
        self._stack.callback(command.close)
        return command

    def start_worker(self, role: str, name: str, *options: str, gateways: tuple[str, ...] = ("gateway",)) -> Command:
        peers = [f"--gateway={','.join(f'ipc://{self._folder}/{gateway}' for gateway in gateways)}", f"--name={name}"]
        places = [f"--bind=ipc://{self._folder}/{name}", f"--data-bind=ipc://{self._folder}/{name}.kv"]
        sizes = ["--dtype=float32", "--cores=1", "--kv-cache-memory=20MB"]
        return self.start(role, *peers, *places, *sizes, *options)

    def start_gateway(self, *options: str, name: str = "gateway") -> Command:
        return self.start("gateway", "--port=0", f"--bind=ipc://{self._folder}/{name}", *options)


def url_of(gateway: Command) -> str:
    return gateway.wait_for(r"listening at (http://[^,]+),", START_S)


def wait_until_ready(gateway: Command) -> None:
    gateway.wait_for(r"(every pool has a live worker)", START_S)
