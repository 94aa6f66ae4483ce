"""The folder for sockets: private, short, and swept of what dead owners left."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.supervisor.runtime_dir import RuntimeDir
from tests.interrupts import interrupted_everywhere


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.fixture
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p", numbered=True)


def test_the_folder_is_private_and_goes_with_its_sockets(parent: Path) -> None:
    with RuntimeDir(parent) as runtime_dir:
        assert runtime_dir.path.stat().st_mode & 0o777 == 0o700
        leave_socket(runtime_dir.path / "inbox")
    assert list(parent.iterdir()) == []


def test_folders_of_dead_owners_are_removed_and_those_of_live_ones_stay(parent: Path) -> None:
    abandoned = parent / "baton-run-dead"
    abandoned.mkdir()
    leave_socket(abandoned / "inbox")
    with RuntimeDir(parent) as first, RuntimeDir(parent) as second:
        assert not abandoned.exists()
        assert {first.path, second.path} == set(parent.iterdir())


def test_files_that_are_not_ours_are_never_removed(parent: Path) -> None:
    precious = parent / "baton-run-me" / "thesis.txt"
    precious.parent.mkdir()
    precious.touch()
    with RuntimeDir(parent) as runtime_dir:
        (runtime_dir.path / "core").touch()
    assert precious.exists()
    assert (runtime_dir.path / "core").exists()


def test_a_path_too_long_for_sockets_is_refused(parent: Path) -> None:
    deep = parent / ("d" * 90)
    deep.mkdir()
    with pytest.raises(ConfigError, match="wanted a path of at most 80 bytes"):
        RuntimeDir(deep)
    assert list(deep.iterdir()) == []


@pytest.mark.filterwarnings("ignore:unclosed scandir iterator")  # the library's own, ended like all else
def test_a_start_that_a_signal_ends_anywhere_leaves_no_folder(parent: Path) -> None:
    def make(undo: ExitStack) -> None:
        runtime_dir = RuntimeDir(parent)
        undo.callback(runtime_dir.remove)
        runtime_dir.create()

    for num_instructions in interrupted_everywhere(make):
        assert list(parent.iterdir()) == [], f"after {num_instructions} instructions"
    assert num_instructions > 100


def test_a_folder_on_a_file_system_without_locks_does_not_stay(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(path: Path) -> int:
        raise OSError(f"no locks for {path}")

    monkeypatch.setattr("common.supervisor.runtime_dir.lock_for_use", no_locks)
    with pytest.raises(OSError, match="no locks"), RuntimeDir(parent):
        pass
    assert list(parent.iterdir()) == []
