"""Folders and files of the state, which hold what belongs to tenants: for their owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from coterie.core.errors import ConfigError

FOLDER, FILE = 0o700, 0o600


def private_folder(path: Path) -> Path:
    """Make the folder and its missing parents, for their owner alone; one that others may enter is
    closed. Raises ConfigError if that cannot be done."""
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=FOLDER, exist_ok=True)
        _narrow(path, FOLDER)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def private_file(path: Path) -> None:
    """Make the file if it is missing, for its owner alone; one that others may read is closed."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE))
        _narrow(path, FILE)
    except OSError as error:
        raise unwritable(path, error) from error


def narrow_file(path: Path) -> None:
    """Close a file that others may read, if it is there."""
    if path.exists():
        _narrow(path, FILE)


def unwritable(path: Path | str, error: OSError) -> ConfigError:
    """What to do about a home folder that cannot be written."""
    return ConfigError(
        f"{path}: cannot be written ({error.strerror or error}). Models, compiled kernels and "
        "state are kept there: make the folder writable, or set COTERIE_HOME to one that is",
        param="COTERIE_HOME",
    )


def _narrow(path: Path, mode: int) -> None:
    status = path.stat()
    is_ours = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if is_ours and stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(mode)
