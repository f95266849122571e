"""`coterie state`: the state folder in one file, and back.

An archive is a gzipped tar of regular files. The first one, state.json, lists all others with
sizes and digests; a restore takes what is listed there and nothing else. Databases are copied by
SQLite, so that a backup made beside a running server is of one moment for each of them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from coterie import __version__
from coterie.cli.terminal import ActionMenu, Tick, choose, facts, nbytes, progress, show
from coterie.core.errors import ConfigError, Conflict, WeightsError
from coterie.core.private_files import private_folder
from coterie.weights.home import state_dir

HELP = "back up what cannot be fetched again, and restore it"
EPILOG = """\
examples:
  coterie state backup                       coterie-state-20261119-2100.tar.gz
  coterie state backup /mnt/nightly.tar.gz   also while a server runs
  coterie state restore nightly.tar.gz

The state is experts, keys, jobs, batches, receipts, stored responses, trained
routers and heatmaps. Models and compiled kernels are not in it.
"""
_BACKUP = """\
examples:
  coterie state backup
  coterie state backup /mnt/nightly.tar.gz

The file is for its owner alone: it holds private keys, prompts and answers.
Running servers go on; each database is copied as of one moment.
"""
_RESTORE = """\
examples:
  coterie state restore nightly.tar.gz
  coterie state restore nightly.tar.gz --replace

