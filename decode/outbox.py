"""Tokens on their way to the gateways: one entry a sequence, however long its gateway does not read. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from common.ids import PeerId, SequenceKey
from common.service import Send
from common.wire import Tokens, TokensEntry
from decode.scheduler import Decoded


class TokenOutbox:
    """New tokens, merged per sequence until they are sent.

    Mutable state: per gateway, entries by key in the order of their first token.
    """

    def __init__(self) -> None:
        self._entries: dict[PeerId, dict[SequenceKey, TokensEntry]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, gateway: PeerId, event: Decoded) -> None:
        finish = event.finish
        entry = TokensEntry(
            request_id=event.sequence.key.request_id,
            attempt=event.sequence.key.attempt,
            index=event.index,
            token_ids=(event.token_id,),
            finish_reason=finish.reason if finish else None,
            stop_token_id=finish.stop_token_id if finish else None,
        )
        entries = self._entries.setdefault(gateway, {})
        key = event.sequence.key
        entries[key] = join(entries[key], entry) if key in entries else entry

    def put_back(self, gateway: PeerId, unsent: Sequence[TokensEntry]) -> None:
        """These were not sent after all; what was added since follows them."""
        newer = self._entries.get(gateway, {})
        older = {SequenceKey(entry.request_id, entry.attempt): entry for entry in unsent}
        both = {key: join(entry, newer[key]) if key in newer else entry for key, entry in older.items()}
        self._entries[gateway] = {**both, **{key: entry for key, entry in newer.items() if key not in older}}

    def flush(self) -> list[Send]:
        """One message a gateway with everything for it."""
        entries, self._entries = self._entries, {}
        return [Send(gateway, Tokens(entries=tuple(by_key.values()))) for gateway, by_key in entries.items()]

    def forget(self, key: SequenceKey) -> None:
        """Nobody wants the tokens of this attempt and of earlier ones."""
        for gateway, entries in list(self._entries.items()):
            kept = {
                k: entry for k, entry in entries.items() if k.request_id != key.request_id or k.attempt > key.attempt
            }
            self._replace(gateway, kept)

    def lost(self, gateway: PeerId) -> None:
        self._entries.pop(gateway, None)

    def _replace(self, gateway: PeerId, entries: dict[SequenceKey, TokensEntry]) -> None:
        if entries:
            self._entries[gateway] = entries
        else:
            del self._entries[gateway]


def join(older: TokensEntry, newer: TokensEntry) -> TokensEntry:
    """Two runs of tokens of one sequence, without a gap between them, as one."""
    assert older.index + len(older.token_ids) == newer.index, f"tokens are missing between {older} and {newer}"
    return replace(newer, index=older.index, token_ids=older.token_ids + newer.token_ids)
