"""The private folder in which processes of one host meet."""

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from common.errors import ConfigError
from common.supervisor.folder_lock import lock_for_removal, lock_for_use

SHARED = "shared"
"""The folder inside in which the workers share their host's cores."""

_PREFIX = "baton-run-"
_MAX_PATH_LEN = 80
"""A Unix socket's path has less than 108 bytes; this leaves room for the socket's own name."""


class RuntimeDir:
    """A folder of mode 0700 that is removed on leaving the context.

    Its owner holds a lock on it, so that the next start knows folders of dead owners and removes them.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Nothing is there yet: see to it that `remove` is called, then `create` it, which a signal may end anywhere.

        Raises: ConfigError if no place for it has a path short enough for sockets.
        """
        self.path = _new_path(parent or _find_parent())
        self._lock_fd: int | None = None
        if len(os.fsencode(self.path)) > _MAX_PATH_LEN:
            raise ConfigError(
                f"runtime folder: got {self.path}, wanted a path of at most {_MAX_PATH_LEN} bytes; set TMPDIR"
            )

    def create(self) -> "RuntimeDir":
        """Until it is locked, a starting neighbour may take it for an abandoned one; then another is made."""
        parent = self.path.parent
        _remove_abandoned(parent)
        while True:
            self.path.mkdir(mode=0o700)
            self._lock_fd = lock_for_use(self.path)
            if self._lock_fd is not None and self.path.exists():
                return self
            self._unlock()
            self.path = _new_path(parent)

    def remove(self) -> None:
        """Idempotent, and right for one that was not created."""
        if self.path.exists():
            _remove_sockets(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> "RuntimeDir":
        try:
            return self.create()
        except BaseException:  # a folder that cannot be locked, or Ctrl-C
            self.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _new_path(parent: Path) -> Path:
    return parent / f"{_PREFIX}{secrets.token_hex(4)}"


def _find_parent() -> Path:
    """XDG_RUNTIME_DIR if there is one, else the folder for temporary files."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if xdg and os.access(xdg, os.W_OK | os.X_OK):
        return Path(xdg)
    return Path(tempfile.gettempdir())


def _remove_abandoned(parent: Path) -> None:
    """Remove runtime folders of ours whose owner is dead."""
    for path in parent.glob(_PREFIX + "*"):
        fd = lock_for_removal(path)
        if fd is None:
            continue
        if os.fstat(fd).st_uid == os.getuid():
            _remove_sockets(path)
        os.close(fd)


def _remove_sockets(path: Path) -> None:
    """Remove what we made in a folder, and the folder if nothing else is in it: what is not ours stays."""
    shutil.rmtree(path / SHARED, ignore_errors=True)
    entries = list(path.iterdir())
    sockets = [entry for entry in entries if stat.S_ISSOCK(entry.lstat().st_mode)]
    for entry in sockets:
        entry.unlink(missing_ok=True)
    if len(sockets) == len(entries):
        path.rmdir()
