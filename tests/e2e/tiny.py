"""A folder with a small random model that the whole stack can serve: fast, and as good as any for what is not text."""

from pathlib import Path

from transformers import PreTrainedModel

from tests.e2e.byte_tokenizer import save_byte_tokenizer
from tests.model import tiny_models

BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Of one KV block of most variants: layers, keys and values, KV heads, tokens, head size, bytes of a float32."""


def save_tiny(folder: Path, variant: str = "grouped") -> PreTrainedModel:
    """Save the model, with a tokenizer; returns what transformers computes with."""
    model = tiny_models.save(variant, folder)
    save_byte_tokenizer(folder)
    return model
