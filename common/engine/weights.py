"""A model's tensors by name, one at a time, from safetensors or GGUF. Names are Hugging Face's in both cases."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.devices import CPU
from common.engine.gguf_tensors import GGUFTensors
from common.engine.model_config import ModelConfig
from common.engine.parallel import Shard
from common.engine.safetensors_files import SafetensorsFiles
from common.errors import ModelError
from common.model_files import ModelFiles

Progress = Callable[[float], None]
"""Called with the loaded fraction, 0 … 1, for whoever watches the start."""


class TensorSource(Protocol):
    """Where tensors are read from; nothing is read before `read`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """In the dtype of the file, or fp32 if it is quantised. May be a view of the mapped file.

        rows, columns: only these, of the first and second dimension; None: all
        """
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor that has num_rows of them."""

    name: str
    num_rows: int
    rows: range


class Weights:
    """Hands every tensor, or our shard of it, out once. Mutable: which ones were taken.

    A model takes what it needs while it is built, packs it and drops it, so that the peak is one layer
    above what the model keeps.

    device: where the tensors are handed out
    """

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, shard: Shard, progress: Progress, device: torch.device = CPU
    ) -> None:
        self.device = device
        self._source = source
        self._dtype = dtype
        self._shard = shard
        self._progress = progress
        self._left = dict(source.shapes)
        self._num_tensors = len(self._left)

    def take(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """A copy of the tensor, or of some rows and columns of it.

        shape: of the whole tensor;  dtype: None for the model's
        Raises: ModelError if it is missing or has another shape.
        """
        self.skip(name, *shape)
        tensor = self._source.read(name, rows, columns).to(self.device, dtype or self._dtype, copy=True)
        self._progress(1 - len(self._left) / self._num_tensors)
        return tensor

    def skip(self, name: str, *shape: int) -> None:
        """Do without a tensor that the model has. Raises: ModelError if it is missing or has another shape."""
        got = self._left.pop(name, None)
        if got is None:
            raise ModelError(f"tensor {name} is missing, wanted shape {list(shape)}")
        if got != shape:
            raise ModelError(f"tensor {name} must have shape {list(shape)}, got {list(got)}")

    def take_merged(self, parts: Sequence[Part], *row_shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Parts of several tensors, one below the other."""
        return torch.cat(
            [self.take(part.name, part.num_rows, *row_shape, dtype=dtype, rows=part.rows) for part in parts]
        )

    @property
    def shard(self) -> Shard:
        """The part of the model that is ours."""
        return self._shard

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Check that nothing is left over; a tensor that the model did not ask for means that it is another model.

        Raises: ModelError naming the first ones.
        """
        extra = sorted(self._left.keys() - set(ignored))
        if extra:
            raise ModelError(f"{len(extra)} tensors are not part of this model: {', '.join(extra[:5])}")
        self._progress(1.0)


def open_weights(
    files: ModelFiles,
    config: ModelConfig,
    dtype: torch.dtype,
    shard: Shard,
    progress: Progress,
    device: torch.device = CPU,
) -> Weights:
    """Open the files; tensors are read as they are taken, and are on the device from then on."""
    if files.gguf is not None:
        source: TensorSource = GGUFTensors(files.gguf, config)
    else:
        source = SafetensorsFiles(files.weight_files)
    return Weights(source, dtype, shard, progress, device)
