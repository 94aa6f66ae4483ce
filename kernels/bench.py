"""Times of single ops, as the chosen kernels run them: `python -m kernels.bench --help`.

On cores: cpu_bench; on a GPU: gpu_bench; of collectives: group_bench.
"""

import argparse
import sys
from collections.abc import Sequence

from kernels import cpu_bench, gpu_bench, group_bench


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when the kernels cannot do what is asked."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["all_reduce"]:
        return group_bench.main(argv[1:])
    device = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    device.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="each has its own options below")
    chosen, _ = device.parse_known_args(argv)
    return (cpu_bench if chosen.device == "cpu" else gpu_bench).main(argv, device)


if __name__ == "__main__":
    raise SystemExit(main())
