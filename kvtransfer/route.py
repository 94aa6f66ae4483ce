"""How a granted run of blocks gets from a source to us: the one thing in which transports differ."""

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from common.errors import TransferError
from common.kv_source import KVShard, KVSource
from common.wire import Buffer, KVBlocks
from kvtransfer.nixl import NixlRoute
from kvtransfer.read import Read
from kvtransfer.shm import ShmRoute
from kvtransfer.tcp import TcpRoute

logger = logging.getLogger(__name__)

Mode = Literal["auto", "tcp", "shm", "nixl"]


class Route(Protocol):
    """Where the bytes of a source's granted blocks are. Belongs to the transfer thread.

    name:         for metrics
    with_data:    whether the source sends bytes or only permission
    fetch_bytes:  to ask for at a time
    """

    @property
    def name(self) -> str: ...

    @property
    def with_data(self) -> bool: ...

    @property
    def fetch_bytes(self) -> int: ...

    def read(self, message: KVBlocks, buffers: Sequence[Buffer], heads: range) -> Read:
        """Begin to read these heads of each block of the run. The bytes may have any length and content.

        Raises: TransferError when bytes are missing or come where none were asked for.
        """
        ...

    def close(self) -> None:
        """End all reads: afterwards nothing is written into their memory."""
        ...


def choose_route(mode: Mode, source: KVSource, shard: KVShard) -> Route:
    """What was asked for; else shared memory where the shard's very segment can be opened here, or frames.

    Containers may share a kernel and addresses, but not /dev/shm: only reading the nonce back proves anything.
    Raises: TransferError when the mode is "shm" or "nixl" and it cannot be had.
    """
    if mode == "nixl":
        return NixlRoute(source, shard)
    if mode == "tcp" or (mode == "auto" and not shard.shm_name):
        return TcpRoute()
    try:
        return ShmRoute(source, shard)
    except TransferError as error:
        if mode == "shm":
            raise
        logger.info("KV of %s comes over tcp: %s", shard.peer, error)
        return TcpRoute()
