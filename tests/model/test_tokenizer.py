"""The tokenizer that is built from the GGUF file is the one that transformers builds from it."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.model_files import find_model
from gateway.chat_template import load_chat_template
from gateway.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    "Hello, my name is",
    "  two  spaces\tand\ttabs\n\n\nlines ",
    "12345 + 67.89 = x_1",
    "def f(x):\n    return x ** 2  # naïve",
    "你好，世界 🙂😀 👨‍👩‍👧‍👦",
    "<|im_start|>user\nHi<|im_end|>\n",
    "I'm you're it's WE'LL",
    "\u0000\u200b\ufeff",
    "",
)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return load_tokenizer(find_model(""))


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    path = find_model("").path
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_text_gives_the_token_ids_of_transformers(ours: Tokenizer, theirs: PreTrainedTokenizerFast, text: str) -> None:
    token_ids = ours.encode(text, add_special_tokens=True)
    assert token_ids == theirs(text)["input_ids"]
    assert ours.decode(token_ids) == text


@pytest.mark.parametrize(("text", "count"), [("Hello, my name is", 5), ("你好，世界", 10), ("🙂", 2), ("😀", 3)])
def test_known_counts(ours: Tokenizer, text: str, count: int) -> None:
    assert len(ours.encode(text, add_special_tokens=True)) == count


def test_the_bytes_of_all_tokens_join_to_the_text_but_end_tokens_have_none(ours: Tokenizer) -> None:
    table = ours.token_bytes(skip_special_tokens=False)
    for text in TEXTS:
        shown = text.replace("<|im_end|>", "").encode()
        assert b"".join(table[i] for i in ours.encode(text, add_special_tokens=False)) == shown


def test_the_chat_template_has_the_default_system_prompt(ours: Tokenizer) -> None:
    template = load_chat_template(find_model(""))
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True, variables={})
    assert len(ours.encode(text, add_special_tokens=False)) == 31


def test_the_gateway_imports_neither_torch_nor_transformers() -> None:
    code = "import gateway.__main__, sys; print({'torch', 'transformers', 'triton'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert printed.stdout == "set()\n"
