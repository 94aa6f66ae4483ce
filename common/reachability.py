"""Why nobody is heard of at an address: what a connection would say, which ZeroMQ keeps to itself."""

import socket


def why_unreachable(address: str, timeout_s: float) -> str:
    """What keeps us from connecting to a `tcp://host:port` or `ipc://path`; empty when nothing does.

    Blocks for timeout_s a host's address, and for as long as a name takes to be resolved.
    """
    scheme, _, place = address.partition("://")
    try:
        if scheme == "ipc":
            _connect_ipc(place, timeout_s)
        else:
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _connect_ipc(path: str, timeout_s: float) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(timeout_s)
        probe.connect(path)
