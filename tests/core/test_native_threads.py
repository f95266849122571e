"""core/spawn.py: the gateway's libraries have one thread, workers their own."""

from __future__ import annotations

import os
import subprocess
import sys

from coterie.core.spawn import environment

PINNED = """
import os, sys
import coterie.cli.serve
from coterie.core import spawn
assert "numpy" not in sys.modules
spawn.pin_native_threads()
import numpy
numpy.ones((600, 600)) @ numpy.ones((600, 600))
after = spawn.environment()
print(len(os.listdir("/proc/self/task")), after["OPENBLAS_NUM_THREADS"], "OMP_NUM_THREADS" in after)
"""


def test_libraries_of_the_gateway_have_one_thread_and_workers_do_not_know() -> None:
    env = {**os.environ, **environment({"OPENBLAS_NUM_THREADS": "2"})}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", PINNED], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["1", "2", "False"], done.stderr
