"""Where the processes of one start write their logs."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from common.errors import ConfigError
from common.supervisor.folder_lock import lock_for_removal, lock_for_use

NUM_KEPT = 20

_NAME = "%Y%m%d-%H%M%S"
_NAMES = "[0-9]" * 8 + "-" + "[0-9]" * 6 + "-*"


class LogDir:
    """A folder that stays, in use while in the context.

    given: by the operator; empty: a new one in the cache, where those of the latest starts are kept.
    Raises: ConfigError if it cannot be written to.
    """

    def __init__(self, given: str) -> None:
        self.path = Path(given).absolute() if given else _cache() / time.strftime(f"{_NAME}-{os.getpid()}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            wanted = f"a folder that can be written to: {error.strerror}"
            raise ConfigError(f"--log-dir: got {self.path}, wanted {wanted}") from error
        self._lock_fd: int | None = None
        with suppress(OSError):  # without locks it cannot be locked for removal either
            self._lock_fd = lock_for_use(self.path)
        if not given:
            _remove_oldest(self.path.parent)

    def __enter__(self) -> "LogDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "logs"


def _remove_oldest(parent: Path) -> None:
    """Keep the latest, whose names sort last, and all that are in use."""
    for path in sorted(parent.glob(_NAMES))[:-NUM_KEPT]:
        fd = lock_for_removal(path)
        if fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
