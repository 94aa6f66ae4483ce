"""Server-sent events out of what a socket gave, with the time at which each was complete."""

from collections.abc import Iterable, Iterator

Chunk = tuple[float, bytes]
"""When it arrived (time.perf_counter, seconds), and what."""


def split_events(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The data of each event, at the time of the chunk in which it ended.

    A chunk may hold several events, and an event may be cut anywhere. An event ends with an empty line; one that the
    end of the stream cuts off is given as well: some servers leave out the last empty line. Lines end with LF or CRLF.
    Comments and fields other than `data` are dropped. Source: HTML standard, section 9.2.6.
    """
    rest = b""
    data: list[bytes] = []
    time_s = 0.0
    for time_s, received in chunks:
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield time_s, b"\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].removeprefix(b" ").removesuffix(b"\r"))
    if data:
        yield time_s, b"\n".join(data)
