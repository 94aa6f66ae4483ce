"""Stands in for a service in tests of the supervisor: `python fake_child.py BEHAVIOUR [FILE] --supervisor-fd=N`."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.supervisor.channel import SupervisorChannel


def die_once(channel: SupervisorChannel, marker: Path) -> None:
    """The first process to come dies with many lines; later ones become ready."""
    if marker.exists():
        channel.ready()
        return
    marker.touch()
    for index in range(40):
        print(f"line {index}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_ready_once(channel: SupervisorChannel, marker: Path) -> None:
    channel.ready()
    if not marker.exists():
        marker.touch()
        sys.exit(2)


def run(behaviour: str, file: Path, channel: SupervisorChannel) -> None:
    match behaviour:
        case "gateway":
            channel.listening("http://127.0.0.1:4711")
            channel.pools_live()
        case "gateway-that-dies-once":
            file.open("a").write(f"{[arg for arg in sys.argv if arg.startswith('--port')]}\n")
            channel.listening("http://127.0.0.1:4711")
            if len(file.read_text().splitlines()) == 1:
                sys.exit(1)
            channel.pools_live()
        case "worker" | "worker-without-python":
            channel.progress("loading weights", 0.5)
            channel.ready()
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            channel.ready()
        case "unusable":
            print("baton decode: error: --model: got 'x', wanted a model", flush=True)
            sys.exit(2)
        case "dies-once":
            die_once(channel, file)
        case "dies-after-ready-once":
            die_after_ready_once(channel, file)
        case "junk":
            if not file.exists():
                file.touch()
                os.write(int(sys.argv[-1].partition("=")[2]), b"no event\n")
            else:
                channel.ready()
        case _:
            raise AssertionError(behaviour)


with suppress(OSError):
    print(f"pid {os.getpid()}", flush=True)
run(sys.argv[1], Path(sys.argv[2]), SupervisorChannel(int(sys.argv[-1].partition("=")[2])))
while True:
    signal.pause()
