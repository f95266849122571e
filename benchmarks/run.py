"""`make bench`: Coterie alone, all benchmarks that need no peer and no GPU, in a few minutes.

With the peers: `make bench-peers`. On a GPU: `python3 -m benchmarks.moe.gpu`
and `benchmarks.dense.gpu`.
"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    ("benchmarks.kernels.cpu",),
    ("benchmarks.serving.engine_step",),
    ("benchmarks.serving.gateway_cpu",),
    ("benchmarks.dense.cpu", "--only", "coterie,transformers fp32", "--rounds", "1"),
    ("benchmarks.adapters.cpu", "--only", "coterie", "--rounds", "1"),
    ("benchmarks.adapters.switch",),
)


def main() -> int:
    failed = []
    for name, *arguments in BENCHMARKS:
        print(f"\n== {name} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, "-m", name, *arguments]).returncode != 0:
            failed.append(name)
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
