"""Learnt probes of a catalog, stored by the digest of everything that they depend on.

A file holds a checksum and arrays (npz, no pickle). A damaged or foreign file is logged, and the
probes are learnt again. Reading needs no matrix product.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.core.adapters import AdapterProfile
from coterie.obs.log import log
from coterie.routing.match.probes import texts_digest
from coterie.routing.match.sketch import DIM, NUM_BUCKETS

_MAGIC = b"coterie probes 1\n"
_HEAD = len(_MAGIC) + 32
# catalogs that are stored at the same time: the oldest are removed first
MAX_KEPT = 8


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
    file = io.BytesIO()
    np.savez(
        file, joint=learnt.joint.astype(np.float16), short=learnt.short,
        words=learnt.words, scales=learnt.scales,
    )  # fmt: skip
    body = file.getvalue()
    return _MAGIC + sha256(body).digest() + body


def unpacked(data: bytes, count: int, dim: int) -> LearntProbes:
    """Raises ValueError if `data` was not made by `packed` for that many adapters."""
    body = data[_HEAD:]
    if data[:_HEAD] != _MAGIC + sha256(body).digest():
        raise ValueError("the checksum is wrong")
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            learnt = LearntProbes(
                arrays["joint"].astype(np.float32), arrays["short"], arrays["words"],
                arrays["scales"],
            )  # fmt: skip
    except (KeyError, OSError, EOFError) as error:
        raise ValueError("an array is missing") from error
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


def read(path: Path, count: int, dim: int) -> LearntProbes | None:
    try:
        return unpacked(path.read_bytes(), count, dim)
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
        stored = sorted(path.parent.glob("*.probes"), key=lambda each: each.stat().st_mtime)
        for old in stored[:-MAX_KEPT]:
            with contextlib.suppress(OSError):
                old.unlink()
    except OSError as error:
        log("probes_not_kept", level="warning", error=error)
