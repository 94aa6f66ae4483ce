"""Times of single ops, as the chosen kernels run them: `python -m kernels.bench --help`.

On cores: cpu_bench; of collectives: group_bench.
"""

import sys
from collections.abc import Sequence

from kernels import cpu_bench, group_bench


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when the kernels cannot do what is asked."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["all_reduce"]:
        return group_bench.main(argv[1:])
    return cpu_bench.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
