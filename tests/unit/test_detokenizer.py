"""Tokens become text without splitting characters or showing stop strings, however they are cut into updates."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.sampling import Finish, FinishReason
from gateway.detokenizer import OutputText

BYTES = {index: bytes([index]) for index in range(256)}
LENGTH = Finish(FinishReason.LENGTH)
TEXTS = st.text(st.sampled_from("ab \n你🙂é"), max_size=12)
STOPS = st.lists(st.text(st.sampled_from("ab \n你🙂é"), min_size=1, max_size=4), max_size=3)


def run(
    data: bytes, cuts: Sequence[int], stops: Sequence[str], *, include_stop: bool = False
) -> tuple[list[str], str | None]:
    """The pieces of text for these bytes, one token each, in updates that end at the cuts."""
    output = OutputText(BYTES, stops, include_stop=include_stop, min_tokens=0)
    pieces: list[str] = []
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        piece = output.add(tuple(data[start:end]), LENGTH if end == len(data) else None)
        pieces.append(piece.text)
        if piece.stop is not None:
            return pieces, piece.stop
    return pieces, None


def naive(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop that completes first; of equals the first in the list."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8), STOPS)
def test_any_cut_gives_the_text_before_the_first_stop(text: str, cuts: list[int], stops: list[str]) -> None:
    pieces, stop = run(text.encode(), cuts, stops)
    assert ("".join(pieces), stop) == naive(text, stops)
    assert not any("\ufffd" in piece for piece in pieces)


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8), STOPS)
def test_with_the_stop_included_the_text_ends_with_it(text: str, cuts: list[int], stops: list[str]) -> None:
    pieces, stop = run(text.encode(), cuts, stops, include_stop=True)
    before, expected = naive(text, stops)
    assert ("".join(pieces), stop) == (before + (expected or ""), expected)


@given(st.binary(max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_bytes_that_are_no_text_are_replaced_as_a_whole_would_be(data: bytes, cuts: list[int]) -> None:
    assert "".join(run(data, cuts, [])[0]) == data.decode(errors="replace")
