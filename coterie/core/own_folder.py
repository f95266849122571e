"""Folders of this process in a place that others use too, and what killed processes left there.

A folder is locked as long as its process lives: a process id says nothing where containers share
the place.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# (parent, prefix) that this process has cleaned up: a place may have many other entries
_cleaned: set[tuple[Path, str]] = set()
# folder -> what holds its lock
_locks: dict[Path, int] = {}


def make_own_folder(parent: Path, prefix: str = "") -> Path:
    """A new folder `PREFIX<pid>-...` that only this user can enter; `remove_own_folder` removes it.
    The first call removes those of processes that have ended: one that was killed could not."""
    if (parent, prefix) not in _cleaned:
        _cleaned.add((parent, prefix))
        remove_left_folders(parent, prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
        handle = _locked(folder)
        if folder.exists():
            break
        # another process found it before it was locked
        _close(handle)
    if handle is not None:
        _locks[folder] = handle
    return folder


def remove_own_folder(folder: Path) -> None:
    """With all that is in it; what cannot be removed stays."""
    shutil.rmtree(folder, ignore_errors=True)
    release_own_folder(folder)


def release_own_folder(folder: Path) -> None:
    """It was removed, or anybody may remove it."""
    _close(_locks.pop(folder, None))


def remove_left_folders(parent: Path, prefix: str = "") -> None:
    """What this user has under such a name for processes that have ended."""
    if not Path("/proc/self").exists():
        return
    named = re.compile(re.escape(prefix) + r"(\d+)-")
    for entry in os.scandir(parent):
        owner = named.match(entry.name)
        # an earlier release locks nothing
        if owner is None or Path(f"/proc/{owner[1]}").exists():
            continue
        with suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid():
                continue
            if stat.S_ISDIR(status.st_mode):
                handle = _locked(Path(entry.path))
                try:
                    if handle is not None:
                        shutil.rmtree(entry.path)
                finally:
                    _close(handle)
            else:
                os.unlink(entry.path)


def _locked(folder: Path) -> int | None:
    """An open file with the lock of the folder; None if another process has it."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)
