"""Learnt probes of a catalog, stored by the digest of everything that they depend on, and the
inverse that they are learnt with, which depends on no catalog and takes a second.

A file holds a checksum and arrays (npz, no pickle). A damaged or foreign file is logged, and its
content is computed again. Reading needs no matrix product.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.obs.log import log
from coterie.routing.match.probes import inverted, texts_digest
from coterie.routing.match.sketch import DIM, NUM_BUCKETS

SUFFIX = ".probes"
INVERSE_SUFFIX = ".inverse"
_MAGIC = b"coterie probes 1\n"
_HEAD = len(_MAGIC) + 32
# files of one kind that are stored at the same time: the oldest are removed first
MAX_KEPT = 8
Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class LearntProbes:
    """The probes of `n` adapters, in their order; matcher.py describes each array."""

    # [n, (1 + shape.DIM) * (1 + dim)]
    joint: NDArray[np.float32]
    # [n, dim + shape.DIM + 1]
    short: NDArray[np.float32]
    # [NUM_BUCKETS, n]
    words: NDArray[np.int8]
    # [n]
    scales: NDArray[np.float32]


@cache
def _code_digest() -> bytes:
    """Digest of the code and the data that probes are made with."""
    folder = Path(__file__).parent
    digest = sha256(np.__version__.encode())
    for path in sorted([*folder.parent.rglob("*.py"), *(folder / "data").glob("*")]):
        digest.update(path.name.encode() + sha256(path.read_bytes()).digest())
    return digest.digest()


def digest_of(profiles: Sequence[AdapterProfile], embedder: str) -> str:
    texts = "\n".join((embedder, *(texts_digest(profile) for profile in profiles)))
    return sha256(_code_digest() + texts.encode()).hexdigest()


def packed(learnt: LearntProbes) -> bytes:
    return _packed(
        joint=learnt.joint.astype(np.float16), short=learnt.short, words=learnt.words,
        scales=learnt.scales,
    )  # fmt: skip


def unpacked(data: bytes, count: int, dim: int) -> LearntProbes:
    """Raises ValueError if `data` was not made by `packed` for that many adapters."""
    joint, *others = _unpacked(data, "joint", "short", "words", "scales")
    learnt = LearntProbes(joint.astype(np.float32), *others)
    shapes = (learnt.joint.shape, learnt.short.shape, learnt.words.shape, learnt.scales.shape)
    expected = (
        (count, (1 + DIM) * (1 + dim)),
        (count, dim + DIM + 1),
        (NUM_BUCKETS, count),
        (count,),
    )
    if shapes != expected or learnt.words.dtype != np.int8:
        raise ValueError("the arrays are of another catalog")
    return learnt


def _packed(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    body = file.getvalue()
    return _MAGIC + sha256(body).digest() + body


def _unpacked(data: bytes, *names: str) -> list[NDArray[Any]]:
    body = data[_HEAD:]
    if data[:_HEAD] != _MAGIC + sha256(body).digest():
        raise ValueError("the checksum is wrong")
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            return [arrays[name] for name in names]
    except (KeyError, OSError, EOFError) as error:
        raise ValueError("an array is missing") from error


def read(path: Path, count: int, dim: int) -> LearntProbes | None:
    return _read(path, lambda data: unpacked(data, count, dim))


def stored_inverse(matrix: NDArray[np.float64], folder: Path) -> NDArray[np.float32]:
    """The inverse of `matrix`, from `folder` if it was computed earlier."""

    def parse(data: bytes) -> NDArray[np.float32]:
        (found,) = _unpacked(data, "inverse")
        if found.shape != matrix.shape or found.dtype != np.float32:
            raise ValueError("the inverse is of another matrix")
        return found

    path = folder / f"{sha256(matrix.tobytes()).hexdigest()}{INVERSE_SUFFIX}"
    inverse = _read(path, parse)
    if inverse is None:
        inverse = inverted(matrix)
        write(path, _packed(inverse=inverse))
    return inverse


def _read(path: Path, parse: Callable[[bytes], Content]) -> Content | None:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log("kept_probes_unreadable", level="warning", error=error)
        return None


def write(path: Path, data: bytes) -> None:
    """Writes all or nothing. If the folder cannot be written to, this is logged and costs only
    time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        stored = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda each: each.stat().st_mtime)
        for old in stored[:-MAX_KEPT]:
            with contextlib.suppress(OSError):
                old.unlink()
    except OSError as error:
        log("probes_not_kept", level="warning", error=error)
