"""Templates render in a sandbox; what they cannot render is the client's fault and never a crash."""

import json
from pathlib import Path

import pytest

from common.errors import ModelError, RequestError
from common.model_files import ModelFiles
from gateway.chat_template import ChatTemplate, load_chat_template

HI = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def render(source: str, messages: list[dict[str, str]] = HI, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True, variables=variables)


def folder_files(folder: Path) -> ModelFiles:
    return ModelFiles(
        path=folder,
        name="m",
        format="safetensors",
        weight_files=(),
        config={},
        model_hash="",
        vocab_size=1,
        max_context=1,
        eos_token_ids=(),
    )


def test_a_template_sees_the_special_tokens_messages_and_the_clients_variables() -> None:
    source = "{{ bos_token }}{{ messages[0]['content'] }}{{ add_generation_prompt }}{{ tools is none }}{{ extra }}"
    assert render(source, extra=5) == "<s>HiTrueTrue5"


def test_a_client_cannot_replace_what_is_ours() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}{{ add_generation_prompt }}", {"bos_token": "<s>"})
    variables: dict[str, object] = {"bos_token": "x", "messages": [], "add_generation_prompt": False}
    assert template.render(HI, add_generation_prompt=True, variables=variables) == "<s>1True"


def test_published_templates_find_what_transformers_gives_them() -> None:
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ strftime_now('%%') }}") == "%"
    assert render("{% if true %}\n  x\n{% endif %}\n") == "  x\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user and assistant') }}",
        "{{ 'x' + messages }}",
        "{{ messages[3]['content'] + 'x' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages | tojson(indent='x' * 2, separators=3) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_refuses_or_cannot_do_is_400(source: str) -> None:
    with pytest.raises(RequestError) as refused:
        render(source)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_the_templates_own_refusal_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="only user and assistant"):
        render("{{ raise_exception('only user and assistant') }}")


def test_a_variable_that_cannot_be_passed_is_400() -> None:
    with pytest.raises(RequestError):
        render("x", self=1)


def test_a_template_that_does_not_compile_names_the_line() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


@pytest.mark.parametrize("content", ["It is", "  It is "])
def test_an_open_message_ends_with_its_content(content: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    assert ChatTemplate(CHATML, {}).render_open(messages, variables={}) == "<|user|>Hi<|end|><|assistant|>It is"


@pytest.mark.parametrize("content", ["", "  "])
def test_an_open_message_needs_content(content: str) -> None:
    with pytest.raises(RequestError, match="continue_final_message"):
        ChatTemplate(CHATML, {}).render_open([{"role": "assistant", "content": content}], variables={})


def test_a_template_file_beside_the_weights_comes_before_the_configs(tmp_path: Path) -> None:
    config = {"chat_template": "config", "bos_token": {"content": "<b>"}, "eos_token": "<e>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(folder_files(tmp_path))
    assert template is not None
    assert template.render(HI, add_generation_prompt=True, variables={}) == "config"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    template = load_chat_template(folder_files(tmp_path))
    assert template is not None
    assert template.render(HI, add_generation_prompt=True, variables={}) == "<b><e>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(folder_files(tmp_path))
    assert template is not None
    assert template.render(HI, add_generation_prompt=True, variables={}) == "plain"
    path.write_text(json.dumps({"chat_template": named[:1]}))
    assert load_chat_template(folder_files(tmp_path)) is None


def test_a_folder_without_a_template_has_none_and_a_broken_config_is_named(tmp_path: Path) -> None:
    assert load_chat_template(folder_files(tmp_path)) is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_chat_template(folder_files(tmp_path))
