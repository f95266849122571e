"""A worker process that is started before the server knows what it will load.

It imports torch and the engine, which takes two seconds, while the server imports its own modules.
The first engine that starts takes it over; see child.py.
"""

from __future__ import annotations

import sys

from coterie.core.spawn import PIPE, ChildProcess, environment, spawn

# in the place of a socket's address: that is the first message
ADDRESS_FOLLOWS = "-"

_begun: dict[int, ChildProcess] = {}


def begin(threads: int) -> None:
    """Start a worker for an engine with so many threads."""
    if threads not in _begun:
        command = [sys.executable, "-m", "coterie.workers.child", ADDRESS_FOLLOWS]
        env = worker_environment(threads)
        _begun[threads] = spawn(command, env, stdin=PIPE, stdout=PIPE)


def take(threads: int) -> ChildProcess | None:
    """The process that was begun, if it still runs. It belongs to the caller from now on."""
    child = _begun.pop(threads, None)
    if child is None or child.poll() is None:
        return child
    child.close()
    return None


def discard() -> None:
    """End what nobody took."""
    while _begun:
        _, child = _begun.popitem()
        child.kill()
        child.wait()
        child.close()


def worker_environment(threads: int) -> dict[str, str]:
    env = environment()
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return env
