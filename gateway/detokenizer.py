"""Output tokens -> text: characters are never split, stop strings never shown.

Streams and whole answers go through the same `OutputText`, so that their texts cannot differ.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.sampling import Finish, FinishReason

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Piece(NamedTuple):
    """What new tokens brought.

    text:       may be empty: half a character, or held back as the possible begin of a stop string
    num_tokens: how many of the new tokens count; those after a stop string do not
    stop:       the stop string that ended the text, if one did
    """

    text: str
    num_tokens: int
    stop: str | None


class StopScanner:
    """Holds back what may be the begin of a stop string and finds the one that completes first.

    With include, text is shown up to the stop's end, and nothing needs to be held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._max_overlap = max(map(len, stops)) - 1
        self._tail = ""
        """The last characters seen, at most _max_overlap; with include, they were shown already."""

    def add(self, text: str, *, is_armed: bool) -> tuple[str, str | None]:
        """Returns the text to show, and the stop string if one is complete now. Not armed: none is looked for."""
        window = self._tail + text
        num_shown = len(self._tail) if self._include else 0
        if is_armed and (found := self._find(window)):
            start, stop = found
            return window[num_shown : start + len(stop) if self._include else start], stop
        tail_start = max(0, len(window) - self._max_overlap)
        self._tail = window[tail_start:]
        return window[num_shown : None if self._include else tail_start], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        return "" if self._include else self._tail

    def _find(self, window: str) -> tuple[int, str] | None:
        """(start, stop) of the stop whose last character comes first; of equals the first in the list."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            # One that ends inside the tail was complete before, while it did not count.
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = start, stop
        return best


class OutputText:
    """One sequence's text so far. Constant time a token, whatever its length.

    token_bytes:   from Tokenizer.token_bytes
    stops:         stop strings, not looked for before token number min_tokens
    include_stop:  show the stop string, or the client's stop token, that ended the text
    """

    def __init__(
        self, token_bytes: Mapping[int, bytes], stops: Sequence[str] = (), *, include_stop: bool, min_tokens: int
    ) -> None:
        self._token_bytes = token_bytes
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._scanner = StopScanner(stops, include=include_stop) if stops else None
        self._decoder = _Utf8Decoder("replace")
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int], finish: Finish | None) -> Piece:
        """Take the sequence's next tokens, with the finish that came with the last of them."""
        shown = token_ids if finish is None or self._shows_ending(finish) else token_ids[:-1]
        piece = self._add_plain(shown) if self._scanner is None else self._add_scanned(shown, self._scanner)
        if piece.stop is not None:
            return piece
        text = piece.text
        if finish is not None:
            text += self._flush()
        return Piece(text, len(token_ids), None)

    def _shows_ending(self, finish: Finish) -> bool:
        """The text of the token that ended the sequence is not part of it, unless that was asked for."""
        return finish.reason is FinishReason.LENGTH or (self._include_stop and finish.stop_token_id is not None)

    def _add_plain(self, token_ids: Sequence[int]) -> Piece:
        table = self._token_bytes
        return Piece(self._decoder.decode(b"".join([table[i] for i in token_ids])), len(token_ids), None)

    def _add_scanned(self, token_ids: Sequence[int], scanner: StopScanner) -> Piece:
        """Token by token: the stop string that the first of them completes wins."""
        shown: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            new = self._decoder.decode(self._token_bytes[token_id])
            text, stop = scanner.add(new, is_armed=self._num_tokens >= self._min_tokens)
            shown.append(text)
            if stop is not None:
                return Piece("".join(shown), count, stop)
        return Piece("".join(shown), len(token_ids), None)

    def _flush(self) -> str:
        """The end: half a character becomes U+FFFD, and what was held back is shown."""
        rest = self._decoder.decode(b"", True)
        if self._scanner is None:
            return rest
        return self._scanner.add(rest, is_armed=False)[0] + self._scanner.flush()
