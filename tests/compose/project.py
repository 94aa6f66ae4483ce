"""The Compose project of this repository, under a name and on a port of its own."""

import os
import subprocess
import threading
import time
from pathlib import Path

from tests.e2e.front import Front

ROOT = Path(__file__).parents[2]
IMAGE = "baton:test"
UP_S = 180


class Project(Front):
    """`docker compose`, with settings that make every answer the same each time.

    url: of the gateway's published port; Docker chooses it anew whenever the container starts
    """

    def __init__(self) -> None:
        super().__init__("")
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": f"baton-test-{os.getpid()}",
            "BATON_IMAGE": IMAGE,
            "BATON_PORT": "0",
            "BATON_DTYPE": "float32",
            "BATON_KV_CACHE_MEMORY": "200MB",
        }

    def compose(self, *argv: str) -> str:
        return self._run("docker", "compose", *argv)

    def docker(self, *argv: str) -> str:
        return self._run("docker", *argv)

    def build(self) -> None:
        self.compose("build")

    def up(self, **replicas: int) -> float:
        """All services, healthy, with so many containers of each. Returns how many seconds it took."""
        started_s = time.monotonic()
        scales = [f"--scale={service}={number}" for service, number in replicas.items()]
        self.compose("up", "--detach", "--wait", f"--wait-timeout={UP_S}", *scales)
        self.find_gateway()
        return time.monotonic() - started_s

    def pause(self, container: str, seconds: float) -> None:
        """Returns once Docker, which calls a container unhealthy from its pause to its next check, calls it healthy."""
        self.docker("pause", container)
        threading.Event().wait(seconds)  # what is tested is a worker that is silent for so long
        self.docker("unpause", container)
        health = "--format={{.State.Health.Status}}"
        self.wait_until(lambda: self.docker("inspect", health, container).strip() == "healthy", UP_S)

    def find_gateway(self) -> None:
        """Learn the port, which is another one after a restart."""
        self.url = f"http://127.0.0.1:{self.compose('port', 'gateway', '8000').rpartition(':')[2].strip()}"

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout=5")

    def containers(self, service: str) -> list[str]:
        """The running ones, by id."""
        return self.compose("ps", "--quiet", "--status=running", service).split()

    def worker(self, container: str) -> dict[str, float]:
        """What the gateway knows of the worker in it; empty: nothing."""
        return self.counters(rf"\w+-{container[:12]}-\d+")

    def network(self) -> str:
        return f"{self._environment['COMPOSE_PROJECT_NAME']}_baton"

    def image_bytes(self) -> int:
        return int(self.docker("image", "inspect", "--format={{.Size}}", IMAGE))

    def _run(self, *argv: str) -> str:
        done = subprocess.run(argv, cwd=ROOT, env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout
