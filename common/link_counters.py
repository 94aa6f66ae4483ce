"""Totals of what links did and dropped. Written by the I/O thread, read by any."""

import logging
import time

logger = logging.getLogger(__name__)

REFUSALS = ("malformed", "misaddressed", "superseded", "misplaced", "duplicate", "surplus")
LOSSES = ("connection", "gap", "reported", "incarnation")
LOG_S = 1.0


class LinkCounters:
    """Mutable: sent and received (control messages); everything else through `refuse` and `lose`."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self._refused: dict[str, int] = dict.fromkeys(REFUSALS, 0)
        self._lost: dict[str, int] = dict.fromkeys(LOSSES, 0)
        self._next_log_s = 0.0

    def refuse(self, kind: str, what: str) -> None:
        """Count a message that was dropped; log one a second at most, whatever a peer sends."""
        self._refused[kind] += 1
        now = time.monotonic()
        if now >= self._next_log_s:
            self._next_log_s = now + LOG_S
            logger.warning("dropped a %s message: %s", kind, what)

    def lose(self, cause: str) -> None:
        self._lost[cause] += 1

    def totals(self) -> dict[str, float]:
        return {
            "links_sent": self.sent,
            "links_received": self.received,
            **{f"links_refused_{kind}": count for kind, count in self._refused.items()},
            **{f"links_lost_{cause}": count for cause, count in self._lost.items()},
        }
