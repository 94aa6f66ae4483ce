"""Reading a GGUF file's header, and what its metadata mean by Hugging Face's names."""

import random
from pathlib import Path

import gguf
import numpy as np
import pytest

from common.errors import ModelError
from common.gguf_config import gguf_to_config, gguf_to_eos_token_ids
from common.gguf_file import read_gguf
from tests import gguf_models

EMBEDDING = {"token_embd.weight": np.zeros((257, 96), np.float32)}


def test_metadata_become_a_config(tmp_path: Path) -> None:
    changes = {"llama.rope.freq_base": 5000.0}
    config = gguf_to_config(read_gguf(gguf_models.write(tmp_path / "m.gguf", changes)))
    assert config.pop("rms_norm_eps") == pytest.approx(1e-6)
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "vocab_size": 257,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "sliding_window": None,
    }


def test_tensors_tell_of_an_own_head_and_of_biases(tmp_path: Path) -> None:
    names = ("blk.0.attn_q.bias", "blk.0.ffn_gate.bias", "output.weight")
    tensors = EMBEDDING | {name: np.zeros(4, np.float32) for name in names}
    config = gguf_to_config(read_gguf(gguf_models.write(tmp_path / "m.gguf", tensors=tensors)))
    assert (config["attention_bias"], config["mlp_bias"], config["tie_word_embeddings"]) == (True, True, False)


def test_absent_keys_have_llama_cpps_defaults(tmp_path: Path) -> None:
    absent = {"llama.attention.head_count_kv": None, "llama.rope.dimension_count": None}
    config = gguf_to_config(read_gguf(gguf_models.write(tmp_path / "m.gguf", absent)))
    assert (config["num_key_value_heads"], config["head_dim"]) == (6, 16)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_rope_scaling_is_by_name_or_by_a_tensor_of_factors(tmp_path: Path) -> None:
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    named = gguf_to_config(read_gguf(gguf_models.write(tmp_path / "named.gguf", scaling)))
    assert named["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    tensors = EMBEDDING | {"rope_freqs.weight": np.array([1, 1, 2.5, 8], np.float32)}
    listed = gguf_to_config(read_gguf(gguf_models.write(tmp_path / "listed.gguf", tensors=tensors)))
    assert listed["rope_parameters"] == {"rope_type": "factors", "rope_theta": 10000.0, "factors": [1, 1, 2.5, 8]}


def test_ends_of_text_turn_and_message_all_end_the_output(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert gguf_to_eos_token_ids(read_gguf(gguf_models.write(tmp_path / "several.gguf", changes))) == (2, 7)
    none = gguf_models.write(tmp_path / "none.gguf", {"tokenizer.ggml.eos_token_id": None})
    assert gguf_to_eos_token_ids(read_gguf(none)) == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.context_length": None}, r"llama\.context_length is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.block_count": 0}, "block_count must be a positive integer, got 0"),
        ({"llama.embedding_length": "wide"}, "embedding_length must be a positive integer, got 'wide'"),
        ({"llama.rope.scaling.type": "linear"}, "scaling.factor is missing"),
        ({"llama.rope.dimension_count": 4}, "dimension_count must be the head's 16, got 4"),
        ({"split.count": 3}, "one of 3"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        gguf_to_config(read_gguf(gguf_models.write(tmp_path / "m.gguf", changes)))


def test_another_architecture_is_named_before_its_missing_keys(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must be one of llama, got 'mamba'"):
        gguf_to_config(read_gguf(gguf_models.write(tmp_path / "m.gguf", arch="mamba")))


@pytest.mark.parametrize("tensors", [{}, {"token_embd.weight": np.zeros(5, np.float32)}])
def test_a_file_without_an_embedding_matrix_is_refused(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight must be a matrix"):
        gguf_to_config(read_gguf(gguf_models.write(tmp_path / "m.gguf", tensors=tensors)))


def test_every_value_and_tensor_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    changes = {
        "a.text": "naïve 🙂",
        "a.flag": True,
        "a.numbers": [1, -2, 3],
        "a.scores": [0.5, -1.25],
        "a.texts": ["", "Ġthe", "🙂"],
        "general.alignment": 64,
    }
    tensors = EMBEDDING | {"norm.weight": np.arange(6, dtype=np.float32)}
    path = gguf_models.write(tmp_path / "m.gguf", changes, tensors)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.data_offset == theirs.data_offset
    assert {tensor.name: (tensor.data_offset, int(tensor.tensor_type)) for tensor in theirs.tensors} == {
        tensor.name: (tensor.offset, tensor.type_id) for tensor in ours.tensors.values()
    }
    assert ours.tensors["token_embd.weight"].shape == (257, 96)


def test_a_header_cut_off_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = read_gguf(gguf_models.write(tmp_path / "m.gguf"))
    data = whole.path.read_bytes()
    cut = tmp_path / "cut.gguf"
    # The padding before the first tensor may be missing: no value is.
    for length in range(whole.data_offset - 32):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_a_damaged_header_is_refused_or_read_but_never_crashes(tmp_path: Path) -> None:
    whole = read_gguf(gguf_models.write(tmp_path / "m.gguf", {"a.texts": ["one", "two"], "a.numbers": [1, 2]}))
    data = whole.path.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    source = random.Random(1)
    num_refused = 0
    for _ in range(2000):
        header = bytearray(data)
        for _ in range(source.randint(1, 4)):
            header[source.randrange(whole.data_offset)] = source.choice((0, 1, 8, 9, 127, 255))
        damaged.write_bytes(header)
        try:
            gguf_to_config(read_gguf(damaged))
        except ModelError:
            num_refused += 1
    assert 200 < num_refused < 2000


@pytest.mark.parametrize(
    ("data", "named"),
    [(b"", "empty"), (b"GGML" + bytes(60), "magic"), (b"GGUF\x01" + bytes(60), "version must be one of")],
)
def test_what_is_no_gguf_of_a_known_version_is_refused(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=named):
        read_gguf(path)
