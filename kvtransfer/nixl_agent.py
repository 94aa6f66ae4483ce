"""NIXL's agents, as far as KV transfer needs them. NIXL is in the extra `nixl`, and imported late."""

import importlib
import itertools
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from common.errors import ConfigError, TransferError

PACKAGE = "nixl_cu12"

Span = tuple[int, int]
"""Address, bytes."""


class NixlAgent:
    """An agent with the UCX backend and one piece of memory: to read into, or for others to read.

    NIXL's own thread would wait for nothing and take a core for itself (1.5.1: 3.5 s of 5 s idle), so whoever owns an
    agent calls `progress` or `is_done`, and no two threads do so at once.

    address:  of the memory
    Mutable: the transfers that have begun and not ended.
    """

    def __init__(self, memory: memoryview) -> None:
        """memory: stays as it is until `close`.

        Raises: ConfigError without NIXL; TransferError when it does not work here.
        """
        nixl = _load()
        self.address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        self._memory = memory
        self._transfers: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._remote = ""
        with _translated("cannot make an agent"):
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = nixl.nixl_agent(secrets.token_hex(8), config)
            self._agent.register_memory([(self.address, memory.nbytes, 0, "")], "DRAM")

    def metadata(self) -> bytes:
        """What another agent needs to read this one's memory. Raises: TransferError."""
        with _translated("cannot describe the agent"):
            return self._agent.get_agent_metadata()

    def connect(self, metadata: bytes) -> None:
        """Read from that agent's memory from now on. Raises: TransferError."""
        with _translated("cannot load the other agent"):
            self._remote = self._agent.add_remote_agent(metadata)

    def progress(self) -> None:
        """Do our part of what other agents read. Raises: TransferError."""
        with _translated("cannot go on"):
            self._agent.get_new_notifs()

    def begin_read(self, local: Sequence[Span], remote: Sequence[Span]) -> int:
        """Begin to read pieces of the other agent's memory into ours, and return the number of this transfer.

        Raises: TransferError.
        """
        number = next(self._numbers)
        with _translated("cannot read"):
            transfer = self._agent.initialize_xfer("READ", self._descs(local), self._descs(remote), self._remote)
            self._transfers[number] = transfer
            self._agent.transfer(transfer)
        return number

    def is_done(self, number: int) -> bool:
        """Raises: TransferError."""
        with _translated("cannot read"):
            state = self._agent.check_xfer_state(self._transfers[number])
        if state == "ERR":
            raise TransferError("NIXL: cannot read")
        return state == "DONE"

    def end(self, number: int) -> None:
        """Forget about a transfer that is done."""
        self._transfers.pop(number).release()

    def close(self) -> None:
        """When it returns, nothing is written into the memory any more. Idempotent."""
        for transfer in self._transfers.values():
            transfer.release()
        self._transfers.clear()
        self._agent = None

    def _descs(self, spans: Sequence[Span]) -> Any:
        return self._agent.get_xfer_descs([(*span, 0) for span in spans], "DRAM")


def _load() -> Any:
    """NIXL's package. It sets up logging of its own, to stdout: its warnings go where ours do.

    Raises: ConfigError.
    """
    raises = logging.raiseExceptions
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ConfigError("--kv-transport nixl: needs NIXL, of the extra `nixl`: pip install -e '.[nixl]'") from error
    finally:
        logging.raiseExceptions = raises
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return package


@contextmanager
def _translated(failure: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # NIXL's have no base of their own
        raise TransferError(f"NIXL: {failure}: {error}") from error
