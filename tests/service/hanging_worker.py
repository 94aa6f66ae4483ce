"""A worker without a model or links, whose loop hangs: `python -m tests.service.hanging_worker HOW`, in its first step.

step, effect: for ever in a step, or in what carries out an effect of it. log: in a line that nobody reads.
slow: for SLOW_S in a step, which is less than LIMIT_S; then it stops.
"""

import logging
import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any

from common.engine.gateway_watch import GatewayWatch
from common.engine.loop_watch import LoopWatch
from common.engine.step import StepPlan, StepResult
from common.engine.worker_loop import Stop, WorkerLoop
from common.log import set_up_logging
from common.service import Received
from tests.fakes import FakeRunner
from tests.unit.test_prefill_service import prompt
from tests.unit.test_worker_services import GATEWAY, LAYOUT, Prefill

LIMIT_S = 1.0
SLOW_S = 0.8
STARTED = "a step begins"


def hang() -> None:
    threading.Event().wait()


class Runner:
    """Does what it is told in the first step."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._runner = FakeRunner(16, LAYOUT)

    def claim_cores(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def others_want_cores(self) -> bool:
        return False

    def execute(self, plan: StepPlan) -> StepResult:
        os.write(1, f"{STARTED}\n".encode())
        match self._how:
            case "step":
                hang()
            case "log":
                logging.getLogger().error("%s", "x" * 2**20)
            case "slow":
                time.sleep(SLOW_S)
            case _:
                pass
        return self._runner.execute(plan)


def main(how: str) -> None:
    set_up_logging("worker", "info", "text")
    inbox: SimpleQueue[Any] = SimpleQueue()
    inbox.put(Received(GATEWAY, prompt("a")))

    def apply(effect: object) -> None:
        if how == "effect":
            hang()
        inbox.put(Stop())
        inbox.put(Stop())

    loop: WorkerLoop[Any, Any] = WorkerLoop(
        Prefill().service,
        Runner(how),
        inbox=inbox,
        send=lambda peer, message: True,
        apply_transfer=apply,
        extra_counters=dict,
        is_healthy=lambda: True,
        watch=GatewayWatch(0, lambda num_joined: None, time.monotonic()),
        drain_timeout_s=0.0,
        step_expected_s=0.0,
    )
    watch = LoopWatch(loop.current_turn, LIMIT_S, logging.getLogger().error)
    watch.start()
    loop.run()
    watch.close()


if __name__ == "__main__":
    main(sys.argv[1])
