"""What the gateway knows about the model that it serves."""

from dataclasses import dataclass

from common.model_files import ModelFiles
from gateway.chat_template import ChatTemplate, load_chat_template
from gateway.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """name: in the API. root: where the model is from. created: Unix time. template: None if it has none."""

    name: str
    root: str
    created: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_served_model(files: ModelFiles, name: str, created: int) -> ServedModel:
    """name: "" for the model's own.

    Raises: ModelError if its tokenizer or chat template is unusable.
    """
    return ServedModel(
        name=name or files.name,
        root=files.name,
        created=created,
        vocab_size=files.vocab_size,
        eos_token_ids=files.eos_token_ids,
        tokenizer=load_tokenizer(files),
        template=load_chat_template(files),
    )
