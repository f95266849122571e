"""What was learnt of a catalog, kept on disk by the digest of everything that it depends on.

A file holds a checksum and arrays (npz, no pickle). One that is damaged or foreign is as good as
none: it is told, and the probes are learnt again. Reading one makes no product of matrices.
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
from coterie.routing.match.sketch import DIM, PLACES

_MAGIC = b"coterie probes 1\n"
_HEAD = len(_MAGIC) + 32
# catalogs kept side by side: the oldest go first
MAX_KEPT = 8


@dataclass(frozen=True, slots=True)
class LearntProbes:
    """Of `n` adapters in their order; see match.py for what each is."""

    # [n, (1 + shape.DIM) * (1 + dim)]
    joint: NDArray[np.float32]
    # [n, dim + shape.DIM + 1]
    short: NDArray[np.float32]
    # [PLACES, n]
    words: NDArray[np.int8]
    # [n]
    scales: NDArray[np.float32]


@cache
def _made_with() -> bytes:
    """The code and the data that probes are made with."""
    folder = Path(__file__).parent
    found = sha256(np.__version__.encode())
    for path in sorted([*folder.parent.rglob("*.py"), *(folder / "data").glob("*")]):
        found.update(path.name.encode() + sha256(path.read_bytes()).digest())
    return found.digest()


def digest_of(profiles: Sequence[AdapterProfile], embedder: str) -> str:
    said = "\n".join((embedder, *(texts_digest(profile) for profile in profiles)))
    return sha256(_made_with() + said.encode()).hexdigest()


def packed(learnt: LearntProbes) -> bytes:
    file = io.BytesIO()
    np.savez(
        file, joint=learnt.joint.astype(np.float16), short=learnt.short,
        words=learnt.words, scales=learnt.scales,
    )  # fmt: skip
    body = file.getvalue()
    return _MAGIC + sha256(body).digest() + body


def unpacked(found: bytes, count: int, dim: int) -> LearntProbes:
    """Raises ValueError where `found` is not what `packed` made for so many adapters."""
    body = found[_HEAD:]
    if found[:_HEAD] != _MAGIC + sha256(body).digest():
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
    wanted = ((count, (1 + DIM) * (1 + dim)), (count, dim + DIM + 1), (PLACES, count), (count,))
    if shapes != wanted or learnt.words.dtype != np.int8:
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


def write(path: Path, found: bytes) -> None:
    """Whole or not at all; a folder that cannot be written to is told and costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(found)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        kept = sorted(path.parent.glob("*.probes"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-MAX_KEPT]:
            with contextlib.suppress(OSError):
                old.unlink()
    except OSError as error:
        log("probes_not_kept", level="warning", error=error)
