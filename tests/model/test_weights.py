"""Tensors from safetensors and GGUF: each is taken once, and what does not fit is named."""

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from common.engine.gguf_tensors import GGUFTensors
from common.engine.layers import load_attention, load_mlp
from common.engine.model_config import ModelConfig, read_model_config
from common.engine.parallel import Shard, split_model, whole
from common.engine.weights import Part, Progress, Weights, open_weights
from common.errors import ModelError
from common.gguf_file import GGUFFile, GGUFTensor
from common.model_files import ModelFiles, find_model
from kernels.composed import ComposedOps
from tests import gguf_models
from tests.model import harness, tiny_models

NUM_TOKENS = 12
OPS = ComposedOps()


class Tensors:
    """A source in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        tensor = self._tensors[name]
        tensor = tensor if rows is None else tensor[rows.start : rows.stop]
        return tensor if columns is None else tensor[:, columns.start : columns.stop]


ALONE = Shard(0, 1, range(1), range(1), range(1), range(1), (1,))


def make_weights(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(Tensors(tensors), dtype, ALONE, lambda fraction: None)


def open_all(files: ModelFiles, report: Progress = lambda fraction: None) -> Weights:
    config = read_model_config(files)
    return open_weights(files, config, torch.float32, whole(config), report)


def test_a_tensor_is_a_copy_in_the_models_dtype() -> None:
    stored = torch.tensor([1.0, 2.0])
    taken = make_weights({"a": stored}).take("a", 2)
    taken += 1
    assert stored.tolist() == [1.0, 2.0]
    assert make_weights({"a": stored}, torch.bfloat16).take("a", 2).dtype == torch.bfloat16


def test_merged_tensors_lie_one_below_the_other() -> None:
    weights = make_weights({"a": torch.full((1, 3), 1.0), "b": torch.full((2, 3), 2.0)})
    parts = [Part("b", 2, range(2)), Part("a", 1, range(1))]
    assert weights.take_merged(parts, 3).tolist() == [[2.0] * 3, [2.0] * 3, [1.0] * 3]


def test_missing_misshapen_and_extra_tensors_are_named_with_what_is_wanted() -> None:
    weights = make_weights({"a": torch.zeros(2, 3), "b": torch.zeros(1), "c": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"tensor x is missing, wanted shape \[4\]"):
        weights.take("x", 4)
    with pytest.raises(ModelError, match=r"tensor a must have shape \[3, 2\], got \[2, 3\]"):
        weights.take("a", 3, 2)
    with pytest.raises(ModelError, match="1 tensors are not part of this model: c"):
        weights.finish(ignored=["b"])


def test_a_tensor_is_handed_out_once() -> None:
    weights = make_weights({"a": torch.zeros(1)})
    weights.take("a", 1)
    with pytest.raises(ModelError, match="tensor a is missing"):
        weights.take("a", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.save("grouped", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"tensor model.layers.1.mlp.up_proj.weight is missing"),
        ({"model.norm.weight": torch.ones(47)}, r"tensor model.norm.weight must have shape \[96\], got \[47\]"),
        ({"model.layers.3.input_layernorm.weight": torch.ones(96)}, r"not part of this model: model.layers.3"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(96)}, r"not part of this model: .*q_proj.bias"),
        ({"lm_head.weight": None}, "tensor lm_head.weight is missing"),
        ({"lm_head.weight": torch.ones(257, 96, dtype=torch.int8)}, "tensor lm_head.weight must be one of F32, .*I8"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_tensor(
    folder: Path, changes: dict[str, Tensor | None], named: str
) -> None:
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ModelError, match=f"model {folder.name} .*{named}"):
        harness.load(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"{re.escape(str(file))}: not a valid safetensors file"):
        harness.load(folder)


def test_frequencies_that_old_checkpoints_hold_are_passed_over(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    assert harness.greedy(harness.load(folder), [[5, 6, 7]], 2)


def test_a_tied_model_may_store_its_head_all_the_same(tmp_path: Path) -> None:
    tiny_models.save("tied", tmp_path)
    expected = harness.greedy(harness.load(tmp_path), tiny_models.prompts(), NUM_TOKENS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert harness.greedy(harness.load(tmp_path), tiny_models.prompts(), NUM_TOKENS) == expected


def test_sharded_files_are_one_model(tmp_path: Path) -> None:
    model = tiny_models.save("grouped", tmp_path, max_shard_size="50KB")
    files = find_model(str(tmp_path))
    assert len(files.weight_files) > 2
    fractions: list[float] = []
    weights = open_all(files, fractions.append)
    for name, expected in model.state_dict().items():
        assert torch.equal(weights.take(name, *expected.shape), expected), name
    weights.finish()
    assert fractions == sorted(fractions)
    assert (fractions[0] > 0, fractions[-1]) == (True, 1.0)
    expected_tokens = [tiny_models.greedy(model, prompt, NUM_TOKENS) for prompt in tiny_models.prompts()]
    assert harness.greedy(harness.load(tmp_path), tiny_models.prompts(), NUM_TOKENS) == expected_tokens


def write_gguf(
    model: PreTrainedModel, path: Path, quantisation: gguf.GGMLQuantizationType, extra: Mapping[str, Tensor]
) -> Path:
    """As llama.cpp's converter writes it: by other names, and with the rows of q and k interleaved."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = dict(extra)
    for name, tensor in model.state_dict().items():
        if re.search(r"[qk]_proj", name):
            num_heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias")) or ""] = tensor
    changes = {"llama.rope.freq_base": float(model.config.rope_parameters["rope_theta"])}
    return gguf_models.write(
        path, changes, {name: tensor.numpy() for name, tensor in tensors.items()}, quantisation=quantisation
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("variant", ["grouped", "biases"])
def test_a_gguf_file_holds_the_tensors_of_the_model_it_was_made_from(variant: str, kind: str, tmp_path: Path) -> None:
    model = tiny_models.build(variant)
    path = write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind], {})
    files = find_model(str(path))
    weights = open_all(files)
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for name, tensor in model.state_dict().items():
        expected = tensor.to(stored).float() if tensor.ndim > 1 else tensor
        assert torch.equal(weights.take(name, *expected.shape), expected), name
    weights.finish()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_shard_is_made_of_slices_of_the_models_tensors(size: int, kind: str, tmp_path: Path) -> None:
    if kind == "gguf":
        model = tiny_models.build("biases")
        files = find_model(str(write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32, {})))
    else:
        model = tiny_models.save("biases", tmp_path)
        files = find_model(str(tmp_path))
    config = read_model_config(files)
    tensors = model.state_dict()
    layer = "model.layers.1"
    outs, downs = tensors[f"{layer}.self_attn.o_proj.weight"], tensors[f"{layer}.mlp.down_proj.weight"]
    for shard in split_model(config, size):
        weights = open_weights(files, config, torch.float32, shard, lambda fraction: None)
        attention = load_attention(
            weights, f"{layer}.input_layernorm", f"{layer}.self_attn", config, OPS, torch.empty(0)
        )
        mlp = load_mlp(weights, f"{layer}.post_attention_layernorm", f"{layer}.mlp", config, OPS)
        qkv = [heads_of(tensors[f"{layer}.self_attn.{name}_proj.weight"], heads) for name, heads in shard_heads(shard)]
        assert torch.equal(attention.qkv.weight, torch.cat(qkv))
        assert torch.equal(attention.out.weight, heads_of(outs.T, shard.heads).T)
        assert (attention.num_heads, attention.num_kv_heads) == (len(shard.heads), len(shard.kv_heads))
        gate_up = [
            tensors[f"{layer}.mlp.{name}_proj.weight"][shard.mlp.start : shard.mlp.stop] for name in ("gate", "up")
        ]
        assert torch.equal(mlp.gate_up.weight, torch.cat(gate_up))
        assert torch.equal(mlp.down.weight, downs[:, shard.mlp.start : shard.mlp.stop])
        assert [block.bias is not None for block in (attention.out, mlp.down)] == [shard.rank == 0] * 2


