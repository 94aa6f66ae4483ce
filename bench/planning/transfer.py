"""KV that changes hands on the virtual clock: what moves it takes time, and nothing is moved."""

from collections import defaultdict
from collections.abc import Callable

from bench.planning.clock import Clock
from common.ids import PeerId
from kvtransfer.transport import AbortPull, PullFinished, ReceiverEffect, SenderEffect, SendRelease, StartPull


class VirtualTransfer:
    """Each end of a pull does one thing at a time, as its thread does, in the order in which pulls were started.

    pull_s:        seconds of a pull of so many blocks
    send_release:  to the prefill worker that holds the blocks
    Mutable state: until when each end is busy.
    """

    def __init__(
        self, clock: Clock, pull_s: Callable[[int], float], send_release: Callable[[SendRelease], None]
    ) -> None:
        self._clock = clock
        self._pull_s = pull_s
        self._send_release = send_release
        self._busy_until_s: defaultdict[PeerId, float] = defaultdict(float)

    def publish(self, effect: SenderEffect) -> None:
        """Whoever asks for blocks gets them: nothing is lost here, and nobody asks for what was withdrawn."""

    def apply(self, receiver: PeerId, effect: ReceiverEffect, hear: Callable[[PullFinished], None]) -> None:
        """hear: of the receiver."""
        match effect:
            case StartPull():
                ended_s = self._end_of(receiver, effect)
                self._clock.at(ended_s, lambda: hear(PullFinished(effect.key, error="", num_bytes=0)))
            case SendRelease():
                self._send_release(effect)
            case AbortPull():
                pass  # it comes to its end all the same, and its blocks are given back then

    def _end_of(self, receiver: PeerId, pull: StartPull) -> float:
        ends = receiver, pull.kv.source.peer
        begin_s = max(self._clock.now, *(self._busy_until_s[end] for end in ends))
        end_s = begin_s + self._pull_s(len(pull.copies))
        self._busy_until_s.update(dict.fromkeys(ends, end_s))
        return end_s
