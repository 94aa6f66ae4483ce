"""Granted blocks on their way from a source to us."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.wire import Buffer


class Read(Protocol):
    """The bytes of a run of blocks. Belongs to the transfer thread."""

    @property
    def blocks(self) -> Sequence[Buffer] | None:
        """One each, in the order of the run, valid until `close`; None until they are here."""
        ...

    def advance(self) -> None:
        """See how far it is; blocks for no longer than a copy takes.

        Raises: TransferError when its route has failed, and with it all that is on its way there.
        """
        ...

    def close(self) -> None:
        """Nobody needs the blocks any more, which are here."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """Blocks that are here from the start."""

    blocks: Sequence[Buffer]

    def advance(self) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """There is nothing to give back."""
