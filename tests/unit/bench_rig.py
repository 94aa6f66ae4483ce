"""What bench tests are made of: the events of a server, and exchanges that brought them."""

import json
from collections.abc import Sequence

from bench.exchange import Exchange
from bench.sse import Chunk
from bench.workload import PlannedRequest, RequestSpec

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(text: str, **fields: object) -> bytes:
    return event({"choices": [{"index": 0, "text": text}], **fields})


def usage(num_prompt: int, num_output: int, **fields: object) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output, **fields}})


def exchange(
    chunks: Sequence[Chunk], *, num_input: int = 4, num_output: int = 3, status: int = 200, failure: str = ""
) -> Exchange:
    """Sent at 10.5 of a run that began at 10."""
    request = PlannedRequest(RequestSpec(0, num_input, num_output), [1] * num_input, None)
    ended_s = chunks[-1][0] if chunks else 11.0
    return Exchange(request, 10.5, ended_s, status, list(chunks), failure)
