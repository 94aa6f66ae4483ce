"""Results as JSON: everything that the tables and plots are made of, down to each sample."""

from pathlib import Path

import msgspec

from common.errors import ConfigError


def check_json_path(path: str) -> None:
    """Before hours of measuring. Raises: ConfigError."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise ConfigError(f"--json: got {path}, wanted a file in a folder that exists, {folder} does not")


def write_json(report: object, path: str) -> None:
    """report: a dataclass of results, whose fields give the names. Raises: ConfigError."""
    try:
        Path(path).write_bytes(msgspec.json.encode(report))
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}") from error
