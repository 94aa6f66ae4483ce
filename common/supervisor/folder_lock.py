"""Folders in use: whoever uses one shares a lock on it, which ends with its process; only unlocked ones are removed."""

import fcntl
import os
from pathlib import Path


def lock_for_use(path: Path) -> int | None:
    """The descriptor that keeps the folder until it is closed; None if the folder is gone or about to be.

    Raises: OSError on a file system without locks.
    """
    return _try_lock(path, fcntl.LOCK_SH)


def lock_for_removal(path: Path) -> int | None:
    """The descriptor that keeps others out until it is closed; None if somebody may use the folder or it is gone."""
    try:
        return _try_lock(path, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        return None


def _try_lock(path: Path, kind: int) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd
