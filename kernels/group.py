"""Processes that compute one model together, each a part of every block (tensor parallelism), and their collectives."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class GroupBroken(Exception):
    """The group was aborted, or a rank is gone. Neither the group nor what the call was to compute can be used."""


class Group(Protocol):
    """The ranks of a group, 0 to size - 1, as one of them sees them.

    All ranks make the same calls in the same order. A call may wait for the other ranks for as long as they take.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> None:
        """x, contiguous and of one shape on all ranks, becomes the sum over the ranks.

        Added in fp32 and in the order of ranks, so that all ranks get the same bits, and every kind of group the same.
        Raises: GroupBroken.
        """
        ...

    def gather(self, x: Tensor, num_columns: Sequence[int]) -> Tensor | None:
        """x: [num_rows, num_columns[rank]] fp32, contiguous;  num_columns: of each rank.

        Returns at rank 0 those of all ranks side by side, [num_rows, sum(num_columns)], elsewhere None.
        Raises: GroupBroken.
        """
        ...
