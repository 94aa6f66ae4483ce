"""Messages -> prompt text, by the model's own jinja template, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ModelError, RequestError
from common.model_files import ModelFiles
from gateway.http_errors import invalid

Message = Mapping[str, object]
_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template can raise over messages that it was not written for."""


class ChatTemplate:
    """A compiled template. special_tokens: bos_token, eos_token, … as its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises: ModelError if the template does not compile."""
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """variables: the client's own, which cannot replace ours.

        Raises: RequestError 400 if the template refuses the messages.
        """
        try:
            return self._template.render(
                **{
                    **variables,
                    "tools": None,
                    "documents": None,
                    **self._special_tokens,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _FAULTS as error:
            raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from error

    def render_open(self, messages: Sequence[Message], *, variables: Mapping[str, object]) -> str:
        """Render up to the end of the last message's content, for the model to continue it.

        Raises: RequestError 400.
        """
        text = self.render(messages, add_generation_prompt=False, variables=variables)
        content = str(messages[-1]["content"])
        for final in (content, content.strip()):
            start = text.rfind(final)
            if final and start >= 0:
                return text[: start + len(final)]
        raise _cannot_continue()


def load_chat_template(files: ModelFiles) -> ChatTemplate | None:
    """Find the template in GGUF metadata, chat_template.jinja or tokenizer_config.json; None if there is none.

    Raises: ModelError.
    """
    if files.format == "gguf":
        return _from_gguf(files.gguf_metadata)
    return _from_folder(files.path)


def _cannot_continue() -> RequestError:
    return invalid("continue_final_message needs a last message whose content ends the prompt", "messages")


class _SpecialToken(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """What we read of tokenizer_config.json."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _SpecialToken | None = None
    eos_token: str | _SpecialToken | None = None
    unk_token: str | _SpecialToken | None = None
    pad_token: str | _SpecialToken | None = None

    def special_tokens(self) -> dict[str, str]:
        found = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        return {
            name: token if isinstance(token, str) else token.content
            for name, token in found.items()
            if token is not None
        }

    def template(self) -> str | None:
        if not isinstance(self.chat_template, list):
            return self.chat_template
        return next((entry.template for entry in self.chat_template if entry.name == "default"), None)


def _from_folder(folder: Path) -> ChatTemplate | None:
    config = _TokenizerConfig()
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            config = msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig)
        except msgspec.DecodeError as error:
            raise ModelError(f"{path}: not usable: {error}") from error
    jinja = folder / "chat_template.jinja"
    source = jinja.read_text(encoding="utf-8") if jinja.is_file() else config.template()
    return None if source is None else ChatTemplate(source, config.special_tokens())


def _from_gguf(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    known: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    tokens = dict(enumerate(known))
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return ChatTemplate(source, {f"{name}_token": tokens[at] for name, at in ids.items() if at in tokens})


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, so that published templates work. Source: its utils/chat_template_utils.py."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType] (jinja's dicts are untyped)
    environment.globals["raise_exception"] = _raise_exception  # pyright: ignore[reportUnknownMemberType]
    environment.globals["strftime_now"] = _strftime_now  # pyright: ignore[reportUnknownMemberType]
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