def shard_heads(shard: Shard) -> list[tuple[str, range]]:
    return [("q", shard.heads), ("k", shard.kv_heads), ("v", shard.kv_heads)]


def heads_of(tensor: Tensor, heads: range) -> Tensor:
    return tensor[heads.start * 16 : heads.stop * 16]


def test_a_gguf_file_with_rope_factors_computes_what_its_model_does(tmp_path: Path) -> None:
    model = tiny_models.build("llama3_rope")
    scaled = model.get_submodule("model.rotary_emb").get_buffer("inv_freq")
    plain = 5000.0 ** -(torch.arange(0, 16, 2) / 16)
    path = write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32, {"rope_freqs.weight": plain / scaled})
    expected = [tiny_models.greedy(model, prompt, NUM_TOKENS) for prompt in tiny_models.prompts()]
    assert harness.greedy(harness.load(path), tiny_models.prompts(), NUM_TOKENS) == expected


@pytest.fixture
def gguf_config(folder: Path) -> ModelConfig:
    return read_model_config(find_model(str(folder)))


def test_a_gguf_file_that_ends_before_its_tensors_is_refused(tmp_path: Path, gguf_config: ModelConfig) -> None:
    path = gguf_models.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    gguf_file = find_model(str(path)).gguf
    assert gguf_file is not None
    with pytest.raises(ModelError, match=r"tensor token_embd.weight needs \d+ bytes at \d+, the file has \d+"):
        GGUFTensors(gguf_file, gguf_config)


@pytest.mark.parametrize(("type_id", "named"), [(99, "99"), (gguf.GGMLQuantizationType.I32, "I32")])
def test_a_gguf_tensor_of_a_type_without_values_is_refused(
    tmp_path: Path, gguf_config: ModelConfig, type_id: int, named: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(64))
    tensor = GGUFTensor("output_norm.weight", (4,), type_id, 0)
    with pytest.raises(ModelError, match=rf"tensor output_norm.weight: .*{named}"):
        GGUFTensors(GGUFFile(path, {}, {tensor.name: tensor}, 0), gguf_config).read("model.norm.weight")
