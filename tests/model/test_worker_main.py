"""How a worker sizes and allocates its cache: what it cannot have is the operator's error, named with both sizes."""

import pytest

from common.config import ModelOptions, PrefillCommand, WorkerOptions
from common.engine.loading import plan_model, size_cache
from common.engine.worker_main import load_engine
from common.errors import ConfigError
from common.flag_values import ByteSize
from common.machine import num_free_bytes
from common.wire import Role
from tests.model.tiny_models import save


def load(model, *, kv_cache_memory=20_000_000, max_model_len=0, allocate=lambda num_bytes: None):
    worker = WorkerOptions(kv_cache_memory=ByteSize(kv_cache_memory), cores=1)
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


def test_the_cache_has_as_many_whole_blocks_as_fit(model):
    plan = plan_model(ModelOptions(model=str(model)), WorkerOptions())
    assert [size_cache(plan, 3 * plan.block_bytes + extra) for extra in (-1, 0, 1)] == [2, 3, 3]


def test_heads_that_several_ranks_have_count_as_often(model):
    """Two KV heads, one of them at two of three ranks."""
    whole, split = (
        plan_model(ModelOptions(model=str(model)), WorkerOptions(tensor_parallel_size=size)) for size in (1, 3)
    )
    assert split.block_bytes * 2 == whole.block_bytes * 3
