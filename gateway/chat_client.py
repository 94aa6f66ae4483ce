"""`baton chat`: a conversation in the terminal, over the same HTTP that any client uses.

A line is a message, from the keyboard or from a pipe. `/new` forgets the conversation; `/exit`, `/quit` and the end of
input end it; Ctrl-C stops an answer.
"""

import contextlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TextIO

import httpx
import msgspec

from common.config import ChatOptions
from common.errors import BatonError

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_LEAVE = ("/exit", "/quit")


class ChatError(BatonError):
    """The server cannot be reached, or it answered with an error."""


class _Error(msgspec.Struct):
    message: str = "no message"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    """One server-sent event, or a whole error answer."""

    choices: list[_Choice] = []
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Chat:
    """A conversation with one model. Mutable state: the messages so far."""

    def __init__(self, client: httpx.Client, options: ChatOptions, model: str) -> None:
        self._client = client
        self._options = options
        self._model = model
        self._messages: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        """Begin a new conversation."""
        system = self._options.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str, out: TextIO) -> None:
        """Write the answer as it comes. Ctrl-C stops it; what there is of it then counts as the answer.

        Raises: ChatError; the conversation is then what it was before.
        """
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        stream = self._stream([*self._messages, question])
        try:
            with contextlib.suppress(KeyboardInterrupt), contextlib.closing(stream):
                for piece in stream:
                    pieces.append(piece)
                    out.write(_printable(piece))
                    out.flush()
        finally:
            if pieces:
                out.write("\n")
        self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, messages: list[dict[str, str]]) -> Generator[str]:
        body: dict[str, object] = {"model": self._model, "messages": messages, "stream": True}
        if self._options.max_tokens:
            body["max_tokens"] = self._options.max_tokens
        if self._options.temperature >= 0:
            body["temperature"] = self._options.temperature
        with _translated(self._options.url), self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.is_error:
                raise ChatError(_describe(answer.status_code, answer.read()))
            try:
                yield from _read_events(answer.iter_lines())
            except httpx.TransportError as error:
                raise ChatError(f"the answer ended early: {self._options.url} is gone ({error})") from error


def _read_events(lines: Iterator[str]) -> Iterator[str]:
    """The text in a stream of server-sent events. Raises: ChatError for an error event or a stream without its end."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if not line.startswith("data:"):
            continue
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            raise ChatError(chunk.error.message)
        for choice in chunk.choices:
            if choice.delta.content:
                yield choice.delta.content
    raise ChatError("the answer ended early: the server closed the connection")


@contextlib.contextmanager
def _translated(url: str) -> Generator[None]:
    """What a library says about a broken conversation becomes a ChatError."""
    try:
        yield
    except httpx.ConnectError as error:
        raise ChatError(f"cannot reach {url}: {error}; is it running, and is --url right?") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChatError(f"{url}: {type(error).__name__}: {error}") from error
    except msgspec.DecodeError as error:
        raise ChatError(f"{url} does not answer like a gateway: {error}") from error


def _describe(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    text = body[:200].decode(errors="replace") if error is None else error.message
    return f"HTTP {status}: {text}"


def _printable(text: str) -> str:
    """Without control characters, which could change the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def _first_model(client: httpx.Client, url: str) -> str:
    with _translated(url):
        answer = client.get("/v1/models")
        if answer.is_error:
            raise ChatError(_describe(answer.status_code, answer.content))
        models = msgspec.json.decode(answer.content, type=_Models).data
    if not models:
        raise ChatError(f"{url} serves no model")
    return models[0].id


def _read_terminal() -> Iterator[str]:
    """Lines typed by a person, with editing where this Python has it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return


def run(options: ChatOptions) -> int:
    """Talk until the input ends. Returns 1 if a message from a pipe was not answered, else 0. Raises: ChatError."""
    options = replace(options, url=options.url.rstrip("/").removesuffix("/v1"))  # as OpenAI's clients are given it
    is_terminal = sys.stdin.isatty()
    headers = {"Authorization": f"Bearer {options.api_key[0]}"} if options.api_key else {}
    exit_code = 0
    with httpx.Client(base_url=options.url, headers=headers, timeout=_TIMEOUT) as client:
        chat = Chat(client, options, options.model or _first_model(client, options.url))
        for line in _read_terminal() if is_terminal else sys.stdin:
            text = line.strip()
            if text in _LEAVE:
                break
            if text == "/new":
                chat.forget()
            elif text:
                try:
                    chat.ask(text, sys.stdout)
                except ChatError as error:
                    print(f"error: {error}", file=sys.stderr)  # noqa: T201
                    exit_code = 0 if is_terminal else 1
    return exit_code
