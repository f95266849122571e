"""Writes tensors of a checkpoint into one safetensors file, byte for byte as they are stored.

GGUF's block types have no name in the format: they are written as bytes, and the header's metadata
describes them (`BLOCKS_KEY`) so that weights/formats/safetensors.py can read them back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from coterie.weights.files import drop_cached
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES
from coterie.weights.formats.safetensors import BLOCKS_KEY

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint

_CHUNK_BYTES = 16 << 20
# after this many bytes, written pages are flushed to disk and dropped from memory
_FLUSH_BYTES = 256 << 20


def copy_tensors(
    checkpoint: Checkpoint,
    names: Sequence[str],
    path: Path,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Writes `names` to `path`; calls `progress` with the bytes of each step. Returns the total."""
    # wide types first, so that each tensor is aligned to its element size
    ordered = sorted(names, key=lambda name: (-_alignment(checkpoint, name), name))
    header = _header(checkpoint, ordered)
    with path.open("wb") as sink:
        sink.write(len(header).to_bytes(8, "little") + header)
        waiting = total = 0
        for name in ordered:
            raw = checkpoint.raw(name)
            for first in range(0, len(raw), _CHUNK_BYTES):
                step = sink.write(raw[first : first + _CHUNK_BYTES].data)
                waiting, total = waiting + step, total + step
                if progress is not None:
                    progress(step)
            if waiting >= _FLUSH_BYTES:
                waiting = 0
                _flush(checkpoint, sink)
        _flush(checkpoint, sink)
    return total


def _flush(checkpoint: Checkpoint, sink: IO[bytes]) -> None:
    sink.flush()
    os.fsync(sink.fileno())
    drop_cached(sink.fileno(), 0, 0)
    checkpoint.release()


def _is_blocks(stored: str) -> bool:
    return BLOCK_SIZES.get(stored, (1, 0))[0] > 1


def _alignment(checkpoint: Checkpoint, name: str) -> int:
    stored = checkpoint.stored_as(name)
    if _is_blocks(stored):
        return 1
    elements = 1
    for extent in checkpoint.shape(name):
        elements *= extent
    return checkpoint.extent(name).nbytes // max(elements, 1)


def _header(checkpoint: Checkpoint, names: Sequence[str]) -> bytes:
    table: dict[str, object] = {}
    blocks: dict[str, object] = {}
    reached = 0
    for name in names:
        stored, shape = checkpoint.stored_as(name), list(checkpoint.shape(name))
        nbytes = checkpoint.extent(name).nbytes
        if _is_blocks(stored):
            blocks[name] = [stored, shape]
            stored, shape = "U8", [nbytes]
        table[name] = {
            "dtype": stored,
            "shape": shape,
            "data_offsets": [reached, reached + nbytes],
        }
        reached += nbytes
    metadata = {"format": "pt"}
    if blocks:
        metadata[BLOCKS_KEY] = json.dumps(blocks)
    text = json.dumps({"__metadata__": metadata, **table}).encode()
    return text + b" " * (-(8 + len(text)) % 64)
