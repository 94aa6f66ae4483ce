"""Moves KV blocks from a prefill worker's cache into a decode worker's.

1. prefill publishes a handoff: from now on its blocks may be fetched (`Publish`).
2. decode reserves blocks and pulls (`StartPull`): KVFetch, KVBlocks, bytes copied into the reserved
   blocks, checksums verified there; it ends with one `PullFinished`, whatever happens.
3. decode releases (`SendRelease`), prefill learns of it (`KVReleased`) and withdraws the handoff.
4. A cancelled or expired handoff is withdrawn (`Withdraw`): a fetch for it is refused from then on.
"""
