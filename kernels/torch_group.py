"""A group on torch.distributed: for devices that shared memory does not reach, and to compare with."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from kernels.group import GroupBroken

_HOST = "127.0.0.1"


def listen(size: int) -> TCPStore:
    """Where the ranks of a new group of this host meet; rank 0 opens it, and tells the others its `port`."""
    return TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)


def connect(port: int, size: int) -> TCPStore:
    """The meeting place that rank 0 listens on."""
    return TCPStore(_HOST, port, size, is_master=False)


class TorchGroup:
    """A rank's part in a group. A process is in one such group at a time; close() lets go of it."""

    def __init__(self, store: TCPStore, rank: int, size: int, *, timeout_s: float, backend: str = "gloo") -> None:
        """Waits until all ranks are there.

        timeout_s: how long to wait for the others, here and in every call
        backend:   gloo for tensors of the CPU, nccl for those of GPUs
        Raises: GroupBroken.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=timeout_s)
        _run(lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout))

    def close(self) -> None:
        dist.destroy_process_group()

    def all_reduce(self, x: Tensor) -> None:
        """Adds up here what all ranks have: a backend's own sum has an order of its own."""
        assert x.is_contiguous()
        own = x.float()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        _run(lambda: dist.all_gather(parts, own))
        for part in parts[1:]:
            parts[0] += part
        x.copy_(parts[0])

    def gather(self, x: Tensor, num_columns: Sequence[int]) -> Tensor | None:
        """Ranks send as many columns as the one with the most has."""
        padded = F.pad(x, (0, max(num_columns) - num_columns[self.rank]))
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        _run(lambda: dist.gather(padded, parts))
        if parts is None:
            return None
        return torch.cat([part[:, :count] for part, count in zip(parts, num_columns, strict=True)], dim=1)


def _run(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise GroupBroken(str(error)) from error
