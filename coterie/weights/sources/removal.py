"""Removes fetched models, and what has arrived of those whose download was broken off.

Only below the models folder: what somebody put elsewhere is theirs to delete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coterie.core.errors import Conflict, WeightsError
from coterie.weights.files import try_lock
from coterie.weights.home import models_dir
from coterie.weights.sources import hub, pypi
from coterie.weights.sources.names import close_names, find_named
from coterie.weights.sources.source import (
    CachedModel,
    folder_bytes,
    hub_drafts,
    list_cached,
    staging_folder,
)


@dataclass(frozen=True, slots=True)
class RemovedModel:
    source: str
    nbytes: int


def remove(text: str) -> RemovedModel:
    """Removes the model that a short name, a source or a path below the models folder means."""
    named = find_named(text)
    source = named.source if named is not None else text
    if source.startswith(("pypi:", "hf:")):
        return _remove_source(text, source)
    path = Path(os.path.abspath(Path(text).expanduser()))
    root = Path(os.path.abspath(models_dir()))
    if path.is_relative_to(root) and path != root:
        folder = root / path.relative_to(root).parts[0]
        for model in list_cached():
            if model.folder == folder:
                return _remove_folder(model)
    elif path.exists():
        raise WeightsError(
            f"{text}: outside the models folder {root}, so it was not fetched by Coterie. Delete "
            "it yourself."
        )
    raise _unknown(text)


def _remove_source(text: str, source: str) -> RemovedModel:
    found = [model for model in list_cached() if _is_meant(source, model.source)]
    if len(found) > 1:
        names = ", ".join(model.source for model in found)
        raise Conflict(f"{text}: {len(found)} models are meant: {names}. Name one of them.")
    if found:
        return _remove_folder(found[0])
    kind, _, spec = source.partition(":")
    unfinished = _parts_of_hub(spec) if kind == "hf" else _parts_of_wheel(spec)
    if unfinished is None:
        raise _unknown(text)
    return _remove_parts(source, *unfinished)


def _parts_of_hub(spec: str) -> tuple[list[Path], Path] | None:
    """What has arrived, and the lock that a download of it holds."""
    model = hub.parse(spec)
    drafts = hub_drafts(model)
    lock = staging_folder() / f"{hub.repository(model).folder}.lock"
    return (drafts, lock) if drafts else None


def _parts_of_wheel(spec: str) -> tuple[list[Path], Path] | None:
    name, _ = pypi.parse(spec)
    parts = list(staging_folder().glob(f"*-{name.replace('-', '_')}-*.whl.part"))
    return (parts, staging_folder() / f"pypi-{name}.lock") if parts else None


def _is_meant(wanted: str, source: str) -> bool:
    """Whether a model's source is the wanted one, or is what was chosen for it."""
    kind, _, spec = wanted.partition(":")
    here_kind, _, here_spec = source.partition(":")
    if kind != here_kind:
        return False
    if kind == "pypi":
        name, version = pypi.parse(spec)
        return (name, version or pypi.parse(here_spec)[1]) == pypi.parse(here_spec)
    asked, here = hub.parse(spec), hub.parse(here_spec)
    return asked in (here, hub.repository(here))


def _remove_folder(model: CachedModel) -> RemovedModel:
    nbytes = 0 if model.folder.is_symlink() else folder_bytes(model.folder)
    if model.folder.is_symlink():
        model.folder.unlink()
        return RemovedModel(model.source, nbytes)
    # it is gone at once, also for a process that looks for it meanwhile
    going = staging_folder() / f"{model.folder.name}.removed"
    shutil.rmtree(going, ignore_errors=True)
    going.parent.mkdir(parents=True, exist_ok=True)
    os.replace(model.folder, going)
    shutil.rmtree(going)
    return RemovedModel(model.source, nbytes)


def _remove_parts(source: str, parts: list[Path], lock: Path) -> RemovedModel:
    with _free_lock(lock, source):
        nbytes = 0
        for path in parts:
            if path.is_dir():
                nbytes += folder_bytes(path)
                shutil.rmtree(path)
            else:
                nbytes += path.stat().st_size
                path.unlink()
    return RemovedModel(f"{source} (unfinished)", nbytes)


@contextmanager
def _free_lock(path: Path, source: str) -> Iterator[None]:
    """The lock of a download, if nobody holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not try_lock(handle):
            raise Conflict(f"{source}: is being fetched now. End that first.")
        yield
    finally:
        os.close(handle)


def _unknown(text: str) -> WeightsError:
    here = [model.source for model in list_cached()]
    close = [name for name in close_names(text) if _is_here(name, here)]
    meant = f" Did you mean {', '.join(close)}?" if close else ""
    return WeightsError(
        f"{text}: no such model on this machine.{meant} `coterie list` shows those that are here."
    )


def _is_here(name: str, here: list[str]) -> bool:
    named = find_named(name)
    return named is not None and any(_is_meant(named.source, source) for source in here)
