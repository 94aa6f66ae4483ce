"""A supervisor over fake children: `python fake_serve.py LOG_DIR name=behaviour …`; the rest is the real thing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from common.supervisor.display import Display
from common.supervisor.plan import ChildPlan
from common.supervisor.supervisor import Supervisor

child = str(Path(__file__).with_name("fake_child.py"))
log_dir = Path(sys.argv[1])
PROGRAMS = {"worker-without-python": str(log_dir / "python")}
plans = [
    ChildPlan(name, (PROGRAMS.get(behaviour, sys.executable), child, behaviour, str(log_dir / f"{name}.marker")), {})
    for name, _, behaviour in (argument.partition("=") for argument in sys.argv[2:])
]
sys.exit(Supervisor(plans, Display(sys.stdout, width=None), log_dir, has_api_key=False).run())
