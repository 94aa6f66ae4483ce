"""When a decode worker may begin its next step. Pure.

A step sooner than a reader needs it takes cores from prompts that others wait for. So while another worker of the host
has work, steps begin no sooner than the target for the time between tokens allows; alone, at once. They begin somewhat
closer together than the target, so that a step that is held up a little still holds it.

A step that takes longer than that cannot hold it, whatever the others give up. What it costs is then better
shared by more sequences: it reads the weights once for all of them, and those whose prompts are computed meanwhile come
into the next one. So the more it is late, the longer prompts have the cores.
"""

from collections import deque

AIM = 5 / 6
"""Of the target that lies between the starts of two steps. Four streams beside long prompts, target 30 ms, two cores of
Zen 4, three runs each: with 1 the 99th percentile of the time between tokens was 38, 40 and 47 ms, with 5/6 34, 38 and
41. What prompts lost was within the noise (docs/performance.md)."""

RELIEF = 4.0
"""What the time between steps grows by for each second that a step takes longer than that."""

_REMEMBERED_STEPS = 3


class Pacer:
    """Knows how long steps take now: as long as the fastest of the last few, since any one may have been held up."""

    def __init__(self, itl_target_s: float) -> None:
        """itl_target_s: wanted between two tokens of a sequence; 0 for no pacing."""
        self._apart_s = AIM * itl_target_s
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)

    @property
    def is_pacing(self) -> bool:
        return self._apart_s > 0

    def next_start_s(self, started_s: float, ended_s: float, *, others_want_cores: bool) -> float:
        """The earliest start of the step after the one that took from started_s to ended_s."""
        self._durations_s.append(ended_s - started_s)
        if not self.is_pacing or not others_want_cores:
            return started_s
        late_s = max(0.0, min(self._durations_s) - self._apart_s)
        return started_s + self._apart_s + RELIEF * late_s
