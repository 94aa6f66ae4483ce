"""Processes that play the ranks of groups, and what tests let them do."""

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import LayerWeights
from kernels.cpu.cores import private_cores
from kernels.cpu.group import NativeGroup
from kernels.cpu.group_memory import GroupMemory
from kernels.cpu.library import best_library
from kernels.dispatch import OpsRequest, choose_ops
from kernels.group import Group
from kernels.token_rows import TokenRows
from kernels.torch_group import TorchGroup, connect, listen
from tests.kernels.paged import make_kv

TORCH_TIMEOUT_S = 60
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class NativeMeeting:
    """fd: of the tests' GroupMemory."""

    fd: int
    size: int

    @contextmanager
    def join(self, rank: int) -> Iterator[Group]:
        fd = os.open(f"/proc/{os.getppid()}/fd/{self.fd}", os.O_RDWR)
        yield NativeGroup(best_library()[1], GroupMemory(fd, self.size), rank, spin=self.size == 2)


@dataclass(frozen=True, slots=True)
class TorchMeeting:
    port: int
    size: int

    @contextmanager
    def join(self, rank: int) -> Iterator[Group]:
        group = TorchGroup(connect(self.port, self.size), rank, self.size, timeout_s=TORCH_TIMEOUT_S)
        try:
            yield group
        finally:
            group.close()


Meeting = NativeMeeting | TorchMeeting


class Ranks:
    """Processes that join one group after another: to start one takes seconds."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [context.Process(target=_serve, args=(theirs,)) for _, theirs in pipes]
        for process in self._processes:
            process.start()

    def close(self) -> None:
        for connection in self._connections:
            connection.send_bytes(b"")
        for process in self._processes:
            process.join()

    @contextmanager
    def meet(self, kind: str, size: int) -> Iterator[Meeting]:
        """Where the first `size` of us can meet, by the kinds `native` and `torch`."""
        if kind == "native":
            memory = GroupMemory.create(size)
            yield NativeMeeting(memory.fd, size)
        else:
            store = listen(size)
            yield TorchMeeting(store.port, size)

    def begin(self, rank: int, meeting: Meeting, task: Callable[..., object], *args: object) -> None:
        """task: given the rank's group and args; a function of this module."""
        self._connections[rank].send_bytes(pickle.dumps((meeting, rank, task, args)))

    def end(self, rank: int) -> Any:
        """What the task returned, or the exception that it raised."""
        return pickle.loads(self._connections[rank].recv_bytes())

    def run(self, meeting: Meeting, task: Callable[..., object], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """args: of the task at each rank. Raises what it raised at one of them."""
        for rank in range(meeting.size):
            self.begin(rank, meeting, task, *args[rank])
        results = [self.end(rank) for rank in range(meeting.size)]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while received := connection.recv_bytes():
        meeting, rank, task, args = pickle.loads(received)
        try:
            with meeting.join(rank) as group:
                result = task(group, *args)
        except Exception as error:
            result = error
        connection.send_bytes(pickle.dumps(result))


def reduce_each(group: Group, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    for tensor in tensors:
        group.all_reduce(tensor)
    return tensors


def gather_each(
    group: Group, tensors: Sequence[Tensor], num_columns: Sequence[Sequence[int]]
) -> Sequence[Tensor | None]:
    return [group.gather(*each) for each in zip(tensors, num_columns, strict=True)]


def play(group: Group, num_calls: int) -> None:
    """Calls of all kinds and sizes in random order, the same ones at all ranks, and each result checked."""
    random = torch.Generator().manual_seed(1)
    parts = torch.randn(group.size, 100_000, generator=random)
    sums = parts[0].clone()
    for part in parts[1:]:
        sums += part

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=random))

    for _ in range(num_calls):
        count = 1 + draw(90_000 if draw(20) == 0 else 2_000)
        begin = draw(100_000 - count)
        if draw(3):
            x = parts[group.rank, begin : begin + count].clone()
            group.all_reduce(x)
            assert torch.equal(x, sums[begin : begin + count])
            continue
        num_columns = [1 + draw(count) for _ in range(group.size)]
        num_rows = 1 + draw(5) if begin + 5 * count <= 100_000 else 1
        own = [part[begin : begin + num_rows * n].view(num_rows, n) for part, n in zip(parts, num_columns, strict=True)]
        got = group.gather(own[group.rank], num_columns)
        assert (got is None) == (group.rank != 0)
        assert got is None or torch.equal(got, torch.cat(own, dim=1))


def decode_layers(
    group: Group, ops_name: str, layers: Sequence[LayerWeights], x: Tensor, rows: TokenRows, num_blocks: int
) -> Tensor:
    """Returns what comes out of the last layer, the residual added."""
    weights = layers[0].attention
    request = OpsRequest(dtype=torch.float32, head_dim=weights.head_dim, block_size=BLOCK_SIZE)
    decoder = choose_ops(ops_name, request, private_cores(1), group).decoder(layers)
    sizes = weights.num_kv_heads, BLOCK_SIZE, weights.head_dim
    caches = [make_kv(num_blocks, *sizes, torch.float32, fill=0.0) for _ in layers]
    out, residual = decoder(x, rows, caches)
    return out + residual
