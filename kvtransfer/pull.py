"""One pull: what is still to be asked for, and what of the answers may count as arrived. No socket, no clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import TransferError
from common.ids import BlockId, SequenceKey
from common.kv_layout import head_checksums
from common.shard_memory import BlockMemory
from common.wire import Buffer, KVBlocks
from kvtransfer.read import Read
from kvtransfer.reshard import ShardPull
from kvtransfer.route import Route
from kvtransfer.transfer_counters import Refusal, TransferCounters
from kvtransfer.transport import BlockCopy, StartPull


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks asked for with one message. Runs of them come in order.

    number:  unique in this process, echoed by the source
    next:    position of the first block that no run has covered yet
    """

    number: int
    pull: "Pull"
    block_ids: tuple[BlockId, ...]
    next: int = 0

    @property
    def is_answered(self) -> bool:
        return self.next == len(self.block_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Granted blocks that are being read."""

    pull: "Pull"
    block_ids: tuple[BlockId, ...]
    read: Read


class Pull:
    """What one `StartPull` takes from one shard, from asked for to verified.

    Writes these heads of the blocks into their targets, and nothing else does.

    A block that comes wrong is asked for once more; if it comes wrong again, the pull fails.
    heads:  of the model, of each block
    Mutable: which blocks are to be asked for, were retried, are missing; progress_s belongs to the caller.
    """

    def __init__(
        self, start: StartPull, part: ShardPull, route: Route, memory: BlockMemory, counters: TransferCounters
    ) -> None:
        """Raises: TransferError when the source block ids are not unique."""
        self.key: SequenceKey = start.key
        self.heads = part.heads
        self.route = route
        self.num_bytes = 0
        self.progress_s = 0.0
        self.piece_bytes = len(part.heads) * memory.head_bytes
        self._name = f"{start.key} from {part.shard.peer}"
        self._copies = {copy.source: copy for copy in start.copies}
        if len(self._copies) != len(start.copies):
            raise TransferError(
                f"{self._name}: each block can be pulled once, got {len(start.copies)} copies with repeats"
            )
        self._memory = memory
        self._counters = counters
        self._to_ask: deque[BlockId] = deque(self._copies)
        self._missing = set(self._copies)
        self._retried: set[BlockId] = set()

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def wants_more(self) -> bool:
        """Whether there are blocks that nobody was asked for."""
        return bool(self._to_ask)

    def next_fetch(self, number: int, max_blocks: int) -> Fetch:
        """Ask for the next blocks."""
        block_ids = tuple(self._to_ask.popleft() for _ in range(min(max_blocks, len(self._to_ask))))
        return Fetch(number, self, block_ids)

    def begin(self, fetch: Fetch, message: KVBlocks, buffers: Sequence[Buffer]) -> Run | None:
        """Begin to read a run that came for one of our fetches, if it is the next one.

        Raises: TransferError when the pull has failed by it.
        """
        if message.refusal:
            raise TransferError(f"{self._name}: the source refused: {message.refusal}")
        end = message.first + len(message.block_ids)
        if not message.block_ids or fetch.block_ids[message.first : end] != message.block_ids:
            self._counters.refuse("unasked")
            return None
        if message.first < fetch.next:
            self._counters.refuse("duplicated")
            return None
        early = message.first > fetch.next
        skipped, fetch.next = fetch.block_ids[fetch.next : end], end
        if early:
            self._retry("reordered", skipped)
            return None
        try:
            return Run(self, message.block_ids, self.route.read(message, buffers, self.heads))
        except TransferError:
            self._retry("truncated", message.block_ids)
            return None

    def take(self, block_ids: Sequence[BlockId], blocks: Sequence[Buffer]) -> int:
        """Copy and verify the blocks of a run, and return how many of them are right.

        Raises: TransferError when the pull has failed by them.
        """
        copies = [self._copies[block_id] for block_id in block_ids]
        arrivals = self._memory.arrivals([copy.target for copy in copies], self.heads)
        steps = enumerate(zip(copies, blocks, arrivals.pieces, strict=True))
        right = [position for position, step in steps if self._take_block(*step)]
        arrivals.keep(right)
        self._missing.difference_update(copies[position].source for position in right)
        self.num_bytes += len(right) * self.piece_bytes
        return len(right)

    def _take_block(self, copy: BlockCopy, block: Buffer, target: memoryview) -> bool:
        if len(block) != self.piece_bytes:
            self._retry("truncated", [copy.source])
            return False
        target[:] = block
        if head_checksums(target, self._memory.head_bytes) != copy.checksums[self.heads.start : self.heads.stop]:
            self._retry("corrupt", [copy.source])
            return False
        return True

    def _retry(self, kind: Refusal, block_ids: Sequence[BlockId]) -> None:
        """Count one refusal, and ask for the blocks once more."""
        self._counters.refuse(kind)
        for block_id in block_ids:
            if block_id in self._retried:
                raise TransferError(f"{self._name}: block {block_id} of the source came wrong twice, now {kind}")
            self._retried.add(block_id)
            self._to_ask.append(block_id)
            self._counters.add("kv_retried_blocks")
