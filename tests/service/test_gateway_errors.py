"""What is refused, with which status, and that nothing was submitted for it."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.api import Limits
from tests.service.gateway_rig import MAX_CONTEXT, Gateway, load_default_model

MAX_BODY_BYTES = 20_000


@pytest.fixture(scope="module")
def running() -> Iterator[Gateway]:
    gateway = Gateway(load_default_model(), limits=Limits(max_body_bytes=MAX_BODY_BYTES))
    yield gateway
    gateway.close()


@pytest.fixture
def gateway(running: Gateway) -> Iterator[Gateway]:
    """After each refusal the next request must work."""
    running.reset()
    yield running
    running.reset()
    assert running.complete(max_tokens=1).status_code == 200


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    return error


BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": MAX_CONTEXT + 1}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [None]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"logit_bias": {"AI": 1}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": None}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), BAD_PARAMETERS, ids=lambda value: json.dumps(value))
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_parameter_is_400_and_named_before_any_work(
    gateway: Gateway, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = gateway.complete(**{"max_tokens": 5, "stream": stream, **body})
    if param == "stream_options" and stream:
        assert response.status_code == 200
        return
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert gateway.backend.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"stop": []},
        {"stop": None},
        {"logit_bias": None},
        {"best_of": 1},
        {"logprobs": None},
        {"user": "me", "metadata": {"a": 1}, "unheard_of": [1]},
        {"top_k": -1},
        {"response_format": {"type": "text"}},
        {"model": "smollm2"},
        {"seed": -1},
    ],
    ids=json.dumps,
)
def test_what_asks_for_nothing_special_is_accepted(gateway: Gateway, body: dict[str, Any]) -> None:
    assert gateway.complete(max_tokens=1, **body).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=json.dumps,
)
def test_what_is_known_but_not_built_is_501_and_named(gateway: Gateway, body: dict[str, Any], param: str) -> None:
    response = gateway.complete(max_tokens=1, **body)
    assert response.status_code == 501
    assert error_of(response)["param"] == param


def test_tools_are_not_built(gateway: Gateway) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert error_of(gateway.chat(tools=[tool]))["param"] == "tools"
    assert gateway.chat(tools=[]).status_code == 400


def test_logit_bias_is_clamped(gateway: Gateway) -> None:
    gateway.complete(max_tokens=1, logit_bias={"5": 500, "6": -500})
    assert gateway.backend.submitted[0][1].logit_bias == ((5, 100.0), (6, -100.0))


def test_a_prompt_that_does_not_fit_is_400_with_both_numbers(gateway: Gateway) -> None:
    response = gateway.complete(prompt=[5] * MAX_CONTEXT, max_tokens=1)
    error = error_of(response)
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count(str(MAX_CONTEXT)) == 2
    assert f"your prompt resulted in {MAX_CONTEXT} tokens" in error["message"]


def test_messages_that_do_not_fit_are_said_to_in_the_plural(gateway: Gateway) -> None:
    response = gateway.chat(messages=[{"role": "user", "content": "word " * MAX_CONTEXT}])
    assert "your messages resulted in" in error_of(response)["message"]
    assert "the length of the messages." in error_of(response)["message"]


def test_max_tokens_is_clamped_to_what_the_context_leaves(gateway: Gateway) -> None:
    gateway.complete(prompt=[5] * (MAX_CONTEXT - 3), max_tokens=50)
    assert gateway.backend.submitted[0][1].max_tokens == 3


def test_a_chat_without_max_tokens_may_fill_the_context(gateway: Gateway) -> None:
    gateway.chat(logit_bias={"2": 100})
    assert gateway.backend.submitted[0][1].max_tokens == MAX_CONTEXT - 31


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body must be valid JSON: "),
        (b"{", "the body must be valid JSON: "),
        (b"{bad", "the body must be valid JSON: "),
        (b"[]", "the body must be a JSON object, got array"),
        (b'"x"', "the body must be a JSON object, got str"),
        (b"1", "the body must be a JSON object, got int"),
        (b"null", "the body must be a JSON object, got null"),
        (b'{"prompt": "x", "temperature": NaN}', "the body must be valid JSON: "),
        (b'{"prompt": "x", "temperature": Infinity}', "the body must be valid JSON: "),
        (b'{"prompt": "\\ud800"}', "the body must be valid JSON: "),
        (b'{"prompt": "x", "stop": "\\ud83d"}', "the body must be valid JSON: "),
        (b'{"prompt": "\xff"}', "the body must be valid JSON: "),
        (b'{"prompt": ' + b"[" * 9_000 + b"]" * 9_000 + b"}", "the body must be valid JSON: "),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_body_that_is_no_json_object_is_400(gateway: Gateway, content: bytes, message: str) -> None:
    response = gateway.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert error_of(response)["message"].startswith(message)
    assert gateway.backend.submitted == []


def test_of_equal_keys_the_last_one_counts(gateway: Gateway) -> None:
    content = b'{"prompt": "x", "max_tokens": 3, "max_tokens": 1}'
    response = gateway.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("application/json; charset=utf-8", 200), (None, 200), ("text/plain", 400), ("multipart/form-data", 400)],
)
def test_the_content_type_is_json_or_missing(gateway: Gateway, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = gateway.client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_413_however_it_is_framed(gateway: Gateway, is_chunked: bool) -> None:
    content = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()
    body = iter([content[:5000], content[5000:]]) if is_chunked else content
    response = gateway.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert error_of(response)["code"] == "content_too_large"


def test_an_unknown_model_is_404(gateway: Gateway) -> None:
    response = gateway.complete(model="other")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert gateway.client.get("/v1/models/other").status_code == 404


def test_an_unknown_path_is_404_and_a_wrong_method_405(gateway: Gateway) -> None:
    wrong = {"/nothing": 404, "/v1/completions": 405, "/v1/completions/": 404, "/health/": 404}
    for path, status in wrong.items():
        response = gateway.client.get(path)
        assert response.status_code == status, path
        error_of(response)
    response = gateway.client.post("/v1/completions/", json={"prompt": "Hello"})
    assert response.status_code == 404
    error_of(response)


def test_too_many_requests_are_429_and_say_when_to_come_back(gateway: Gateway) -> None:
    response = gateway.complete(prompt=["x"] * (gateway.backend.max_concurrent + 1))
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert error_of(response)["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "x"}],
        *([{"role": role, "content": "x"}] for role in ("developer", "tool", "function", "assistant")),
    ],
    ids=json.dumps,
)
def test_odd_messages_are_served(gateway: Gateway, messages: list[dict[str, Any]]) -> None:
    assert gateway.chat(messages=messages, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        [{"content": "x"}],
        ["x"],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": 5}],
    ],
    ids=json.dumps,
)
def test_messages_that_cannot_be_are_400(gateway: Gateway, messages: Any) -> None:
    response = gateway.chat(messages=messages)
    assert response.status_code == 400, response.text
    assert gateway.backend.submitted == []


@pytest.mark.parametrize("role", ["robot", "", "User", "x" * 1000])
def test_a_role_that_the_api_does_not_have_is_400_and_named(gateway: Gateway, role: str) -> None:
    response = gateway.chat(messages=[{"role": "user", "content": "x"}, {"role": role, "content": "x"}])
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages[1].role"
    assert error["message"].startswith("messages[1].role must be one of system, developer, user, assistant, tool, fun")
    assert len(error["message"]) < 200


def test_an_empty_system_message_is_not_replaced_by_the_default_one(gateway: Gateway) -> None:
    gateway.chat(messages=[{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}], max_tokens=1)
    gateway.chat(max_tokens=1)
    (empty, _), (default, _) = gateway.backend.submitted
    assert len(empty) < len(default)


def test_without_a_live_worker_of_every_pool_it_is_neither_healthy_nor_ready(gateway: Gateway) -> None:
    gateway.backend.missing = ["decode"]
    assert gateway.client.get("/health").status_code == 503
    response = gateway.client.get("/ready")
    assert response.status_code == 503
    assert "decode" in response.text
    gateway.backend.missing = []
    assert gateway.client.get("/health").status_code == 200
    assert gateway.client.head("/health").status_code == 200
    assert gateway.client.get("/ready").status_code == 200


def test_models_version_and_metrics_are_there(gateway: Gateway) -> None:
    card = gateway.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("smollm2", MAX_CONTEXT)
    assert gateway.client.get("/version").json() == {"version": "1.2.3"}
    text = gateway.client.get("/metrics").text
    assert 'baton_worker_steps{role="decode",worker="d0"} 7.0' in text
    assert "vllm:time_to_first_token_seconds_count" in text


def test_a_request_id_is_given_back_or_made(gateway: Gateway) -> None:
    assert gateway.client.get("/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert gateway.client.get("/health").headers["x-request-id"]


def test_keys_guard_the_api_but_not_health_and_preflights() -> None:
    gateway = Gateway(load_default_model(), api_keys=("k1", "k2"))
    try:
        refused = gateway.complete(max_tokens=1)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert error_of(refused)["type"] == "authentication_error"
        for headers in ({"authorization": "Bearer k2"}, {"x-api-key": "k1"}):
            body = {"prompt": "x", "max_tokens": 1}
            assert gateway.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert gateway.client.get("/health").status_code == 200
        preflight = gateway.client.options(
            "/v1/completions",
            headers={"origin": "http://a.example", "access-control-request-method": "POST"},
        )
        assert preflight.status_code in (200, 204)
        assert preflight.headers["access-control-allow-origin"] in ("*", "http://a.example")
    finally:
        gateway.close()


def test_a_client_that_stalls_in_its_body_does_not_hold_the_server(gateway: Gateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as stalled:
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert gateway.complete(max_tokens=1).status_code == 200
