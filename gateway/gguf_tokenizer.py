"""Builds a tokenizer from a GGUF file's metadata: byte-level BPE with the pre-tokenizers that we know."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from common.errors import ModelError

_CONTROL = 3
_USER_DEFINED = 4
_LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt_2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


def _llama_3() -> PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA_3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": _gpt_2,
    "gpt-2": _gpt_2,
    "smollm": _smollm,
    "llama-bpe": _llama_3,
}
"""Source: the pre-tokenizer each model's tokenizer.json has; the names are llama.cpp's (src/llama-vocab.cpp)."""


class _Metadata(msgspec.Struct, rename=lambda name: f"tokenizer.ggml.{name}"):
    """The keys that make a tokenizer. token_type: of each token, parallel to tokens."""

    model: str
    tokens: list[str]
    merges: list[str] = []
    token_type: list[int] = []
    pre: str = "default"
    bos_token_id: int | None = None
    add_bos_token: bool | None = None


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises: ModelError if the vocabulary's kind or pre-tokenizer is unknown."""
    try:
        keys = msgspec.convert(metadata, _Metadata)
    except msgspec.ValidationError as error:
        raise ModelError(f"GGUF tokenizer metadata not usable: {error}") from error
    if keys.model != "gpt2":
        raise ModelError(
            f"GGUF tokenizer.ggml.model must be gpt2 (byte-level BPE), got {keys.model}; "
            "use the model's folder with its tokenizer.json instead"
        )
    if keys.pre not in _PRE_TOKENIZERS:
        raise ModelError(f"GGUF tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}, got {keys.pre}")
    if keys.bos_token_id is not None and not 0 <= keys.bos_token_id < len(keys.tokens):
        raise ModelError(f"GGUF bos_token_id must be one of {len(keys.tokens)} tokens, got {keys.bos_token_id}")
    return _build(keys)


def _build(keys: _Metadata) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(keys.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in keys.merges)]
    try:
        # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=keys.pre == "llama-bpe"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"GGUF tokens and merges make no tokenizer: {error}") from error
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[keys.pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added_tokens(keys, _CONTROL))  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(_added_tokens(keys, _USER_DEFINED))  # pyright: ignore[reportUnknownMemberType]
    if _adds_bos(keys) and keys.bos_token_id is not None:
        bos = keys.tokens[keys.bos_token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, keys.bos_token_id)]
        )
    return tokenizer


def _added_tokens(keys: _Metadata, kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, token_type in zip(keys.tokens, keys.token_type, strict=False)
        if token_type == kind
    ]


def _adds_bos(keys: _Metadata) -> bool:
    """Where the file does not say, Llama 3's tokenizer adds BOS and the others do not."""
    return keys.pre == "llama-bpe" if keys.add_bos_token is None else keys.add_bos_token
