"""Reads tensors out of a GGUF file, dequantised, as Hugging Face has them."""

import re
from collections.abc import Mapping

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from torch import Tensor

from common.engine.model_config import ModelConfig
from common.errors import ModelError
from common.gguf_file import GGUFFile, GGUFTensor

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NOT_WEIGHTS = ("rope_freqs.weight",)
"""Read with the config."""


class GGUFTensors:
    """The tensors of one file, which stays mapped as long as this lives."""

    def __init__(self, gguf: GGUFFile, config: ModelConfig) -> None:
        """Raises: ModelError if the file ends before its tensors do, or has a type that nobody can dequantise."""
        self._config = config
        self._data = np.memmap(gguf.path, mode="r").view(np.ndarray)  # a memmap runs Python for every slice of it
        self._tensors = {to_hf_name(name): tensor for name, tensor in gguf.tensors.items() if name not in _NOT_WEIGHTS}
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        for tensor in self._tensors.values():
            num_bytes = int(np.prod(_byte_shape(tensor)))
            if tensor.offset + num_bytes > len(self._data):
                raise ModelError(
                    f"{gguf.path}: tensor {tensor.name} needs {num_bytes} bytes at {tensor.offset},"
                    f" the file has {len(self._data)}"
                )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Rows of queries and keys: whole heads."""
        tensor = self._tensors[name]
        shape = _byte_shape(tensor)
        data = self._data[tensor.offset : tensor.offset + int(np.prod(shape))].reshape(shape)
        if rows is not None and data.ndim > 1:
            data, rows = data[rows.start : rows.stop], None  # only what is wanted is dequantised
        try:
            values = dequantize(data, GGMLQuantizationType(tensor.type_id))
        except NotImplementedError as error:
            raise ModelError(f"tensor {tensor.name}: {error}") from error
        if rows is not None:
            values = values[rows.start : rows.stop]
        if columns is not None:
            values = values[:, columns.start : columns.stop]
        weight = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
        if "q_proj" in name or "k_proj" in name:
            return _undo_rope_order(weight, self._config.head_dim)
        return weight


def to_hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{_GLOBAL_NAMES[part]}.{kind}" if part in _GLOBAL_NAMES else name


def _byte_shape(tensor: GGUFTensor) -> tuple[int, ...]:
    try:
        return quant_shape_to_byte_shape(tensor.shape, GGMLQuantizationType(tensor.type_id))
    except ValueError as error:
        raise ModelError(f"tensor {tensor.name}: {error}") from error


def _undo_rope_order(weight: Tensor, head_dim: int) -> Tensor:
    """llama.cpp rotates neighbouring dimensions, so its llama files interleave the two halves of every head's rows.

    Source: llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute.
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()
