"""Folders of this process in a place that others use too, and what killed processes left there."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def make_own_folder(parent: Path, prefix: str = "") -> Path:
    """A new folder `PREFIX<pid>-...` that only this user can enter. Removes those of processes that
    have ended: one that was killed could not."""
    remove_left_folders(parent, prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))


def remove_left_folders(parent: Path, prefix: str = "") -> None:
    """What this user has under such a name for processes that have ended."""
    if not Path("/proc/self").exists():
        return
    named = re.compile(re.escape(prefix) + r"(\d+)-")
    for entry in os.scandir(parent):
        owner = named.match(entry.name)
        if owner is None or Path(f"/proc/{owner[1]}").exists():
            continue
        with suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.geteuid():
                continue
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
