"""Totals of what a transfer thread moved and refused. Written by that thread, read by any."""

from typing import Literal

Refusal = Literal["malformed", "stale", "unasked", "duplicated", "reordered", "truncated", "corrupt"]
"""Why received data never became part of a verified pull.

malformed:   not a message of ours
stale:       for a pull, an attempt or an incarnation that is over
unasked:     blocks that the fetch did not name, or a message that does not belong here
duplicated:  a run that came before
reordered:   a run that came before its turn
truncated:   a block with too few or too many bytes, or none
corrupt:     the target does not have the checksum that the descriptor promised
"""
REFUSALS: tuple[Refusal, ...] = (
    "malformed",
    "stale",
    "unasked",
    "duplicated",
    "reordered",
    "truncated",
    "corrupt",
)


class TransferCounters:
    """Counts by name; every name exists from the start."""

    def __init__(self, *names: str) -> None:
        self._counts: dict[str, int] = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def refuse(self, kind: Refusal) -> None:
        self.add(f"kv_refused_{kind}")

    def totals(self) -> dict[str, float]:
        return dict(self._counts)


def receiver_counters() -> TransferCounters:
    """A block that comes in parts, its heads from several shards, counts once a part."""
    return TransferCounters(
        "kv_pulls",
        "kv_pulls_failed",
        "kv_received_blocks",
        "kv_received_bytes_tcp",
        "kv_received_bytes_shm",
        "kv_received_bytes_nixl",
        "kv_retried_blocks",
        "kv_shm_unavailable",
        "kv_releases_unsent",
        *(f"kv_refused_{kind}" for kind in REFUSALS),
    )


def sender_counters() -> TransferCounters:
    return TransferCounters(
        "kv_fetches",
        "kv_fetches_refused",
        "kv_fetches_undeliverable",
        "kv_sent_blocks",
        "kv_sent_bytes",
        "kv_releases",
        "kv_refused_malformed",
    )
