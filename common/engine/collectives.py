"""How the ranks of a worker group come together for their collectives."""

from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but does not say so

from common.errors import ConfigError
from kernels.cpu.group import NativeGroup
from kernels.cpu.group_memory import GroupMemory
from kernels.cpu.library import NoNativeOps, best_library
from kernels.group import Group
from kernels.torch_group import TorchGroup, connect, listen

CALL_TIMEOUT_S = 60.0
"""Of torch.distributed. A rank that is gone is noticed at once; one that is silent is ended by its group's watch."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet, as rank 0 chose it. store: of torch.distributed; None: in the group's shared memory."""

    store: TCPStore | None

    @property
    def port(self) -> int:
        """What the other ranks are told; 0: shared memory."""
        return self.store.port if self.store else 0


def open_meeting(collectives: str, size: int, device: torch.device) -> Meeting:
    """For rank 0. collectives: by the names of the flag;  device: of its tensors. Raises: ConfigError."""
    if device.type != "cpu":
        if collectives not in ("auto", "nccl"):
            raise ConfigError(f"collectives must be auto or nccl where GPUs compute, got {collectives}")
        return Meeting(listen(size))
    if collectives == "nccl":
        raise ConfigError("collectives nccl: they are of GPUs, and a CPU computes")
    if collectives == "gloo":
        return Meeting(listen(size))
    try:
        best_library()
    except NoNativeOps as error:
        if collectives == "shm":
            raise ConfigError(f"collectives shm: {error}") from error
        return Meeting(listen(size))
    return Meeting(None)


def find_meeting(port: int, size: int) -> Meeting:
    """For the other ranks."""
    return Meeting(connect(port, size) if port else None)


def join(meeting: Meeting, memory: GroupMemory, rank: int, num_cores: int, device: torch.device) -> Group:
    """May wait until all ranks are there.

    num_cores: that the ranks share;  device: of our tensors, the current one
    Raises: GroupBroken.
    """
    if meeting.store:
        backend = "gloo" if device.type == "cpu" else "nccl"
        return TorchGroup(meeting.store, rank, memory.size, timeout_s=CALL_TIMEOUT_S, backend=backend)
    _, library = best_library()
    return NativeGroup(library, memory, rank, spin=num_cores >= memory.size)
