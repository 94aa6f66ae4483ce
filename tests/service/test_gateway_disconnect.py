"""Clients that leave or do not read: their generations are dropped."""

import json
import socket
from collections.abc import Iterator

import pytest

from gateway.api import Limits
from tests.service.fake_backend import Script
from tests.service.gateway_rig import Gateway, load_default_model


@pytest.fixture(scope="module")
def running() -> Iterator[Gateway]:
    gateway = Gateway(load_default_model(), limits=Limits(client_timeout_s=0.5))
    yield gateway
    gateway.close()


@pytest.fixture
def gateway(running: Gateway) -> Gateway:
    running.reset()
    return running


def open_request(gateway: Gateway, **body: object) -> socket.socket:
    content = json.dumps({"prompt": [7, 8, 9], **body}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that not reading is felt soon
    client.connect(("127.0.0.1", gateway.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stall_after", [0, 3])
def test_a_client_that_leaves_drops_its_generations(gateway: Gateway, stream: bool, stall_after: int) -> None:
    gateway.backend.script = Script(token_ids=[5022], stall_after=stall_after)
    client = open_request(gateway, stream=stream, n=2, max_tokens=50)
    if stream and stall_after:
        assert client.recv(10) == b"HTTP/1.1 2"
    client.close()
    assert [gateway.backend.cancelled.get(timeout=5) for _ in range(2)] == [[7, 8, 9]] * 2
    assert gateway.backend.num_active == 0


def test_a_client_that_does_not_read_is_given_up(gateway: Gateway) -> None:
    gateway.backend.script = Script(token_ids=[5022], stall_after=385)  # megabytes, then they wait
    with open_request(gateway, stream=True, max_tokens=390, n=60, ignore_eos=True) as client:
        assert gateway.backend.cancelled.get(timeout=15) == [7, 8, 9]
        assert client.recv(10) == b"HTTP/1.1 2"


def test_a_client_that_leaves_later_does_not_disturb_others(gateway: Gateway) -> None:
    gateway.backend.script = Script(token_ids=[5022], stall_after=1)
    leaving = open_request(gateway, stream=True, max_tokens=50)
    assert leaving.recv(10) == b"HTTP/1.1 2"
    gateway.backend.script = Script(token_ids=[5022])
    assert gateway.complete(max_tokens=5).json()["usage"]["completion_tokens"] == 5
    leaving.close()
    assert gateway.backend.cancelled.get(timeout=5) == [7, 8, 9]
