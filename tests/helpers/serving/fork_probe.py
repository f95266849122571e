"""Sees every fork() of a process, whoever calls it: a pthread_atfork handler, as OpenBLAS has one.

`watch` writes a `sitecustomize.py`; a Python that is started with the environment it returns notes
each fork, also one that a native library makes. The notes name the process that forked.
"""

from __future__ import annotations

import os
from pathlib import Path

_SITE = """
import ctypes, os

def note(what):
    log = os.open(os.environ["FORK_PROBE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, f"{what} {os.getpid()}\\n".encode())
    os.close(log)

@ctypes.CFUNCTYPE(None)
def forking():
    note("fork")

note("watched")
ctypes.CDLL(None).__register_atfork(forking, None, None, None)
"""


def watch(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(_SITE)
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(folder), inherited)))
    return {"PYTHONPATH": path, "FORK_PROBE": str(folder / "forks")}


def forks(folder: Path, pid: int) -> int:
    """How many were seen of one process, which must have been watched."""
    notes = (folder / "forks").read_text().splitlines()
    assert f"watched {pid}" in notes
    return notes.count(f"fork {pid}")
