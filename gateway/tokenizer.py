"""Text <-> token ids, by the model's own tokenizer.json or GGUF metadata."""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as FastTokenizer

from common.errors import ModelError
from common.model_files import ModelFiles
from gateway.gguf_tokenizer import build_gguf_tokenizer

_SPACE_MARK = "▁"


def _byte_level_alphabet() -> dict[int, int]:
    """Ordinals of the printable characters that stand for bytes. Source: GPT-2's encoder.py, bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


_BYTE_OF_ORDINAL = _byte_level_alphabet()


class Tokenizer:
    """Encodes prompts, and knows the bytes of every token, which is what a detokenizer needs.

    eos_token_ids: tokens whose text never shows
    """

    def __init__(self, fast: FastTokenizer, eos_token_ids: Collection[int]) -> None:
        self._fast = fast
        self._special_ids = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        is_byte_level = _is_byte_level(fast)
        self._plain_bytes = TokenBytes(fast, is_byte_level, self._special_ids.union(eos_token_ids))
        self._all_bytes = TokenBytes(fast, is_byte_level, frozenset(eos_token_ids))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """add_special_tokens: also what the model wants around a prompt (for many, BOS before it)."""
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of whole token ids, special tokens included."""
        return self._fast.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, *, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Each token's own bytes of UTF-8; empty for what does not show and for ids that the tokenizer lacks."""
        return self._plain_bytes if skip_special_tokens else self._all_bytes


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, computed when first asked for: a vocabulary has 100k, a server needs few soon."""

    def __init__(self, fast: FastTokenizer, is_byte_level: bool, hidden_ids: Collection[int]) -> None:
        super().__init__()
        self._fast = fast
        self._to_bytes = _byte_level_bytes if is_byte_level else _sentencepiece_bytes
        self._hidden_ids = hidden_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden_ids else self._fast.id_to_token(token_id)
        value = self[token_id] = b"" if token is None else self._to_bytes(token)
        return value


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Raises: ModelError if the model has no tokenizer that we can build."""
    if files.format == "gguf":
        return Tokenizer(build_gguf_tokenizer(files.gguf_metadata), files.eos_token_ids)
    return Tokenizer(read_tokenizer_json(files.path / "tokenizer.json"), files.eos_token_ids)


def read_tokenizer_json(path: Path) -> FastTokenizer:
    """Raises: ModelError."""
    if not path.is_file():
        raise ModelError(f"{path} is missing: a model folder needs a tokenizer.json")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: not a tokenizer: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    return fast


class _Decoder(msgspec.Struct):
    type: str
    decoders: "list[_Decoder]" = []


class _Decoders(msgspec.Struct):
    decoder: _Decoder | None = None


def _is_byte_level(fast: FastTokenizer) -> bool:
    """Tell which of the two encodings of bytes the vocabulary uses.

    Raises: ModelError if it is neither byte-level BPE nor SentencePiece.
    """
    decoder = msgspec.json.decode(fast.to_str(), type=_Decoders).decoder
    kinds = set[str]() if decoder is None else {decoder.type, *(part.type for part in decoder.decoders)}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return False
    raise ModelError(f"tokenizer's decoder must be byte-level or SentencePiece, got {sorted(kinds) or 'none'}")


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_ORDINAL[ord(char)] for char in token)
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_SPACE_MARK, " ").encode()
