"""transformers probes for a package named `kernels`; ours must not confuse it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import kernels
from transformers import AutoConfig
print(kernels.__file__)
print(AutoConfig.from_pretrained(sys.argv[1]).num_hidden_layers)
"""


def test_autoconfig_loads_with_our_kernels_importable(tmp_path: Path) -> None:
    """In a process of its own: what transformers found at import stays with it."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 7}')
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == [str(ROOT / "kernels" / "__init__.py"), "7"], result.stderr
