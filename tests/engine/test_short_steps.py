"""Memory that the system refuses for a step: smaller steps, the same answers, and it is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_step_for_which_memory_is_refused_is_computed_in_smaller_ones() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.helpers.serving.short_steps"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["same"] and not told["failed"]
    assert told["shortages"] >= 1 and told["of_several"] >= 1
    # its steps cannot be smaller: a typed error, and the next request succeeds
    [(code, message)] = told["refused"]
    assert code == "unavailable" and "memory" in message
    assert told["again"]