Everything is checked before anything is changed. With --replace the state that
is here moves aside, to state.before-DATE, and nothing of it is deleted. No
server may run on it.
"""

FORMAT, LISTING = 1, "state.json"
# of running processes, or made again by them
_TEMPORARY_FOLDERS = frozenset({"run", "staging"})
_TEMPORARY_SUFFIXES = (".owners", ".lock", ".db-wal", ".db-shm", ".new", ".part")
MAX_LISTING_BYTES = 64 << 20
MAX_PADDING_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    size: int
    sha256: str
    mode: int


def configure(parser: argparse.ArgumentParser) -> None:
    menu = ActionMenu(parser)
    action = menu.add("backup", backup, "write the state to one file", _BACKUP)
    action.add_argument("file", nargs="?", metavar="FILE", help="(default: named by the date)")
    action.add_argument("--json", action="store_true", help="print JSON")
    action = menu.add("restore", restore, "take the state from such a file", _RESTORE)
    action.add_argument("file", metavar="FILE", help="as `backup` writes it")
    action.add_argument(
        "--replace", action="store_true", help="move the state that is here aside first"
    )
    action.add_argument("--json", action="store_true", help="print JSON")


execute = choose


def backup(args: argparse.Namespace) -> int:
    source = state_dir()
    if not source.is_dir():
        raise ConfigError(f"there is no state in {source}: nothing to back up", param="state")
    moment = time.strftime("%Y%m%d-%H%M%S")
    target = Path(args.file or f"coterie-state-{moment}.tar.gz")
    if target.exists():
        raise ConfigError(f"{target} exists: name another file", param="file")
    with tempfile.TemporaryDirectory(prefix="coterie-backup-") as folder:
        files = _copied(source, Path(folder))
        with progress("backing up") as tick:
            stored = _write(target, files, tick)
    total = sum(file.size for file in stored.values())
    size = target.stat().st_size
    report = {"file": str(target), "files": len(stored), "bytes": total, "archive_bytes": size}
    return show(args, report, f"{target}: {len(stored)} files, {nbytes(total)} ({nbytes(size)})")


def restore(args: argparse.Namespace) -> int:
    target = state_dir()
    is_taken = target.is_dir() and any(target.iterdir())
    if is_taken and not args.replace:
        raise Conflict(f"there is a state in {target}: --replace moves it aside", param="replace")
    _refuse_running(target)
    private_folder(target.parent)
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.restored-", dir=target.parent))
    try:
        listing = _read(Path(args.file), draft)
        aside = _swap(draft, target, is_taken)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    total = sum(file.size for file in listing.values())
    pairs = [("restored", f"{len(listing)} files, {nbytes(total)}"), ("to", str(target))]
    pairs += [("before", str(aside))] if aside else []
    report = {
        "files": len(listing),
        "bytes": total,
        "state": str(target),
        "before": str(aside) if aside else None,
    }
    return show(args, report, facts(pairs))


# --- writing


def _copied(source: Path, folder: Path) -> dict[str, Path]:
    """What to store, by name: copies of databases, other files where they are. Databases first:
    the files that they name are written before their rows, and stay for a day after."""
    found = {path.relative_to(source).as_posix(): path for path in _files(source)}
    databases = [name for name in found if name.endswith(".db")]
    for number, name in enumerate(databases):
        copy = folder / f"{number}.db"
        _copy_database(found[name], copy)
        found[name] = copy
    return {
        name: found[name] for name in sorted(found, key=lambda one: (one not in databases, one))
    }


def _files(folder: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _TEMPORARY_FOLDERS and not entry.name.endswith(".owners"):
                yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_TEMPORARY_SUFFIXES):
            yield Path(entry.path)


def _copy_database(source: Path, copy: Path) -> None:
    try:
        before = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
        after = sqlite3.connect(copy)
        try:
            before.backup(after)
        finally:
            before.close()
            after.close()
    except sqlite3.Error as error:
        raise WeightsError(f"{source}: cannot be copied ({error})") from error


def _write(target: Path, files: Mapping[str, Path], tick: Tick) -> dict[str, ArchivedFile]:
    """The archive appears when it is complete."""
    draft = target.with_name(f".{target.name}.part")
    total, done = sum(path.stat().st_size for path in files.values()), 0
    stored: dict[str, ArchivedFile] = {}
    with tempfile.TemporaryFile(dir=target.parent) as body:
        # files may grow while they are read: what is listed is what was read
        for name, path in files.items():
            begin = body.tell()
            digest = hashlib.sha256()
            with path.open("rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    body.write(chunk)
                    done += len(chunk)
                    tick(min(done, total), total)
            mode = path.stat().st_mode & 0o700
            stored[name] = ArchivedFile(body.tell() - begin, digest.hexdigest(), mode or 0o600)
        body.seek(0)
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
                _add_listing(archive, stored)
                for name, file in stored.items():
                    archive.addfile(_member(name, file.size), body)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    return stored


def _add_listing(archive: tarfile.TarFile, stored: Mapping[str, ArchivedFile]) -> None:
    listing = {
        "format": FORMAT,
        "coterie": __version__,
        "made_at": time.time(),
        "files": {name: asdict(file) for name, file in stored.items()},
    }
    text = json.dumps(listing, indent=1).encode()
    archive.addfile(_member(LISTING, len(text)), io.BytesIO(text))


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


# --- reading


def _read(path: Path, draft: Path) -> dict[str, ArchivedFile]:
    """Unpacks the archive into `draft`, each file checked against the listing."""
    with (
        _archive_errors(path),
        gzip.open(path) as raw,
        tarfile.open(fileobj=raw, mode="r:") as archive,
    ):
        members = iter(archive)
        listing = _listing(path, archive, next(members, None))
        missing = set(listing)
        total, done = sum(file.size for file in listing.values()), 0
        if total > (room := shutil.disk_usage(draft).free):
            raise WeightsError(f"{path}: {nbytes(total)} to restore, and {nbytes(room)} are free")
        with progress("restoring") as tick:
            for member in members:
                if not member.isreg() or member.name not in missing:
                    raise _damaged(path, f"{member.name[:80]!r} is not in its list")
                missing.remove(member.name)
                source = archive.extractfile(member)
                assert source is not None
                _store(source, draft / member.name, listing[member.name], path)
                done += member.size
                tick(done, total)
        if missing:
            raise _damaged(path, f"{min(missing)} is missing")
        # the end of a tar is padded; gzip checks its sum where its data ends
        if len(raw.read(MAX_PADDING_BYTES)) == MAX_PADDING_BYTES:
            raise _damaged(path, "it goes on behind its end")
    return listing


def _listing(
    path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo | None
) -> dict[str, ArchivedFile]:
    if member is None or member.name != LISTING or not member.isreg():
        raise _damaged(path, f"it does not begin with {LISTING}")
    if member.size > MAX_LISTING_BYTES:
        raise _damaged(path, f"{LISTING} is too large")
    source = archive.extractfile(member)
    assert source is not None
    found = json.loads(source.read(MAX_LISTING_BYTES))
    if found["format"] > FORMAT:
        raise WeightsError(f"{path}: made by Coterie {found['coterie']}. Update this one.")
    files = {str(name): ArchivedFile(**fields) for name, fields in found["files"].items()}
    for name, file in files.items():
        parts = PurePosixPath(name).parts
        is_inside = parts and ".." not in parts and not name.startswith("/") and "\\" not in name
        if not is_inside or "\0" in name or name != PurePosixPath(name).as_posix():
            raise _damaged(path, f"{name[:80]!r} is no name of a file of the state")
        if not isinstance(file.size, int) or file.size < 0 or not isinstance(file.mode, int):
            raise _damaged(path, f"what it says of {name[:80]!r}")
    return files


def _store(source: IO[bytes], target: Path, listed: ArchivedFile, path: Path) -> None:
    private_folder(target.parent)
    digest, left = hashlib.sha256(), listed.size
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as sink:
        while chunk := source.read(min(_CHUNK_BYTES, left + 1)):
            left -= len(chunk)
            if left < 0:
                break
            digest.update(chunk)
            sink.write(chunk)
    if left or digest.hexdigest() != listed.sha256:
        raise _damaged(path, f"{target.name} is not what was stored")
    target.chmod(listed.mode & 0o700 | 0o600)


@contextmanager
def _archive_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", param="file") from None
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{LISTING} is not as `backup` writes it") from error
    except RecursionError as error:
        raise _damaged(path, f"{LISTING} is nested too deeply") from error


def _damaged(path: Path, reason: str) -> WeightsError:
    return WeightsError(f"{path}: no sound backup ({reason}); nothing was changed")


def _refuse_running(folder: Path) -> None:
    from coterie.weights.files import is_locked

    if any(map(is_locked, folder.glob("*.owners/*.lock"))):
        raise Conflict(f"a server runs on {folder}: end it first", param="state")


def _swap(draft: Path, target: Path, is_taken: bool) -> Path | None:
    """Puts the restored state in its place; returns where the one before it is now."""
    aside = None
    if is_taken:
        aside = _free_name(f"{target}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        target.rename(aside)
    elif target.is_dir():
        target.rmdir()
    try:
        draft.rename(target)
    except OSError:
        if aside is not None:
            aside.rename(target)
        raise
    return aside


def _free_name(name: str) -> Path:
    path, number = Path(name), 1
    while path.exists():
        number += 1
        path = Path(f"{name}-{number}")
    return path
