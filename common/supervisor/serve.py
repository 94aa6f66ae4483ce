"""`baton serve` as a whole."""

import shutil
import sys
from collections.abc import Sequence

from common.config import ServeCommand
from common.model_files import find_model, longest_sequence
from common.supervisor.display import Display
from common.supervisor.log_dir import LogDir
from common.supervisor.plan import plan_children
from common.supervisor.runtime_dir import RuntimeDir
from common.supervisor.supervisor import Supervisor


def run(command: ServeCommand, program: Sequence[str]) -> int:
    """Serve until stopped; return the exit code. program: what runs `baton`, such as (python, baton.py).

    Raises: ModelError, ConfigError if the model, or the place for sockets or logs, is not usable: said once, here,
    before any process is there to say it.
    """
    longest_sequence(find_model(command.model.model), command.model.max_model_len)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    with LogDir(command.serve.log_dir) as log_dir, RuntimeDir() as runtime_dir:
        plans = plan_children(command, program, runtime_dir.path)
        return Supervisor(plans, Display(sys.stdout, width), log_dir.path, bool(command.http.api_key)).run()
