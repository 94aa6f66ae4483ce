"""Moves KV blocks from a prefill worker's cache into a decode worker's.

1. prefill publishes a handoff: from now on its blocks may be fetched (`Publish`).
2. decode reserves blocks and pulls (`StartPull`): KVFetch, KVBlocks, bytes copied into the reserved
   blocks, checksums verified there; it ends with one `PullFinished`, whatever happens.
3. decode releases (`SendRelease`), prefill learns of it (`KVReleased`) and withdraws the handoff.
4. A cancelled or expired handoff is withdrawn (`Withdraw`): a fetch for it is refused from then on.

Where worker groups are split into ranks, blocks go from rank to rank: each has a cache with some of the KV heads
(`KVShard`), and its own `KVServer` or `KVPuller`. A receiving rank asks each sending one for the heads that it needs
and that one has (`reshard`), so the two groups may be of different sizes. A block is head after head, which makes any
range of heads one piece to send, to copy and to verify. Releases go from first rank to first rank.
"""
