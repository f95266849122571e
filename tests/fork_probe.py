"""Sees every fork() of a process, whoever calls it: a pthread_atfork handler, as OpenBLAS has one.

`watch` writes a `sitecustomize.py`; a Python that is started with the environment it returns notes
each fork, also one that a native library makes. The notes name the process that forked.
"""

from __future__ import annotations

import os
from pathlib import Path

_SITE = """
import ctypes, os

@ctypes.CFUNCTYPE(None)
def forking():
    log = os.open(os.environ["FORK_PROBE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, f"{os.getpid()}\\n".encode())
    os.close(log)

ctypes.CDLL(None).__register_atfork(forking, None, None, None)
"""


def watch(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(_SITE)
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(folder), inherited)))
    return {"PYTHONPATH": path, "FORK_PROBE": str(folder / "forks")}


def forks(folder: Path) -> list[int]:
    """The process of each fork that was seen."""
    notes = folder / "forks"
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []
