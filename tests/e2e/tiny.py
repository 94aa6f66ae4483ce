"""A folder with a small random model that the whole stack can serve: fast, and as good as any for what is not text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from tests.model import tiny_models

NUM_BYTES = 256
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Of one KV block of most variants: layers, keys and values, KV heads, tokens, head size, bytes of a float32."""


def save_tiny(folder: Path, variant: str = "grouped") -> PreTrainedModel:
    """Save the model, with a tokenizer of one token a byte; returns what transformers computes with."""
    model = tiny_models.save(variant, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == NUM_BYTES
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": CHAT_TEMPLATE}))
    return model
