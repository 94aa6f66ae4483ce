"""How a worker sizes and allocates its cache: what it cannot have is the operator's error, named with both sizes."""

import os
import signal
from queue import SimpleQueue
from unittest.mock import Mock

import pytest

from common.config import ModelOptions, PrefillCommand, WorkerOptions
from common.engine.loading import plan_model, size_cache
from common.engine.stop_signals import STOP_SIGNALS
from common.engine.worker_loop import WorkerLoop
from common.engine.worker_main import load_engine, run_until_stopped
from common.errors import ConfigError
from common.flag_values import ByteSize
from common.links import Links
from common.machine import num_free_bytes
from common.wire import Role
from tests.model.tiny_models import save


def load(model, *, kv_cache_memory=20_000_000, max_model_len=0, allocate=lambda num_bytes: None, alive_file=""):
    worker = WorkerOptions(kv_cache_memory=ByteSize(kv_cache_memory), cores=1, alive_file=str(alive_file))
    command = PrefillCommand(model=ModelOptions(model=str(model), max_model_len=max_model_len), worker=worker)
    with load_engine(Role.PREFILL, command, None, allocate) as engine:
        return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save("grouped", folder)
    return folder


def test_more_than_is_free_is_refused_before_anything_is_allocated(model):
    def allocate(num_bytes):
        raise AssertionError("there is not so much")

    for wanted in (10 * 10**12, 2 * num_free_bytes()):
        with pytest.raises(ConfigError, match=f"that are free, got {wanted / 1e9:.1f} GB"):
            load(model, kv_cache_memory=wanted, allocate=allocate)


def test_memory_that_is_free_but_not_to_be_had_is_the_operator_s_error(model):
    def allocate(num_bytes):
        raise OSError(12, "Cannot allocate memory")

    with pytest.raises(ConfigError, match=r"cannot allocate 0\.0 GB: .*Cannot allocate memory"):
        load(model, allocate=allocate)


def test_a_context_without_room_for_a_token_is_refused(model):
    with pytest.raises(ConfigError, match="max_model_len must be at least 2, got 1"):
        load(model, max_model_len=1)


def test_a_worker_knows_what_its_model_can_compute(model):
    engine = load(model, max_model_len=100)
    identity = engine.identity("tcp://here:1")
    assert (identity.vocab_size, identity.max_context) == (257, 100)


def test_an_alive_file_that_cannot_be_written_is_refused_before_anything_is_allocated(model, tmp_path):
    def allocate(num_bytes):
        raise AssertionError("it is never ready")

    with pytest.raises(
        ConfigError, match=r"alive_file must be a file that can be written, got .*nowhere/alive: No such"
    ):
        load(model, alive_file=tmp_path / "nowhere" / "alive", allocate=allocate)


def test_an_alive_file_that_is_something_else_is_refused_and_left_as_it_is(model, tmp_path):
    (tmp_path / "notes").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "notes", tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError, match=f"alive_file must be new or an empty file, got {path}"):
            load(model, alive_file=path)
        assert path.exists()
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.fixture
def same_handlers_afterwards():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("same_handlers_afterwards")
def test_a_worker_looks_healthy_from_when_it_is_heard_of_and_not_before(model, tmp_path):
    class Heard(Exception):
        pass

    alive_file = tmp_path / "alive"
    alive_file.touch()  # of the life before
    engine = load(model, alive_file=alive_file)
    assert not alive_file.exists()
    links = Mock(spec=Links)
    links.start.side_effect = Heard
    with pytest.raises(Heard):
        run_until_stopped(Mock(spec=WorkerLoop), links, SimpleQueue(), engine, WorkerOptions(), None)
    assert alive_file.exists()


def test_the_cache_has_as_many_whole_blocks_as_fit(model):
    plan = plan_model(ModelOptions(model=str(model)), WorkerOptions())
    assert [size_cache(plan, 3 * plan.block_bytes + extra) for extra in (-1, 0, 1)] == [2, 3, 3]


def test_heads_that_several_ranks_have_count_as_often(model):
    """Two KV heads, one of them at two of three ranks."""
    whole, split = (
        plan_model(ModelOptions(model=str(model)), WorkerOptions(tensor_parallel_size=size)) for size in (1, 3)
    )
    assert split.block_bytes * 2 == whole.block_bytes * 3
