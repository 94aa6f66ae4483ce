"""Every token's own bytes, and what is refused when a tokenizer is built."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from common.errors import ModelError
from gateway.gguf_tokenizer import build_gguf_tokenizer
from gateway.tokenizer import Tokenizer, read_tokenizer_json
from tests.unit.byte_model import BOS_ID, EOS_ID, VOCAB_SIZE, make_byte_tokenizer

BYTE_TOKENIZER = Tokenizer(make_byte_tokenizer(), (EOS_ID,))


def sentencepiece_tokenizer() -> FastTokenizer:
    """As Llama 2's: spaces are ▁, and bytes that no token has are tokens such as <0xF0>."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁": 2, "!": 3, "<0xF0>": 4, "<0x9F>": 5}
    tokenizer = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def gguf(**changes: Any) -> dict[str, Any]:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "Ġ", "<s>", "<tool>"],
        "merges": ["a b"],
        "token_type": [1, 1, 1, 1, 3, 4],
        "bos_token_id": 4,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


@given(st.text(max_size=40))
def test_the_bytes_of_all_tokens_join_to_the_text(text: str) -> None:
    token_ids = BYTE_TOKENIZER.encode(text, add_special_tokens=False)
    shown = b"".join(BYTE_TOKENIZER.token_bytes(skip_special_tokens=False)[token_id] for token_id in token_ids)
    assert shown == text.encode()


def test_special_tokens_show_only_when_asked_for_and_end_tokens_never() -> None:
    plain = BYTE_TOKENIZER.token_bytes(skip_special_tokens=True)
    everything = BYTE_TOKENIZER.token_bytes(skip_special_tokens=False)
    assert (plain[BOS_ID], everything[BOS_ID]) == (b"", b"<s>")
    assert (plain[EOS_ID], everything[EOS_ID]) == (b"", b"")


def test_ids_that_the_tokenizer_lacks_have_no_bytes() -> None:
    assert BYTE_TOKENIZER.token_bytes(skip_special_tokens=False)[VOCAB_SIZE - 1] == b""


def test_bos_comes_before_a_prompt_only_when_asked_for() -> None:
    assert BYTE_TOKENIZER.encode("a", add_special_tokens=True)[0] == BOS_ID
    assert len(BYTE_TOKENIZER.encode("a", add_special_tokens=False)) == 1


def test_added_tokens_are_plain_text_and_not_of_the_byte_alphabet() -> None:
    fast = make_byte_tokenizer()
    fast.add_tokens([AddedToken("你 好", normalized=False)])
    tokenizer = Tokenizer(fast, ())
    (token_id,) = tokenizer.encode("你 好", add_special_tokens=False)
    assert tokenizer.token_bytes(skip_special_tokens=True)[token_id].decode() == "你 好"


def test_sentencepiece_tokens_keep_their_space_and_byte_tokens_are_their_byte() -> None:
    table = Tokenizer(sentencepiece_tokenizer(), ()).token_bytes(skip_special_tokens=True)
    assert [table[token_id] for token_id in range(1, 6)] == [b" Hello", b" ", b"!", b"\xf0", b"\x9f"]


def test_another_kind_of_vocabulary_is_refused() -> None:
    fast = FastTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(fast, ())


def test_a_gguf_vocabulary_merges_and_splits_its_added_tokens_off() -> None:
    fast = build_gguf_tokenizer(gguf())
    assert fast.encode("ab <s>a<tool>b").ids == [2, 3, 4, 0, 5, 1]
    tokenizer = Tokenizer(fast, ())
    assert tokenizer.token_bytes(skip_special_tokens=True)[4] == b""
    assert tokenizer.token_bytes(skip_special_tokens=True)[5] == b"<tool>"


@pytest.mark.parametrize(
    ("changes", "adds_bos"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "smollm"}, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_bos_is_added_where_the_file_says_so_or_its_kind_does(changes: dict[str, Any], adds_bos: bool) -> None:
    fast = build_gguf_tokenizer(gguf(**changes))
    assert fast.encode("a").ids == ([4, 0] if adds_bos else [0])
    assert fast.encode("a", add_special_tokens=False).ids == [0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, "llama"),
        ({"pre": "qwen9"}, "qwen9"),
        ({"tokens": None}, "tokens"),
        ({"merges": [1]}, "merges"),
        ({"bos_token_id": 99, "add_bos_token": True}, "bos_token_id"),
        ({"merges": ["a c"]}, "merges"),
    ],
)
def test_gguf_metadata_that_make_no_tokenizer_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        build_gguf_tokenizer(gguf(**changes))


def test_a_tokenizer_json_is_read_without_its_truncation_and_padding(tmp_path: Path) -> None:
    fast = make_byte_tokenizer()
    fast.enable_truncation(max_length=3)
    fast.enable_padding(length=50)
    path = tmp_path / "tokenizer.json"
    fast.save(str(path))
    assert len(read_tokenizer_json(path).encode("twelve chars", add_special_tokens=False).ids) == 12


def test_a_tokenizer_json_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_tokenizer_json(path)
    path.write_text(json.dumps({"model": "none"}))
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        read_tokenizer_json(path)
