"""Where KV blocks can be fetched, and what must arrive: what prefill tells decode, through the gateway."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from common.ids import BlockId, PeerId
from common.kv_layout import KVLayout
from common.wire_types import Address, Count

MAX_SHARDS = 1024
"""Ranks of a worker group. A receiver looks at all of them for each head."""


MAX_AGENT_BYTES = 16 * 1024
"""Of what NIXL says of an agent: 450 bytes on a host with one network device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShard:
    """One rank of a worker group, and the KV heads of the model that it has of every block.

    peer:          of its transfer thread
    data_address:  ZeroMQ endpoint of its transfer thread
    shm_name:      its cache's shared-memory segment, "" if it has none
    shm_nonce:     what the segment's header must hold for it to be the very same one
    nixl_agent:    metadata of the NIXL agent that its cache is registered at, empty if there is none
    nixl_address:  of the cache, in the memory of its process
    """

    peer: PeerId
    data_address: Address
    shm_name: str
    shm_nonce: str
    first_head: Count
    num_heads: Count
    nixl_agent: Annotated[bytes, msgspec.Meta(max_length=MAX_AGENT_BYTES)] = b""
    nixl_address: Count = 0

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Where a worker group's KV blocks can be fetched.

    layout:      of whole blocks, with all KV heads of the model
    num_blocks:  of each rank alike
    shards:      by rank; several may have the same heads
    """

    peer: PeerId
    layout: KVLayout
    num_blocks: Count
    shards: Annotated[tuple[KVShard, ...], msgspec.Meta(max_length=MAX_SHARDS)]

    def __post_init__(self) -> None:
        """Raises: ValueError unless every head is somewhere; `decode` makes a WireError of it."""
        end = 0
        for shard in sorted(self.shards, key=lambda shard: shard.first_head):
            if shard.num_heads < 1 or shard.first_head > end:
                break
            end = max(end, shard.first_head + shard.num_heads)
        else:
            if self.shards and end == self.layout.num_kv_heads:
                return
        got = ", ".join(f"{shard.num_heads} from {shard.first_head} on" for shard in self.shards[:8])
        raise ValueError(f"shards must have each of {self.layout.num_kv_heads} heads and no other, got {got or 'none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDescriptor:
    """KV blocks that a prefill worker holds for one attempt: the baton.

    num_tokens:  whose KV the blocks hold, in order; the last block may be partly filled
    checksums:   xxh3_64 of the whole bytes of each head of the model, parallel to block_ids; where several ranks have
                 a head, of the first one's
    """

    source: KVSource
    num_tokens: Count
    block_ids: tuple[BlockId, ...]
    checksums: tuple[tuple[Count, ...], ...]
