"""A model that is split over ranks, all of them in threads of this process: collectives are real, processes are not."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.engine.kv_cache import KVCache, kv_layout
from common.engine.model_config import read_model_config
from common.engine.parallel import Shard, split_model
from common.engine.runner import ModelRunner, load_model
from common.engine.step import StepPlan, StepResult
from common.model_files import find_model
from kernels.cpu.cores import private_cores
from kernels.cpu.group import NativeGroup
from kernels.cpu.group_memory import GroupMemory
from kernels.cpu.library import best_library


class Ranks:
    """As a `ModelRunner`. Use it in a context."""

    def __init__(self, model: str | Path, size: int, *, kernels: str = "auto", dtype: str = "float32") -> None:
        files = find_model(str(model))
        config = read_model_config(files)
        layout = kv_layout(config, dtype, 16, files.model_hash)
        memory = GroupMemory.create(size)
        _, library = best_library()

        def load(shard: Shard) -> ModelRunner:
            own = layout.of_heads(len(shard.kv_heads))
            group = NativeGroup(library, memory, shard.rank, spin=False)
            sizes = min(config.max_context, 64 * 16), private_cores(1)
            loaded = load_model(files, config, own, *sizes, kernels, shard=shard, group=group)
            return ModelRunner(loaded, KVCache(own, 64))

        self.shards = split_model(config, size)
        self.runners = [load(shard) for shard in self.shards]
        self.kv_cache = self.runners[0].kv_cache
        self._threads = ThreadPoolExecutor(size)

    def execute(self, plan: StepPlan) -> StepResult:
        """The result of rank 0; what was sealed, with the checksums of its own heads."""
        others = [self._threads.submit(runner.follow, plan) for runner in self.runners[1:]]
        result = self.runners[0].execute(plan)
        for other in others:
            other.result()
        return result

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *raised: object) -> None:
        self._threads.shutdown()
