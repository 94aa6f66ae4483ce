"""Why nobody answers at an address, in words for an operator."""

import socket
from pathlib import Path

import pytest

from common.reachability import why_unreachable


def test_a_port_that_nobody_listens_on_refuses() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        assert why_unreachable(address, 5) == "Connection refused"
        bound.listen()
        assert why_unreachable(address, 5) == ""


def test_a_name_that_does_not_resolve_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str, *_: object) -> None:
        assert host == "gateway-host"
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert why_unreachable("tcp://gateway-host:5550", 5) == "Name or service not known"


def test_a_host_that_is_silent_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", fail)
    assert why_unreachable("tcp://gateway-host:5550", 5) == "timed out"


def test_a_socket_file_that_is_not_there_is_missed(tmp_path: Path) -> None:
    assert why_unreachable(f"ipc://{tmp_path}/inbox", 5) == "No such file or directory"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "inbox"))
        listener.listen()
        assert why_unreachable(f"ipc://{tmp_path}/inbox", 5) == ""
