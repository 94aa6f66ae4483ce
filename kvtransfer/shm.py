"""KV blocks through shared memory: the receiver copies straight out of the sender's cache.

A segment is a file in /dev/shm: one header page, then the cache. Its owner holds a lock on it for as long as it
lives, so a segment whose lock can be had belongs to nobody and is removed.
"""

import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, TransferError
from common.kv_source import KVShard, KVSource
from common.shard_memory import ShardMemory
from common.wire import Buffer, KVBlocks
from kvtransfer.read import Arrived

logger = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
PREFIX = "baton-kv-"
HEADER_BYTES = 4096
_MAGIC = b"BATON-KV"
_VERSION = 1
_HEADER = struct.Struct("<8sI32sQ")
"""magic, version, nonce in hex, bytes of the cache"""


class SharedSegment:
    """A cache's memory that other processes on this machine can read. Its creator owns it.

    name, nonce:  what a `KVSource` says about it
    memory:       the cache, zeroed, once it is created; it stays valid for as long as anybody has a view of it
    """

    def __init__(self, num_bytes: int) -> None:
        """Nothing is there yet: see to it that `close` is called, then `create` it, which a signal may end anywhere."""
        self.name = ""
        self.nonce = secrets.token_hex(16)
        self.memory = memoryview(b"")
        self._num_bytes = num_bytes
        self._lock: int | None = None

    def create(self) -> "SharedSegment":
        """Raises: ConfigError when there is no shared memory, or not enough."""
        try:
            self._lock = file = self._create_locked()
        except OSError as error:
            raise ConfigError(f"cannot create shared memory in {DIRECTORY}: {error}") from error
        size = HEADER_BYTES + self._num_bytes
        try:
            # Reserves the pages: without it a full tmpfs kills the process at some later write (SIGBUS).
            os.posix_fallocate(file, 0, size)
            mapped = mmap.mmap(file, size)
            _HEADER.pack_into(mapped, 0, _MAGIC, _VERSION, self.nonce.encode(), self._num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise ConfigError(f"{DIRECTORY} cannot hold a KV cache of {self._num_bytes} bytes: {error}") from error
        self.memory = memoryview(mapped)[HEADER_BYTES:]
        return self

    def close(self) -> None:
        """Remove the segment, or what there is of it. Whoever mapped it keeps what they mapped. Idempotent."""
        if self.name:
            (DIRECTORY / self.name).unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _create_locked(self) -> int:
        """The descriptor of the new file, which holds the lock."""
        while True:
            self.name = f"{PREFIX}{secrets.token_hex(8)}"
            path = DIRECTORY / self.name
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Between the two calls it looks like a dead owner's: another process may lock and remove it.
            if _try_lock(file) and path.exists():
                return file
            os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_dead_segments() -> list[str]:
    """Remove the segments whose owners are gone, and name them. Those of other users stay."""
    removed: list[str] = []
    for path in DIRECTORY.glob(f"{PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            continue  # just removed, or another user's
        try:
            if _try_lock(file):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        finally:
            os.close(file)
    if removed:
        logger.info("removed shared memory of %d dead workers", len(removed))
    return removed


class ShmRoute:
    """Reads blocks from a source's segment. The source only says that they may be read."""

    name = "shm"
    with_data = False
    fetch_bytes = 16 * 2**20
    """Nothing is under way, and an answer costs as much time as 1 MB of copying (4 MiB each: 4.6 GB/s, 16 MiB: 5.3). A
    longer run would keep the thread from whatever else comes meanwhile."""

    def __init__(self, source: KVSource, shard: KVShard) -> None:
        """Raises: TransferError when the segment is not to be found here, or is another one."""
        head_bytes = source.layout.head_bytes
        num_bytes = source.num_blocks * shard.num_heads * head_bytes
        if not shard.shm_name.startswith(PREFIX) or "/" in shard.shm_name:
            raise TransferError(f"{shard.peer} has no shared memory, it names {shard.shm_name!r}")
        try:
            file = os.open(DIRECTORY / shard.shm_name, os.O_RDONLY)
        except OSError as error:
            raise TransferError(f"shared memory of {shard.peer}: {error}") from error
        try:
            if os.fstat(file).st_size < HEADER_BYTES + num_bytes:
                raise TransferError(f"shared memory of {shard.peer} is smaller than its {num_bytes} bytes of cache")
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # 1 ms for 35 MB now, or five times that in the middle of pulls
            mapped = mmap.mmap(file, HEADER_BYTES + num_bytes, flags=flags, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        wanted = (_MAGIC, _VERSION, shard.shm_nonce.encode(), num_bytes)
        if _HEADER.unpack_from(mapped) != wanted:
            raise TransferError(f"shared memory named {shard.shm_name} here is not the one of {shard.peer}")
        self._memory = ShardMemory(memoryview(mapped)[HEADER_BYTES:], shard.heads, head_bytes)

    def read(self, message: KVBlocks, buffers: Sequence[Buffer], heads: range) -> Arrived:
        """A view of each block of a granted run, none of it copied."""
        if buffers:
            raise TransferError(f"a grant comes without data, got {len(buffers)} frames")
        return Arrived([self._memory.piece(block_id, heads) for block_id in message.block_ids])

    def close(self) -> None:
        """The memory is unmapped when nobody has a view of it."""
