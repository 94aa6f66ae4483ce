"""The private folder in which processes of one host meet."""

import os
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
    Raises: ConfigError if no place for it has a path short enough for sockets.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or _find_parent()
        _remove_abandoned(parent)
        self.path, self._lock_fd = _create_locked(parent)
        if len(os.fsencode(self.path)) > _MAX_PATH_LEN:
            self.remove()
            raise ConfigError(
                f"runtime folder: got {self.path}, wanted a path of at most {_MAX_PATH_LEN} bytes; set TMPDIR"
            )

    def remove(self) -> None:
        _remove_sockets(self.path)
        os.close(self._lock_fd)

    def __enter__(self) -> "RuntimeDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _find_parent() -> Path:
    """XDG_RUNTIME_DIR if there is one, else the folder for temporary files."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if xdg and os.access(xdg, os.W_OK | os.X_OK):
        return Path(xdg)
    return Path(tempfile.gettempdir())


def _create_locked(parent: Path) -> tuple[Path, int]:
    """Until it is locked, a starting neighbour may take our new folder for an abandoned one; then make another."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        fd = lock_for_use(path)
        if fd is None:
            continue
        if path.exists():
            return path, fd
        os.close(fd)


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
