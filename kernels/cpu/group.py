"""A rank's part in a group of processes of one host, over memory that they share."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from kernels.cpu.group_memory import GroupMemory
from kernels.group import GroupBroken

_SPIN_NS = 20_000
"""A few times an exchange of one row between ranks that come together; longer waits are for ranks that compute."""


class NativeGroup:
    """A rank's part in a group, in C++, on the calling thread. One thread at a time may call it.

    While a rank waits for others it sleeps, at the latest after a moment.
    """

    def __init__(self, library: ctypes.CDLL, memory: GroupMemory, rank: int, *, spin: bool) -> None:
        """library: see load_library;  spin: whether to look for the others for a moment before sleeping, which pays
        where each rank has a core of its own, and takes the others' time where not.
        """
        assert 0 <= rank < memory.size, f"rank {rank} of {memory.size}"
        self.rank = rank
        self.size = memory.size
        self._library = library
        self._memory = memory
        self._struct = memory.struct_of(rank, spin_ns=_SPIN_NS if spin else 0)
        self.address = ctypes.addressof(self._struct)

    def all_reduce(self, x: Tensor) -> None:
        assert x.is_contiguous()
        exact = x.float()
        if not self._library.baton_all_reduce(self.address, exact.data_ptr(), exact.numel()):
            raise GroupBroken("the group was aborted")
        if exact is not x:
            x.copy_(exact)

    def gather(self, x: Tensor, num_columns: Sequence[int]) -> Tensor | None:
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        assert x.shape[1] == num_columns[self.rank]
        assert len(num_columns) == self.size
        out = torch.empty(len(x), sum(num_columns)) if self.rank == 0 else None
        pointers = (c_int64 * self.size)(*num_columns), None if out is None else out.data_ptr()
        if not self._library.baton_gather(self.address, x.data_ptr(), len(x), *pointers):
            raise GroupBroken("the group was aborted")
        return out
