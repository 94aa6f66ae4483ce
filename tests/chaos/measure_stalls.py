"""What faults cost streams, one at a time: `python -m tests.chaos.measure_stalls 20`.

For each kind of fault, so many times: eight clients stream, one process is struck, and when all are at rest again the
next one is. The answers must be those of the undisturbed run.
"""

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.chaos.test_chaos import NUM_CLIENTS, REST_S, WORKERS, ask_undisturbed, bodies, start
from tests.e2e.load import Load
from tests.e2e.stack import Stack, wait_until

FREEZE_S = 5.0
NUM_TOKENS = 60
"""Over all streams before a fault, and after it."""
FAULTS: dict[str, tuple[str, signal.Signals]] = {
    "SIGKILL of a decode worker": ("decode-0", signal.SIGKILL),
    "SIGKILL of a rank of one": ("decode-0/1", signal.SIGKILL),
    "SIGSTOP of a decode worker": ("decode-0", signal.SIGSTOP),
    "SIGTERM of a decode worker": ("decode-0", signal.SIGTERM),
    "SIGKILL of a prefill worker": ("prefill-0", signal.SIGKILL),
    "SIGSTOP of a prefill worker": ("prefill-0", signal.SIGSTOP),
    "SIGKILL of the gateway": ("gateway", signal.SIGKILL),
}


@dataclass(frozen=True)
class Strike:
    """Seconds. noticed_s: until the gateway counted with the worker no more; stall_s: until all streams went on."""

    noticed_s: float
    stall_s: float


def strike(stack: Stack, target: str, number: signal.Signals, answers: Sequence[Sequence[int]]) -> Strike:
    worker = target.partition("/")[0]
    with Load(stack.url, bodies(), NUM_CLIENTS, is_patient=True) as load:
        load.wait_for_tokens(NUM_TOKENS)
        stack.wait_until(lambda: stack.find(target) is not None, REST_S)  # a frozen group ends when it wakes up
        pid = stack.pid(target)
        struck_s = time.monotonic()
        stack.signal(target, number)
        noticed_s = 0.0 if worker == "gateway" else seconds_until(lambda: not stack.counters(worker))
        if number is signal.SIGSTOP:
            threading.Event().wait(FREEZE_S - noticed_s)
            stack.signal(target, signal.SIGCONT)
        else:
            stack.wait_until(lambda: stack.find(target) not in (None, pid), REST_S)
        load.wait_for_tokens(NUM_TOKENS)
    load.check(answers)
    stack.wait_until_at_rest(len(WORKERS), REST_S)
    return Strike(noticed_s, load.stall_s(struck_s))


def seconds_until(is_so: Callable[[], bool]) -> float:
    started_s = time.monotonic()
    wait_until(is_so, REST_S)
    return time.monotonic() - started_s


def row(name: str, strikes: Sequence[Strike]) -> str:
    noticed_s, stalls_s = [each.noticed_s for each in strikes], [each.stall_s for each in strikes]
    noticed = f"{median(noticed_s):.2f} / {max(noticed_s):.2f}" if any(noticed_s) else "-"
    return f"| {name} | {len(strikes)} | {noticed} | {median(stalls_s):.2f} / {max(stalls_s):.2f} |"


def main(argv: Sequence[str]) -> None:
    repeats = int(argv[0]) if argv else 10
    with tempfile.TemporaryDirectory() as folder:
        stack = start(Path(folder), "float32")
        try:
            answers = ask_undisturbed(stack)
            sys.stdout.write("| fault | times | noticed after, median / longest, s | stall, median / longest, s |\n")
            sys.stdout.write("|---|---|---|---|\n")
            for name, (target, number) in FAULTS.items():
                strikes = [strike(stack, target, number, answers) for _ in range(repeats)]
                sys.stdout.write(row(name, strikes) + "\n")
                sys.stdout.flush()
        finally:
            stack.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
