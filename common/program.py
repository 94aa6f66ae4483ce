"""What runs `baton`, for processes that start others."""

import sys
from pathlib import Path

PROGRAM = (sys.executable, str(Path(__file__).resolve().parents[1] / "baton.py"))
