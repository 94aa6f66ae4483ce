"""When what a worker's loop is at takes so long that it has hung. Pure.

Measured against `step_expected_s`, what a large step takes on the worker's machine. A step of prefill is cut to the
length that its operator wants, and one of decode has no more tokens than the prompt that a worker warms up with.
"""

SLOW_FACTOR = 10
"""Steps take longer than expected where contexts are long, and where a machine has ten times as much to do as cores."""
OVERDUE_S = 5.0
"""At least, until no more is sent there. That costs little if it is wrong: the worker is back with its next status."""


def is_overdue(running_s: float, expected_s: float) -> bool:
    """Whether new work should rather go elsewhere."""
    return running_s > max(OVERDUE_S, SLOW_FACTOR * expected_s)


def hangs_after_s(timeout_s: float, expected_s: float) -> float:
    """How long a worker waits for its loop until it ends, which gives up all that it has.

    timeout_s: that an operator grants at least; what the machine is seen to need counts if that is more
    """
    return max(timeout_s, SLOW_FACTOR * expected_s)
