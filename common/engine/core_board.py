"""How workers of one host find each other and share its cores: a folder with a board, and a lock file for each."""

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConfigError
from kernels.cpu.cores import (
    CORE_BYTES,
    LAYOUT_VERSION,
    MAX_WORKERS,
    Cores,
    private_cores,
    read_homes,
    write_homes,
    write_urgency,
)

logger = logging.getLogger(__name__)


class CoreBoard:
    """Our place among the workers of a host, until the process ends: the system then lets go of our lock."""

    def __init__(self, folder: Path, num_cores: int, *, borrows: bool, is_urgent: bool) -> None:
        """Take a place, and deal the cores out anew.

        folder:     made if need be; all workers of the host name the same one, and the same num_cores
        is_urgent:  somebody waits for each of our steps, as for a decode worker's
        Raises: ConfigError if there is no place left, or the folder cannot be used.
        """
        self._folder = folder
        self._num_cores = num_cores
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / "board.lock"):
                self._board = _open_board(folder / f"cores-{num_cores}-v{LAYOUT_VERSION}", num_cores * CORE_BYTES)
                self._worker, self._lock_fd = _take_place(folder)
                write_homes(self._board, num_cores, self._find_live())
                write_urgency(self._board, num_cores, self._worker, is_urgent=is_urgent)
        except OSError as error:
            raise ConfigError(f"shared_dir {folder} cannot be used: {error}") from error
        self.cores = Cores(self._board, num_cores, self._worker, borrows)

    def refresh(self) -> None:
        """Deal the cores out anew if a worker has gone; several times a second.

        Without the folder, which cleaners of temporary files may remove, nobody knows who is there: homes stay.
        """
        if not _place(self._folder, self._worker).exists():
            return
        if set(self._find_live()) >= set[int]().union(*read_homes(self._board, self._num_cores)):
            return
        with _locked(self._folder / "board.lock"):
            live = self._find_live()
            write_homes(self._board, self._num_cores, live)
        logger.info("%d workers share %d cores now", len(live), self._num_cores)

    def _find_live(self) -> list[int]:
        others = (int(path.name.removeprefix("worker-")) for path in self._folder.glob("worker-*"))
        return sorted(worker for worker in others if worker == self._worker or _is_held(_place(self._folder, worker)))


def find_cores(folder: str, num_cores: int, *, borrows: bool, is_urgent: bool) -> tuple[Cores, CoreBoard | None]:
    """The cores of a worker: with a folder those of its host, shared; without one num_cores for itself.

    Raises: ConfigError.
    """
    if not folder:
        return private_cores(num_cores), None
    board = CoreBoard(Path(folder), num_cores, borrows=borrows, is_urgent=is_urgent)
    return board.cores, board


def _place(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}"


def _open_board(path: Path, num_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(fd).st_size < num_bytes:
            os.ftruncate(fd, num_bytes)
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)


def _take_place(folder: Path) -> tuple[int, int]:
    """The first one that nobody holds, and the descriptor that holds it from now on."""
    for worker in range(MAX_WORKERS):
        fd = os.open(_place(folder, worker), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return worker, fd
    raise ConfigError(f"shared_dir {folder}: at most {MAX_WORKERS} workers can share a host's cores")


def _is_held(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
