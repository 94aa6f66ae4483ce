"""The prefill side of a measured handoff, in a process of its own."""

import multiprocessing
from collections.abc import Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import numpy as np

from common.errors import ConfigError, TransferError
from common.ids import BlockId, PeerId, SequenceKey
from common.kv_layout import HeadChecksums, KVLayout, head_checksums
from common.kv_source import KVSource
from common.shard_memory import ShardMemory
from kvtransfer.nixl import RegisteredMemory
from kvtransfer.server import KVServer
from kvtransfer.shm import SharedSegment
from kvtransfer.transport import KVReleased, Publish, SenderEffect


class HandoffSource:
    """A process with a cache of random bytes in shared memory and a `KVServer`; ends with the `with`.

    source:     as a receiver is told
    checksums:  of every block
    """

    def __init__(self, layout: KVLayout, num_blocks: int, transports: Sequence[str]) -> None:
        """Blocks until the process is ready.

        Raises: ConfigError when there is no shared memory, or not enough, or no NIXL; TransferError when the process
        ended.
        """
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, layout, num_blocks, transports), daemon=True)
        self._process.start()
        theirs.close()
        answer = self._receive()
        if isinstance(answer, str):
            self.close()
            raise ConfigError(answer)
        self.source: KVSource
        self.checksums: Sequence[HeadChecksums]
        self.source, self.checksums = answer

    def publish(self, key: SequenceKey, block_ids: tuple[BlockId, ...]) -> None:
        """When it returns, the blocks may be fetched."""
        self._pipe.send(Publish(key, block_ids))
        self._receive()

    def close(self) -> None:
        """Idempotent."""
        self._pipe.close()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _receive(self) -> tuple[KVSource, Sequence[HeadChecksums]] | str:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise TransferError(f"the process that hands KV over ended with {self._process.exitcode}") from None


def serve(
    pipe: "Connection[object, SenderEffect]", layout: KVLayout, num_blocks: int, transports: Sequence[str]
) -> None:
    """What the process does: carry out what the pipe says, until its other end is closed."""
    with ExitStack() as undo:
        segment = SharedSegment(num_blocks * layout.block_bytes)
        undo.callback(segment.close)
        try:
            segment.create()
            registered = undo.enter_context(closing(RegisteredMemory(segment.memory))) if "nixl" in transports else None
        except ConfigError as error:
            pipe.send(str(error))
            return
        np.frombuffer(segment.memory, dtype=np.uint8)[:] = _random_bytes(len(segment.memory))
        peer = PeerId("prefill#1")
        server = KVServer(
            *(peer, ShardMemory(segment.memory, range(layout.num_kv_heads), layout.head_bytes)),
            *(_ignore_release, "tcp://127.0.0.1:*"),
            segment=segment,
            registered=registered,
        )
        source = KVSource(peer=peer, layout=layout, num_blocks=num_blocks, shards=(server.shard,))
        pipe.send((source, block_checksums(segment.memory, layout)))
        try:
            while True:
                server.apply(pipe.recv())
                pipe.send("done")
        except EOFError:
            server.close()


def _ignore_release(event: KVReleased) -> None:
    """The next handoff is published by itself."""


def block_checksums(memory: memoryview, layout: KVLayout) -> list[HeadChecksums]:
    starts = range(0, len(memory), layout.block_bytes)
    return [head_checksums(memory[start : start + layout.block_bytes], layout.head_bytes) for start in starts]


def _random_bytes(num: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    words = np.random.default_rng(0).integers(0, 2**63, -(-num // 8), dtype=np.int64)
    return words.view(np.uint8)[:num]
