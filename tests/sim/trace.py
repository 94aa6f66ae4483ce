"""How a trace shows what happens."""

TOLD = ("key", "request_id", "attempt", "index", "token_id", "entries", "reason", "block_ids", "refusal", "leases")
"""What a trace shows of messages and effects."""


class Brief:
    """Of a message or an effect: what tells it from others of its kind. Costs nothing unless it is printed."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        fields = [f"{name}={getattr(self._value, name)}" for name in TOLD if hasattr(self._value, name)]
        return f"{type(self._value).__name__}({', '.join(fields)})"
