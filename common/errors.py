"""The world's faults. Our own bugs are assertions.

Every message says what, got and wanted. Border code translates foreign exceptions into these.
"""

from dataclasses import dataclass


class BatonError(Exception):
    """Base of every error that a caller may want to handle."""


class ConfigError(BatonError):
    """A flag, variable or file that the operator gave is unusable. The process does not start."""


class ModelError(BatonError):
    """A model cannot be loaded: unsupported architecture, missing tensor, wrong shape."""


class GroupFailed(BatonError):
    """A rank of a worker group has failed, so that the whole worker ends. Names the rank."""


class WireError(BatonError):
    """Bytes from a peer that are not a message of this version. Names message and field."""


class TransferError(BatonError):
    """KV blocks did not arrive as described: refused, truncated, corrupt, late or lost."""


class LayoutMismatch(TransferError):
    """Two KV caches whose blocks are not interchangeable. Names each field and both sides."""


@dataclass
class RequestError(BatonError):
    """A request that ends without (more) tokens, as its client will see it.

    status: HTTP status if nothing was sent yet. type/code/param: the OpenAI error body's fields.
    retry_after_s: seconds, only with 429 and 503.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message
