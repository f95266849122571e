"""The folders that Coterie writes to: models, compiled kernels, state.

`$COTERIE_HOME` contains everything if it is set. Otherwise the platform's user directories are
used: the cache directory for what can be fetched or built again, the state directory for the rest.
Creates no folder; the code that writes creates it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENV = "COTERIE_HOME"


def home() -> Path:
    """The folder that holds models/ and kernels/ (and state/ under `$COTERIE_HOME`)."""
    return _override() or _cache_directory()


def models_dir() -> Path:
    return home() / "models"


def kernels_dir() -> Path:
    return home() / "kernels"


def state_dir() -> Path:
    """Keys and records that cannot be fetched again: never in a cache folder that people delete."""
    override = _override()
    return override / "state" if override else _state_directory() / "state"


def _override() -> Path | None:
    value = os.environ.get(ENV, "").strip()
    return Path(value).expanduser().absolute() if value else None


def _cache_directory() -> Path:
    if sys.platform == "win32":
        return _local_app_data() / "coterie" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "coterie"
    return _xdg("XDG_CACHE_HOME", ".cache") / "coterie"


def _state_directory() -> Path:
    if sys.platform == "win32":
        return _local_app_data() / "coterie"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "coterie"
    return _xdg("XDG_STATE_HOME", ".local/state") / "coterie"


def _local_app_data() -> Path:
    value = os.environ.get("LOCALAPPDATA", "")
    return Path(value) if value else Path.home() / "AppData" / "Local"


def _xdg(variable: str, default: str) -> Path:
    # the XDG specification says that relative paths are ignored
    value = os.environ.get(variable, "")
    return Path(value) if os.path.isabs(value) else Path.home() / default
