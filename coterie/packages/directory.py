"""Reads a PEFT directory on this machine as if it were a package.

Takes the files on the allow-list and reports those it left out. A manifest.json in it is used;
otherwise one is made from the folder's name and the digest. A directory without safetensors is
refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError
from coterie.packages import manifest as manifests
from coterie.packages.archive import FileChecker, Package, PackageFile, assemble, read_config
from coterie.packages.manifest import name_from, version_of
from coterie.packages.paths import (
    CONFIG,
    MANIFEST,
    MAX_DEPTH,
    WEIGHTS,
    adapter_digest,
    check_path,
    check_together,
    chunks_of,
    is_known,
    is_pickle,
    is_tensors,
    open_regular,
)
from coterie.packages.tar_stream import LIMITS

_MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    # package name -> file, without a link in its path
    files: dict[str, Path]
    left_out: tuple[str, ...]


def collect(directory: Path) -> CollectedFiles:
    """All files of `directory` that a package may hold. The adapter files must exist."""
    if not directory.is_dir():
        raise WeightsError(f"{directory}: no such directory. Check the path.")
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for path in _listed(directory):
        name = path.relative_to(directory).as_posix()
        if is_known(name):
            files[check_path(name.encode(), str(directory))] = _real_path(path, directory)
        else:
            left_out.append(name)
    for name in (CONFIG, WEIGHTS):
        if name not in files:
            raise WeightsError(f"{directory}: {_why_missing(directory, name)}")
    check_together(files, str(directory))
    return CollectedFiles(files, tuple(sorted(left_out)))


def open_directory(directory: Path) -> Package:
    """Checks every file as `inspect` does, without copying."""
    files: dict[str, PackageFile] = {}
    contents: dict[str, bytes] = {}
    texts = 0
    for name, path in collect(directory).files.items():
        files[name], data = _checked(name, path, directory)
        texts += 0 if is_tensors(name) else files[name].size
        if texts > LIMITS.texts_bytes or len(files) > LIMITS.entries:
            raise WeightsError(f"{directory}: refused, more texts than an expert has. Check it.")
        if data is not None:
            contents[name] = data
    if MANIFEST not in contents:
        document = _default_manifest(directory, files, contents[CONFIG])
        contents[MANIFEST] = manifests.write(manifests.from_document(document))
        files[MANIFEST] = PackageFile.of(contents[MANIFEST])
    return assemble(files, contents, directory, str(directory))


def _default_manifest(
    directory: Path, files: dict[str, PackageFile], config: bytes
) -> dict[str, Any]:
    base = read_config(config, f"{directory}: {CONFIG}").base_model
    digest = adapter_digest(files[CONFIG].sha256, files[WEIGHTS].sha256)
    return {
        "schema_version": "2.0",
        "name": name_from(directory.resolve().name),
        "version": version_of(digest),
        "base_models": [{"name": base}] if base else [],
    }


def _checked(name: str, path: Path, directory: Path) -> tuple[PackageFile, bytes | None]:
    try:
        with open_regular(path, resolved=True) as file:
            size = os.fstat(file.fileno()).st_size
            if size > (LIMITS.total_bytes if is_tensors(name) else LIMITS.text_bytes):
                raise WeightsError(f"{path}: refused, {size} bytes are too many for it.")
            checker = FileChecker(name, size, str(directory), keep=False)
            for chunk in chunks_of(file, size, str(path)):
                checker.feed(chunk)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Check it.") from error
    contents = checker.finish()
    return PackageFile(size, checker.sha256), contents


def _listed(directory: Path) -> list[Path]:
    try:
        return _walk(directory, MAX_DEPTH)
    except OSError as error:
        raise WeightsError(f"{directory}: cannot be read ({error.strerror}). Check it.") from error


def _real_path(path: Path, directory: Path) -> Path:
    """The path without links. The author of the folder must not be able to include other files of
    this machine. Only the Hugging Face cache keeps its files elsewhere, in `blobs` next to
    `snapshots`."""
    target, home = path.resolve(), directory.resolve()
    if home in target.parents or target.parent == home.parent.parent / "blobs":
        return target
    raise WeightsError(f"{path}: refused, a link to a file outside {directory}. Copy the file.")


def _walk(directory: Path, depth: int) -> list[Path]:
    paths: list[Path] = []
    for path in sorted(directory.iterdir()):
        if path.is_file():
            paths.append(path)
        elif path.is_dir() and not path.is_symlink() and depth > 1:
            paths += _walk(path, depth - 1)
        if len(paths) > _MAX_FILES:
            raise WeightsError(f"{directory}: too many files for an adapter. Check the path.")
    return paths


def _why_missing(directory: Path, name: str) -> str:
    if name == WEIGHTS and any(is_pickle(path.name) for path in directory.iterdir()):
        return (
            "holds its weights as a pickle, which can run code and is refused. Save it again "
            "with safetensors (PEFT's save_pretrained does)."
        )
    return f"no {name} in it. Give a directory as PEFT's save_pretrained writes it."
