"""`baton chat` against a server that answers what the test says."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from common.config import ChatOptions
from gateway import chat_client
from gateway.chat_client import Chat, ChatError


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"


FIRST = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'role': 'assistant', 'content': ''}}]})}\n\n"
DONE = "data: [DONE]\n\n"
PARIS = FIRST + event("Par") + event("is") + DONE


class Server(HTTPServer):
    """Answers each POST with the next of `answers` (status, body) and keeps what was asked.

    num_missing: bytes of an answer that are announced and never come
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, str]] = []
        self.asked: list[dict[str, object]] = []
        self.authorization: list[str | None] = []
        self.num_missing = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._answer(404, "{}")
            return
        self._answer(200, json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.authorization.append(self.headers["Authorization"])
        self._answer(*self.server.answers.pop(0), num_missing=self.server.num_missing)

    def _answer(self, status: int, body: str, num_missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode()) + num_missing))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Silence: what was asked is kept in `asked`."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def chat(server: Server) -> Iterator[Chat]:
    with httpx.Client(base_url=server.url) as client:
        yield Chat(client, ChatOptions(url=server.url, system="Be brief."), "tiny")


def run(monkeypatch: pytest.MonkeyPatch, options: ChatOptions, typed: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return chat_client.run(options)


def test_an_answer_is_written_as_it_comes_and_remembered(server: Server, chat: Chat) -> None:
    server.answers = [(200, PARIS), (200, FIRST + event("Yes") + DONE)]
    out = io.StringIO()
    chat.ask("Capital of France?", out)
    chat.ask("Sure?", out)
    assert out.getvalue() == "Paris\nYes\n"
    assert server.asked[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "Sure?"},
    ]


def test_control_characters_of_an_answer_do_not_reach_the_terminal(server: Server, chat: Chat) -> None:
    server.answers = [(200, event("a\x1b[2Jb\tc\nd") + DONE)]
    out = io.StringIO()
    chat.ask("?", out)
    assert out.getvalue() == "a[2Jb\tc\nd\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, json.dumps({"error": {"message": "The model `x` does not exist."}})), "HTTP 404: The model `x`"),
        ((502, "<html>bad gateway</html>"), "HTTP 502: <html>bad gateway</html>"),
        ((200, FIRST + event("Pa")), "the answer ended early"),
        ((200, event("Pa") + f"data: {json.dumps({'error': {'message': 'no worker'}})}\n\n" + DONE), "no worker"),
        ((200, "data: {broken\n\n"), "does not answer like a gateway"),
    ],
)
def test_what_goes_wrong_is_said_and_the_question_forgotten(
    server: Server, chat: Chat, answer: tuple[int, str], message: str
) -> None:
    server.answers = [answer, (200, PARIS)]
    out = io.StringIO()
    with pytest.raises(ChatError, match=message):
        chat.ask("first", out)
    assert out.getvalue() in ("", "Pa\n")
    chat.ask("second", io.StringIO())
    messages = server.asked[1]["messages"]
    assert isinstance(messages, list)
    assert [message["content"] for message in messages] == ["Be brief.", "second"]


def test_each_line_of_a_pipe_is_a_message_to_the_first_model_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [(200, PARIS), (200, PARIS)]
    options = ChatOptions(url=server.url, api_key=("k1", "k2"), max_tokens=5, temperature=0.0)
    assert run(monkeypatch, options, "one\n\n/new\ntwo\n") == 0
    assert capsys.readouterr().out == "Paris\nParis\n"
    assert server.authorization == ["Bearer k1", "Bearer k1"]
    assert server.asked[1] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "two"}],
        "stream": True,
        "max_tokens": 5,
        "temperature": 0.0,
    }


def test_a_pipe_ends_with_1_when_a_message_was_not_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [(500, "{}"), (200, PARIS)]
    assert run(monkeypatch, ChatOptions(url=server.url), "one\ntwo\n") == 1
    shown = capsys.readouterr()
    assert "error: HTTP 500" in shown.err
    assert shown.out == "Paris\n"


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_url_may_be_the_one_that_openai_clients_are_given(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    server.answers = [(200, PARIS)]
    assert run(monkeypatch, ChatOptions(url=server.url + suffix), "one\n") == 0
    assert capsys.readouterr().out == "Paris\n"


def test_a_gateway_that_dies_in_the_middle_of_an_answer_is_said_to_be_gone(server: Server, chat: Chat) -> None:
    server.answers, server.num_missing = [(200, FIRST + event("Pa"))], 100
    out = io.StringIO()
    with pytest.raises(ChatError, match=f"the answer ended early: {server.url} is gone"):
        chat.ask("Capital?", out)
    assert out.getvalue() == "Pa\n"


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_a_conversation_can_be_left(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], leave: str
) -> None:
    server.answers = [(200, PARIS)]
    assert run(monkeypatch, ChatOptions(url=server.url), f"one\n{leave}\ntwo\n") == 0
    assert capsys.readouterr().out == "Paris\n"
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.server_close()
    with pytest.raises(ChatError, match=f"cannot reach {server.url}"):
        run(monkeypatch, ChatOptions(url=server.url), "hello\n")


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is_of_it(server: Server, chat: Chat) -> None:
    class Interrupting(io.StringIO):
        def flush(self) -> None:
            if self.getvalue() == "Par":
                raise KeyboardInterrupt

    server.answers = [(200, PARIS), (200, PARIS)]
    chat.ask("Capital?", Interrupting())
    chat.ask("Go on", io.StringIO())
    messages = server.asked[1]["messages"]
    assert isinstance(messages, list)
    assert messages[2] == {"role": "assistant", "content": "Par"}
