"""Small GGUF files, written by the `gguf` package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

METADATA: Mapping[str, Any] = {
    "llama.context_length": 512,
    "llama.embedding_length": 96,
    "llama.block_count": 3,
    "llama.feed_forward_length": 80,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.eos_token_id": 2,
}


def write(
    path: Path,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    arch: str = "llama",
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write METADATA with changes (None removes a key) and the tensors; by default an embedding of 257 rows.

    quantisation: of the matrices; vectors stay F32
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**METADATA, **(changes or {})}.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    if tensors is None:
        tensors = {"token_embd.weight": np.zeros((257, 96), np.float32)}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
