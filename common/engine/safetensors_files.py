"""Reads tensors out of one or several safetensors files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ModelError

_FLOATS = ("F32", "F16", "BF16", "F64")
_BUFFER = ".rotary_emb.inv_freq"
"""Old checkpoints hold it in every layer; it follows from the config."""


class SafetensorsFiles:
    """The tensors of all files together; the files stay mapped as long as this lives."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises: ModelError if a file is damaged, or holds something else than plain floats."""
        self._files = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: not a valid safetensors file: {error}") from error
            names = file.keys()
            for name in names:
                if name.endswith(_BUFFER):
                    continue
                part = file.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise ModelError(
                        f"{path}: tensor {name} must be one of {', '.join(_FLOATS)}, got {part.get_dtype()}"
                    )
                self._files[name] = file
                self._shapes[name] = tuple(part.get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        if rows is None and columns is None:
            return self._files[name].get_tensor(name)
        part = self._files[name].get_slice(name)
        if columns is None:
            return part[_slice(rows)]
        return part[_slice(rows), _slice(columns)]


def _slice(indices: range | None) -> slice:
    return slice(None) if indices is None else slice(indices.start, indices.stop)
