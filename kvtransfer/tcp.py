"""KV blocks as frames on the data channel: the source sends them straight out of its cache, uncopied."""

from collections.abc import Sequence

from common.errors import TransferError
from common.wire import Buffer, KVBlocks
from kvtransfer.read import Arrived


class TcpRoute:
    """Takes blocks from the frames that travel behind a `KVBlocks`, over TCP or a Unix socket."""

    name = "tcp"
    with_data = True
    fetch_bytes = 4 * 2**20

    def read(self, message: KVBlocks, buffers: Sequence[Buffer], heads: range) -> Arrived:
        """Raises: TransferError when there is not one frame a block."""
        if len(buffers) != len(message.block_ids):
            raise TransferError(f"{len(message.block_ids)} blocks come in as many frames, got {len(buffers)}")
        return Arrived(buffers)

    def close(self) -> None:
        """There is nothing to give back."""
