"""What a rank computes on: the host's cores, or one of its GPUs, of which it may have a part."""

from dataclasses import dataclass

import torch

from common.errors import ConfigError
from common.worker_config import WorkerOptions

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one rank. num_sharing: ranks of this host that are on the same GPU, this one included."""

    device: torch.device
    num_sharing: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    def make_current(self) -> None:
        """For the thread that computes: Triton launches its kernels on the current GPU, wherever their tensors are."""
        if self.is_gpu:
            torch.cuda.set_device(self.device)


def place_ranks(options: WorkerOptions) -> list[Placement]:
    """Where a worker's ranks compute, in their order. ROCm's GPUs go by the name of cuda, as in PyTorch.

    Raises: ConfigError when there are no GPUs, or not one for each rank.
    """
    size, num_gpus = options.tensor_parallel_size, torch.cuda.device_count()
    if options.device == "cpu" or (options.device == "auto" and not num_gpus):
        return [Placement(CPU)] * size
    if not num_gpus:
        raise ConfigError(f"device cuda: PyTorch {torch.__version__} finds no GPU")
    if size > num_gpus:
        raise ConfigError(f"tensor_parallel_size must be at most {num_gpus}, one GPU a rank, got {size}")
    return spread(options.first_rank, size, max(options.host_ranks, options.first_rank + size), num_gpus)


def spread(first: int, size: int, host_ranks: int, num_gpus: int) -> list[Placement]:
    """Ranks first … first + size - 1 of a host's, which take its GPUs in turn."""
    on_gpu = [len(range(gpu, host_ranks, num_gpus)) for gpu in range(num_gpus)]
    gpus = [rank % num_gpus for rank in range(first, first + size)]
    return [Placement(torch.device("cuda", gpu), on_gpu[gpu]) for gpu in gpus]
