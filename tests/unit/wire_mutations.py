"""What a hostile or broken peer makes of a valid message: its frames, changed in a few places."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

from tests.unit.wire_messages import pack

CLAIMS = tuple(
    prefix + b"\xff" * num_bytes
    for prefix, num_bytes in ((b"\xdd", 4), (b"\xdf", 4), (b"\xdb", 4), (b"\xc6", 4), (b"\xc9", 5), (b"\xdc", 2))
)
"""MessagePack of arrays, maps, texts, bytes and extensions that are said to be as long as can be."""
DEPTHS = (b"\x91" * 2000, b"\x81\xa1x" * 2000, b"\x92\x90" * 2000)
WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 2**63, 2**64 - 1, 0.5, math.nan, math.inf, "", "x" * 300, b"", b"\xff", [], [[]], {}, {"x": 1}),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(0, 0), [0] * 40, {str(key): key for key in range(40)}),
)

Frames = list[bytes]


def flip_a_bit(frames: Frames, random: Random) -> Frames:
    return _change_one(frames, random, lambda frame, at: frame[:at] + bytes([frame[at] ^ 1 << random.randrange(8)]))


def cut(frames: Frames, random: Random) -> Frames:
    return _change_one(frames, random, lambda frame, at: frame[:at], keeps_tail=False)


def claim_a_length(frames: Frames, random: Random) -> Frames:
    return _change_one(frames, random, lambda frame, at: frame[:at] + random.choice(CLAIMS))


def nest_deeply(frames: Frames, random: Random) -> Frames:
    return _change_one(frames, random, lambda frame, at: frame[:at] + random.choice(DEPTHS) + frame[at : at + 1])


def write_noise(frames: Frames, random: Random) -> Frames:
    return _change_one(frames, random, lambda frame, at: frame[:at] + random.randbytes(random.randrange(1, 5)))


def _change_one(
    frames: Frames, random: Random, change: Callable[[bytes, int], bytes], *, keeps_tail: bool = True
) -> Frames:
    """change: what is there, up to one byte behind a place, in place of that"""
    index = _pick_frame(frames, random)
    if index is None:
        return frames
    frame = frames[index]
    at = random.randrange(len(frame))
    changed = change(frame, at) + (frame[at + 1 :] if keeps_tail else b"")
    return [*frames[:index], changed, *frames[index + 1 :]]


def _pick_frame(frames: Frames, random: Random) -> int | None:
    """Mostly the header."""
    with_bytes = [index for index, frame in enumerate(frames) if frame]
    if not with_bytes:
        return None
    return with_bytes[0] if random.random() < 0.7 else random.choice(with_bytes)


def remove_a_frame(frames: Frames, random: Random) -> Frames:
    if len(frames) < 2:
        return frames
    index = random.randrange(len(frames))
    return frames[:index] + frames[index + 1 :]


def double_a_frame(frames: Frames, random: Random) -> Frames:
    index = random.randrange(len(frames))
    return [*frames[: index + 1], *frames[index:]]


def exchange_frames(frames: Frames, random: Random) -> Frames:
    return random.sample(frames, len(frames))


def use_a_wrong_type(frames: Frames, random: Random) -> Frames:
    """Somewhere in the header, at any depth; if it is one."""
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
    except (ValueError, TypeError):
        return frames
    return [pack(_replace_somewhere(header, random)), *frames[1:]]


def _replace_somewhere(value: Any, random: Random) -> Any:
    if not isinstance(value, list | dict) or not value or random.random() < 0.1:
        return random.choice(WRONG_VALUES)
    place = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    changed[place] = _replace_somewhere(value[place], random)
    return changed


MUTATIONS: tuple[Callable[[Frames, Random], Frames], ...] = (
    *(flip_a_bit, cut, claim_a_length, nest_deeply, write_noise),
    *(remove_a_frame, double_a_frame, exchange_frames, use_a_wrong_type, use_a_wrong_type),
)


def mutate(frames: Frames, random: Random) -> Frames:
    """In up to three ways; at least one frame is left."""
    for _ in range(random.randint(0, 3)):
        frames = random.choice(MUTATIONS)(frames, random)
    return frames
