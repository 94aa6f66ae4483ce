"""Valid messages of every type, by the very annotations that `wire.decode` checks."""

from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgpack
from hypothesis import strategies as st

from common.ids import PeerId
from common.kv_layout import KVLayout
from common.kv_source import KVShard, KVSource
from common.wire import Control, Data, Envelope, Message, Status, WorkerStatus, encode
from common.wire_types import Address, Count

MESSAGE_TYPES: list[type[Message]] = [*get_args(Status), *get_args(Control), *get_args(Data)]
JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Valid values of a field's type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation == Address:
        return st.text(max_size=8).map("tcp://{}".format)
    if origin is Annotated:
        base, meta = arguments
        if base is bytes:
            return st.binary(max_size=8)
        low, high = meta.ge, meta.le
        return st.floats(low, 1e9) if base is float else st.integers(low, 2**63 - 1 if high is None else high)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if annotation is WorkerStatus:
        return worker_statuses()
    if annotation is KVSource:
        return kv_sources()
    if is_dataclass(annotation) and isinstance(annotation, type):
        hints = get_type_hints(annotation, include_extras=True)
        return st.builds(annotation, **{field.name: values_of(hints[field.name]) for field in fields(annotation)})
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=8),
        int: st.integers(0, 2**63 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        NoneType: st.none(),
    }
    return plain[getattr(annotation, "__supertype__", annotation)]


@st.composite
def worker_statuses(draw: st.DrawFn) -> WorkerStatus:
    """Numbers of blocks and tokens that fit together."""
    layout = replace(draw(values_of(KVLayout)), block_size=draw(st.integers(1, 64)))
    num_blocks = draw(st.integers(2, 2**40))
    hints = get_type_hints(WorkerStatus, include_extras=True)
    others = {name: draw(values_of(hint)) for name, hint in hints.items() if name != "layout"}
    fitting = {
        "num_blocks": num_blocks,
        "num_free_blocks": draw(st.integers(0, num_blocks)),
        "max_context": draw(st.integers(2, num_blocks * layout.block_size)),
    }
    return WorkerStatus(layout=layout, **{**others, **fitting})


@st.composite
def kv_sources(draw: st.DrawFn) -> KVSource:
    """Shards that have every head, some of them several times."""
    starts = sorted(draw(st.sets(st.integers(1, 7), max_size=3)))
    ranges = list(pairwise([0, *starts, 8]))
    ranges += draw(st.lists(st.sampled_from(ranges), max_size=2))
    hints = get_type_hints(KVShard, include_extras=True)
    others = [{name: draw(values_of(hint)) for name, hint in hints.items()} for _ in ranges]
    heads = [{"first_head": first, "num_heads": end - first} for first, end in ranges]
    shards = tuple(KVShard(**{**other, **head}) for other, head in zip(others, heads, strict=True))
    layout = replace(draw(values_of(KVLayout)), num_kv_heads=8)
    return KVSource(peer=draw(values_of(PeerId)), layout=layout, num_blocks=draw(values_of(Count)), shards=shards)


def envelopes_of(message_type: type[Message]) -> st.SearchStrategy[Envelope]:
    return st.builds(
        Envelope,
        sender=st.text(max_size=8).map(PeerId),
        to=st.text(max_size=8).map(PeerId),
        seq=st.integers(0, 2**63 - 1),
        message=values_of(message_type),
    )


envelopes = st.one_of(*map(envelopes_of, MESSAGE_TYPES))


def pack(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None
    return packed


def header_of(envelope: Envelope) -> list[Any]:
    return msgpack.unpackb(encode(envelope)[0])
