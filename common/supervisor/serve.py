"""`baton serve` as a whole."""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common.config import ServeCommand
from common.errors import ConfigError
from common.supervisor.display import Display
from common.supervisor.plan import plan_children
from common.supervisor.runtime_dir import RuntimeDir
from common.supervisor.supervisor import Supervisor

_NUM_KEPT_LOG_DIRS = 20


def run(command: ServeCommand, program: Sequence[str]) -> int:
    """Serve until stopped; return the exit code. program: what runs `baton`, such as (python, baton.py).

    Raises: ConfigError if there is no usable place for sockets or logs.
    """
    log_dir = _make_log_dir(command.serve.log_dir)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    with RuntimeDir() as runtime_dir:
        plans = plan_children(command, program, runtime_dir.path)
        return Supervisor(plans, Display(sys.stdout, width), log_dir, bool(command.http.api_key)).run()


def _make_log_dir(given: str) -> Path:
    if given:
        log_dir = Path(given).absolute()
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        log_dir = cache / "baton" / "logs" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        if not given:
            _remove_oldest(log_dir.parent)
    except OSError as error:
        raise ConfigError(f"--log-dir: got {log_dir}, wanted a folder that can be written to: {error}") from error
    return log_dir


def _remove_oldest(parent: Path) -> None:
    """Keep the folders of the latest starts; their names sort by time."""
    for old in sorted(path for path in parent.iterdir() if path.is_dir())[:-_NUM_KEPT_LOG_DIRS]:
        shutil.rmtree(old, ignore_errors=True)
