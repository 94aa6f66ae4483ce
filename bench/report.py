"""Results as JSON: everything that the tables and plots are made of, and each request's times."""

from pathlib import Path

import msgspec

from bench.gateway_figures import GatewayReport
from bench.results import Report
from common.errors import ConfigError


def check_json_path(path: str) -> None:
    """Before hours of measuring. Raises: ConfigError."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise ConfigError(f"--json: got {path}, wanted a file in a folder that exists, {folder} does not")


def write_json(report: Report | GatewayReport, path: str) -> None:
    """Field names are those of `Report`, `Run`, `RunFigures` and `RequestFigures`, or `GatewayReport`.

    Raises: ConfigError.
    """
    try:
        Path(path).write_bytes(msgspec.json.encode(report))
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}") from error
