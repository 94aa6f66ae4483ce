"""Server-sent events over one exchange."""

import msgspec

from common.errors import RequestError
from gateway.connection import Client
from gateway.http_errors import error_object

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


# Clients that split text, not bytes, into lines break at these as well; JSON may have them escaped.
_UNICODE_LINE_BREAKS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\u0085\u2028\u2029"]


def encode_data(value: object) -> bytes:
    """JSON that every client reads as one line."""
    data = msgspec.json.encode(value)
    if not data.isascii():
        for raw, escaped in _UNICODE_LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


class EventStream:
    """A response that starts with its first event: until then an error can still be a plain HTTP answer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.has_started = False

    async def write(self, events: bytes) -> None:
        await self._send(events, more_body=True)

    async def end(self, events: bytes) -> None:
        """The last events; nothing may follow."""
        await self._send(events, more_body=False)

    async def _send(self, events: bytes, more_body: bool) -> None:
        if not self.has_started:
            self.has_started = True
            await self._client.send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._client.send({"type": "http.response.body", "body": events, "more_body": more_body})


def error_event(error: RequestError) -> bytes:
    """What went wrong after the stream began."""
    return b"data: " + encode_data({"error": error_object(error)}) + b"\n\n"
