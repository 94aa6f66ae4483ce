"""Shared memory segments: proof that it is the very one, what happens without it, and cleaning up."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError, TransferError
from common.ids import BlockId
from common.kv_source import KVSource
from common.wire import KVBlocks
from kvtransfer.route import Mode, choose_route
from kvtransfer.shm import DIRECTORY, HEADER_BYTES, PREFIX, SharedSegment, ShmRoute, remove_dead_segments
from prefill.__main__ import CacheMemory
from tests.interrupts import interrupted_everywhere
from tests.service.kv_rig import BLOCK_BYTES, LAYOUT, NUM_BLOCKS, Rig, key, with_shard

HEADS = range(LAYOUT.num_kv_heads)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("shm")
    yield rig
    rig.close()


def grant(block_id: int) -> KVBlocks:
    return KVBlocks(request_id=key(1).request_id, attempt=0, refusal="", first=0, block_ids=(BlockId(block_id),))


def route_name(mode: Mode, source: KVSource) -> str:
    return choose_route(mode, source, source.shards[0]).name


def segment_names() -> set[str]:
    return {path.name for path in DIRECTORY.glob(f"{PREFIX}*")}


def test_auto_takes_shared_memory_after_reading_the_nonce(rig: Rig) -> None:
    assert route_name("auto", rig.source) == "shm"
    assert route_name("shm", rig.source) == "shm"
    assert route_name("tcp", rig.source) == "tcp"
    assert route_name("auto", with_shard(rig.source, shm_name="")) == "tcp"


@pytest.mark.parametrize(
    "changed",
    [
        {"shm_nonce": "0" * 32},
        {"shm_nonce": ""},
        {"shm_name": f"{PREFIX}none"},
        {"shm_name": f"../..{Path(__file__)}"},
        {"shm_name": f"{PREFIX}/../x"},
        {"num_blocks": NUM_BLOCKS + 1},
        {"num_blocks": NUM_BLOCKS - 1},
    ],
)
def test_another_segment_is_not_read(rig: Rig, changed: dict[str, object]) -> None:
    is_of_group = changed.keys() == {"num_blocks"}
    source = replace(rig.source, **changed) if is_of_group else with_shard(rig.source, **changed)
    assert route_name("auto", source) == "tcp"
    with pytest.raises(TransferError, match="shared memory"):
        route_name("shm", source)


@pytest.mark.parametrize("mode", ["auto", "shm"])
def test_without_the_segment_a_pull_falls_back_or_fails(mode: Mode) -> None:
    rig = Rig(mode)
    try:
        start = rig.pull(key(1), range(8), with_shard(rig.source, shm_name=f"{PREFIX}none", shm_nonce="0"))
        error = rig.wait(key(1)).error
        if mode == "shm":
            assert "shared memory of prefill#1" in error
            rig.check_untouched()
        else:
            assert error == ""
            rig.check_arrived(start)
            assert rig.counter("kv_shm_unavailable") == 1
    finally:
        rig.close()


def test_a_receiver_cannot_write_into_the_segment(rig: Rig) -> None:
    (view,) = ShmRoute(rig.source, rig.source.shards[0]).read(grant(3), [], HEADS).blocks
    with pytest.raises(TypeError):
        memoryview(view)[0] = 1


def test_a_segment_is_zeroed_aligned_and_gone_after_close() -> None:
    segment = SharedSegment(3 * BLOCK_BYTES).create()
    assert segment.name in segment_names()
    assert (DIRECTORY / segment.name).stat().st_size == HEADER_BYTES + 3 * BLOCK_BYTES
    assert segment.memory.nbytes == 3 * BLOCK_BYTES
    assert not any(segment.memory)
    view = segment.memory[:1]
    segment.close()
    assert segment.name not in segment_names()
    view[0] = 1  # whoever still has a view may use it


def test_a_cache_larger_than_shared_memory_is_an_error_and_leaves_nothing() -> None:
    before = segment_names(), len(os.listdir("/proc/self/fd"))
    file_system = os.statvfs(DIRECTORY)
    with pytest.raises(ConfigError, match="cannot hold a KV cache of"):
        SharedSegment(2 * file_system.f_frsize * file_system.f_blocks).create()
    assert (segment_names(), len(os.listdir("/proc/self/fd"))) == before


def test_a_start_that_a_signal_ends_anywhere_leaves_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.shm.DIRECTORY", tmp_path)
    for num_instructions in interrupted_everywhere(lambda undo: CacheMemory("shm", undo).allocate(BLOCK_BYTES)):
        assert list(tmp_path.iterdir()) == [], f"after {num_instructions} instructions"
    assert num_instructions > 100


def test_without_shared_memory_creating_a_segment_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.shm.DIRECTORY", tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot create shared memory"):
        SharedSegment(10).create()


def test_only_segments_of_dead_owners_are_removed(rig: Rig) -> None:
    create = "from kvtransfer.shm import SharedSegment; print(SharedSegment(10).create().name, flush=True)"
    code = f"import os; {create}; os._exit(0)"
    root = Path(__file__).parents[2]
    dead = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert dead in segment_names()
    removed = remove_dead_segments()
    assert dead in removed
    assert rig.source.shards[0].shm_name not in removed
    assert dead not in segment_names()
    assert rig.source.shards[0].shm_name in segment_names()
    rig.pull(key(1), [1])
    assert rig.wait(key(1)).error == ""


def test_a_receiver_keeps_what_it_mapped_when_the_sender_is_killed() -> None:
    segment = SharedSegment(BLOCK_BYTES).create()
    segment.memory[:] = bytes([7]) * BLOCK_BYTES
    rig = Rig("tcp")
    try:
        source = with_shard(replace(rig.source, num_blocks=1), shm_name=segment.name, shm_nonce=segment.nonce)
        route = ShmRoute(source, source.shards[0])
        segment.close()
        assert bytes(route.read(grant(0), [], HEADS).blocks[0]) == bytes([7]) * BLOCK_BYTES
    finally:
        rig.close()
