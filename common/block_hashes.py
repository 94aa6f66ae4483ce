"""Names of KV blocks by content: equal hashes mean equal tokens at equal positions. Pure."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes
HASH_BYTES = 16


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[BlockHash]:
    """Hash every full block together with all tokens before it.

    Equal hashes mean equal tokens at equal positions: 128 bits of BLAKE2b, which nobody can collide on purpose.
    salt: separates users that must not share blocks.
    """
    parent = blake2b(salt.encode(), digest_size=HASH_BYTES).digest()
    tokens = array("I", token_ids)
    data, num_bytes = tokens.tobytes(), block_size * tokens.itemsize
    hashes: list[BlockHash] = []
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        parent = blake2b(parent + data[start : start + num_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def num_shareable_blocks(num_tokens: int, block_size: int) -> int:
    """Leading blocks of a prompt that need not be computed if they are cached: its last token is, for the logits."""
    return (num_tokens - 1) // block_size
