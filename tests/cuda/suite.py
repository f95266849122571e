"""Named checks that print a line each, without pytest.

Checks of one group run one after the other in one process. On a device every group has a process of
its own, several at a time: a kernel that breaks the device or hangs takes only its group with it,
and compiling kernels, which takes most of the time, uses all cores.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

ROOT = Path(__file__).resolve().parents[2]
# of one group
LIMIT_S = 420.0
OK, SKIPPED, FAILED = "ok", "skipped", "FAILED"


class NotHere(Exception):
    """This machine cannot run the check."""


@dataclass(frozen=True)
class Check:
    """`run` returns what was seen, in a few words; it raises if that is wrong."""

    group: str
    name: str
    run: Callable[[], str]


def wanted(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    """Those whose names contain one of `only`; all of them if that is empty."""
    return [check for check in checks if not only or any(text in check.name for text in only)]


def run_here(checks: Sequence[Check]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for check in checks:
        started, state = time.perf_counter(), OK
        try:
            seen = check.run()
        except NotHere as reason:
            state, seen = SKIPPED, str(reason)
        except Exception as problem:
            state, seen = FAILED, _told(problem)
        counts[state] += 1
        spent = time.perf_counter() - started
        print(f"{state:7} {check.name}: {seen} ({spent:.1f} s)", flush=True)
    return counts


def run_in_processes(checks: Sequence[Check], jobs: int, options: Sequence[str]) -> Counter[str]:
    """`options`: those of this program, for its children."""
    groups = list(dict.fromkeys(check.group for check in checks))
    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(lambda group: _run_group(group, options), groups), Counter())


def _run_group(group: str, options: Sequence[str]) -> Counter[str]:
    command = [sys.executable, "-u", "-m", "tests.cuda", "--group", group, *options]
    counts: Counter[str] = Counter()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        watch = Timer(LIMIT_S, child.kill)
        watch.start()
        assert child.stdout is not None
        for line in child.stdout:
            state = line.split(" ", 1)[0].strip()
            if state in (OK, SKIPPED, FAILED):
                counts[state] += 1
                print(line, end="", flush=True)
        status = child.wait()
        watch.cancel()
    # 1 is the status of a group with failed checks
    if status not in (0, 1) or not counts:
        counts[FAILED] += 1
        print(f"{FAILED:7} {group}: its process ended with status {status}", flush=True)
    return counts


def summary(counts: Counter[str], seconds: float) -> int:
    """Print it. The exit status: a name that matches nothing is a mistake."""
    told = ", ".join(f"{counts[state]} {state}" for state in (OK, SKIPPED, FAILED))
    print(f"{told}; {seconds:.0f} s", flush=True)
    return int(counts[FAILED] > 0 or not counts.total())


def _told(problem: Exception) -> str:
    where = traceback.extract_tb(problem.__traceback__)[-1]
    place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
    return f"{type(problem).__name__} at {place}: {' '.join(str(problem).split())[:600]}"
