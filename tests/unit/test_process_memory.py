"""Whose memory is summed, in a made-up /proc."""

from pathlib import Path

from common.process_memory import find_serves, name_of, pss_bytes, tree_of


def add_process(proc: Path, pid: int, *words: str, children: str = "", pss_kb: int = 1) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (task / "children").write_text(children)
    (proc / str(pid) / "cmdline").write_text("\0".join([*words, ""]))
    (proc / str(pid) / "smaps_rollup").write_text(f"7f00-7fff ---p [rollup]\nRss: 99 kB\nPss: {pss_kb} kB\n")


def test_the_processes_of_a_serve_are_found_and_named(tmp_path: Path) -> None:
    add_process(tmp_path, 10, "python", "/x/baton.py", "serve", "--port=1", children="11 12")
    add_process(tmp_path, 11, "python", "/x/baton.py", "gateway", "--name=gateway", children="13", pss_kb=3)
    add_process(tmp_path, 12, "python", "/x/baton.py", "prefill", "--name=prefill-0")
    add_process(tmp_path, 13, "cc1plus")
    add_process(tmp_path, 14, "vim", "serve")
    (tmp_path / "self").mkdir()
    assert list(find_serves(tmp_path)) == [10]
    assert list(tree_of(10, tmp_path)) == [10, 11, 13, 12]
    assert [name_of(pid, tmp_path) for pid in (11, 12, 13)] == ["gateway", "prefill-0", "cc1plus "]
    assert pss_bytes(11, tmp_path) == 3 * 1024


def test_an_installed_command_is_a_serve_too(tmp_path: Path) -> None:
    add_process(tmp_path, 10, "/venv/bin/python", "/venv/bin/baton", "serve")
    assert list(find_serves(tmp_path)) == [10]
