"""A signal whose handler raises, at every point of a call at which one can come."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from types import FrameType
from typing import Any


class _Told(BaseException):
    """What the handler raises."""


def interrupted_everywhere(make: Callable[[ExitStack], object]) -> Iterator[int]:
    """Let `make` end at its first instruction, then at its second, and so on until it ends by itself.

    make:  registers what removes the things that it makes
    Yields the number of instructions run, each time, when all was removed that is going to be.
    """
    for num_instructions in count():
        left = num_instructions

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left < 0:
                    raise _Told
            return trace

        before = sys.gettrace()
        with suppress(_Told), ExitStack() as undo:
            try:
                sys.settrace(trace)
                make(undo)
            finally:
                sys.settrace(before)
        yield num_instructions
        if left >= 0:
            return
