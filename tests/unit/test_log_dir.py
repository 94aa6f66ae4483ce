"""The folder for logs: those of the latest starts are kept, and all that are in use."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from common.supervisor.log_dir import NUM_KEPT, LogDir


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton" / "logs"


def make_old(logs: Path, count: int) -> list[Path]:
    folders = [logs / f"20240101-0000{second:02}-7" for second in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "gateway.log").touch()
    return folders


def test_of_old_starts_the_latest_are_kept(logs: Path) -> None:
    old = make_old(logs, NUM_KEPT + 5)
    with LogDir("") as new:
        assert sorted(logs.iterdir()) == [*old[6:], new.path]


def test_a_folder_in_use_is_kept_however_old_it_is(logs: Path) -> None:
    old = make_old(logs, NUM_KEPT + 5)
    with LogDir(str(old[0])), LogDir(str(old[1])), LogDir(str(old[1])):
        with LogDir("") as new:
            assert sorted(logs.iterdir()) == [*old[:2], *old[6:], new.path]
        assert old[0].exists()
    with LogDir(""):
        assert not old[0].exists()


def test_a_start_whose_clock_is_behind_keeps_its_own_folder(logs: Path) -> None:
    for second in range(NUM_KEPT + 5):
        (logs / f"99990101-0000{second:02}-7").mkdir(parents=True)
    with LogDir("") as new:
        assert new.path.exists()


def test_what_is_not_ours_is_never_removed(logs: Path) -> None:
    precious = logs / "0-precious" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.touch()
    make_old(logs, NUM_KEPT + 5)
    with LogDir(""):
        assert precious.exists()


def test_a_given_folder_is_made_and_nothing_beside_it_removed(tmp_path: Path) -> None:
    old = make_old(tmp_path, NUM_KEPT + 5)
    with LogDir(str(tmp_path / "a" / "b")) as given:
        assert given.path.is_dir()
    assert all(folder.exists() for folder in old)


def test_a_place_that_cannot_hold_a_folder_is_refused_and_named_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refusal:
        LogDir(str(tmp_path / "file" / "logs"))
    assert str(refusal.value).count(str(tmp_path)) == 1
