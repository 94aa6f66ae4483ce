"""What a worker's loop does from one look at its inbox to the next, and how long that has been seen to last. Pure."""

from dataclasses import dataclass

from common.engine.step import StepPlan


@dataclass(frozen=True, slots=True)
class Turn:
    """plan: of the step that it is at, if it is at one. A turn without a step is over with the next tick."""

    started_s: float
    plan: StepPlan | None = None

    def __str__(self) -> str:
        if self.plan is None:
            return "what the loop does between two steps"
        first, num_seqs = self.plan.sequences[0], len(self.plan.sequences)
        names = str(first.key) if num_seqs == 1 else f"{first.key} and {num_seqs - 1} others"
        return f"the step of {names} with {self.plan.num_tokens} tokens"


class Patience:
    """For how long the same turn was seen, by somebody who looks every so often.

    Only looks count, and no clock: a process that was stopped, or a host that slept, has not hung.
    Mutable state: when the turn that was seen last has started, and how often it was seen again.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._started_s: float | None = None
        self._num_looks = 0

    def see(self, turn: Turn) -> float:
        """Seconds; 0 for a turn that was not seen before."""
        self._num_looks = self._num_looks + 1 if turn.started_s == self._started_s else 0
        self._started_s = turn.started_s
        return self._num_looks * self._every_s
