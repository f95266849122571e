"""Which files an `.expert` may hold, by name: an allow-list, and plain names only.

Names that could mean another location on some file system, or a format that can run code, are
refused here, before any byte of the file is read.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

from coterie.core.errors import WeightsError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_CHUNK_BYTES = 1 << 20


def adapter_digest(config_sha256: str, weights_sha256: str) -> str:
    """From the sha256 of the two files, in hex."""
    text = f"coterie-adapter-1\n{CONFIG}:{config_sha256}\n{WEIGHTS}:{weights_sha256}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(directory: Path) -> str:
    return adapter_digest(file_sha256(directory / CONFIG), file_sha256(directory / WEIGHTS))


def open_regular(path: Path, *, resolved: bool = False) -> FileIO:
    """Open a regular file for reading, without a buffer. A pipe or a device is refused and never
    waited for, also if it takes the file's place at this moment. `resolved`: the path was resolved,
    so a link anywhere in it has been put there since, and is refused."""
    try:
        handle = _open_unlinked(path) if resolved else os.open(path, _FLAGS)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise WeightsError(f"{path}: refused, not a regular file. Check the path.")
    return FileIO(handle)


# opening a pipe would wait for a writer
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def _open_unlinked(path: Path) -> int:
    """Opens each folder of the path from the one above it."""
    folder = os.open(path.anchor, _FOLDER_FLAGS)
    try:
        for part in path.parts[1:-1]:
            below = os.open(part, _FOLDER_FLAGS | _NO_LINK, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(path.name, _FLAGS | _NO_LINK, dir_fd=folder)
    finally:
        os.close(folder)


def chunks_of(file: FileIO, size: int, where: str) -> Iterator[bytes]:
    """The contents of a file that had `size` bytes when it was opened. A file that grows or shrinks
    while it is read is refused, so that the reading always ends."""
    left = size
    while chunk := file.read(min(_CHUNK_BYTES, left + 1)):
        left -= len(chunk)
        if left < 0:
            break
        yield chunk
    if left:
        raise WeightsError(f"{where}: changed while it was read. Try again.")


def file_sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    return hasher.hexdigest()


MANIFEST = "manifest.json"
GRAMMAR = "grammar.gbnf"
MAX_NAME_BYTES = 120
MAX_DEPTH = 3

_ROOT_FILES = frozenset(
    {
        MANIFEST, CONFIG, WEIGHTS, GRAMMAR, "README.md", "NOTICE", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "merges.txt", "chat_template.jinja",
    }
)  # fmt: skip
_LICENCE = re.compile(r"LICEN[CS]E([.-][A-Za-z0-9.-]{1,40})?")
_SOFT_PROMPT = re.compile(r"soft_prompts/[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_TEST = re.compile(r"tests/.+\.(json|jsonl|txt|md|csv|tsv|toml|yaml|yml|gbnf|sql)")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# on Windows these names open devices, with any suffix
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_PICKLES = (
    ".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".h5",
    ".msgpack",
)  # fmt: skip


def is_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


def is_pickle(name: str) -> bool:
    return name.lower().endswith(_PICKLES)


def is_known(name: str) -> bool:
    """Whether it is on the allow-list."""
    if name in _ROOT_FILES:
        return True
    return any(rule.fullmatch(name) for rule in (_LICENCE, _SOFT_PROMPT, _TEST))


def check_path(raw: bytes, where: str) -> str:
    """The entry's name; raises an error that says what is wrong with it."""
    shown = repr(raw[:80].decode("utf-8", "replace"))
    try:
        name = raw.decode("ascii")
    except UnicodeDecodeError as error:
        raise WeightsError(f"{where}: refused, the name {shown} is not plain ASCII.") from error
    if len(raw) > MAX_NAME_BYTES:
        raise WeightsError(f"{where}: refused, a name of {len(raw)} bytes; {MAX_NAME_BYTES} fit.")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
        raise WeightsError(f"{where}: refused, {shown} points outside the package.")
    if len(parts) > MAX_DEPTH:
        raise WeightsError(f"{where}: refused, {shown} is nested too deeply.")
    if any(not _PART.fullmatch(part) or part.endswith(".") for part in parts):
        raise WeightsError(f"{where}: refused, {shown} is not a clean relative name.")
    if any(_DEVICES.fullmatch(part) for part in parts):
        raise WeightsError(f"{where}: refused, {shown} names a device on some systems.")
    if is_pickle(name):
        raise WeightsError(
            f"{where}: refused, {shown} is a pickle or another format that can run code. "
            "Convert it to safetensors."
        )
    if not is_known(name):
        raise WeightsError(
            f"{where}: refused, {shown} is no file of an .expert package; see docs/experts.md."
        )
    return name


def check_together(names: Iterable[str], where: str) -> None:
    """No two names may mean the same file on any file system, and no file may also be a folder."""
    seen: dict[str, str] = {}
    for name in names:
        folded = name.casefold()
        if folded in seen:
            raise WeightsError(f"{where}: refused, {name!r} and {seen[folded]!r} are one name.")
        seen[folded] = name
    for folded, name in seen.items():
        parts = folded.split("/")
        for count in range(1, len(parts)):
            if "/".join(parts[:count]) in seen:
                raise WeightsError(f"{where}: refused, {name!r} lies inside another file.")
