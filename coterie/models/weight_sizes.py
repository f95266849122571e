"""How many bytes the matrices of a checkpoint take in memory, before any is read.

Counted as the products count theirs: vectors are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from coterie.kernels.device_blocks import FORMS
from coterie.models.build.reader import keeps
from coterie.weights.kinds import BLOCK_KINDS, GROUP, KEPT_AS, KINDS, SPLIT_TYPES

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def matrix_bytes(
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    *,
    tied: bool,
    without: Collection[str] = (),
) -> int:
    """Of all matrices at `dtype`, but those in `without`; of a stack, those of each expert."""
    total = 0
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if len(shape) < 2 or name in without or (tied and name == _HEAD):
            continue
        stored, rows = checkpoint.stored_as(name), math.prod(shape[:-1])
        kind = _kind(stored, _of_ends(dtype) if name in (_EMBEDDING, _HEAD) else dtype, shape[-1])
        if name != _EMBEDDING or tied:
            total += math.prod(shape[:-2]) * _nbytes(kind, shape[-2], shape[-1], device)
        elif dtype in ("auto", "fp32") or (stored in SPLIT_TYPES and dtype != "bf16"):
            # as in the file: only the rows that are read are widened
            total += _stored_bytes(checkpoint, name, device)
        else:
            total += rows * shape[-1] // KINDS[kind].columns * KINDS[kind].block_bytes
    return total


def _stored_bytes(checkpoint: Checkpoint, name: str, device: str) -> int:
    form = FORMS.get(KEPT_AS.get(checkpoint.stored_as(name), ""))
    if form is None or torch.device(device).type == "cpu" or not keeps(device, BLOCK_KINDS[0]):
        return checkpoint.extent(name).nbytes
    *rows, columns = checkpoint.shape(name)
    return math.prod(rows) * form.row_bytes(columns)


def _of_ends(dtype: str) -> str:
    """Embedding and head stay at int8: see read_embedding_and_head."""
    return "int8" if dtype == "int4" else dtype


def _kind(stored: str, dtype: str, columns: int) -> str:
    kept = KEPT_AS.get(stored, "fp32")
    if dtype in ("fp32", "bf16"):
        return dtype
    rounds = dtype != "auto" and columns % GROUP == 0 and kept not in ("int8", "int4")
    return dtype if rounds else kept


def _nbytes(kind: str, rows: int, columns: int, device: str) -> int:
    on_cpu = torch.device(device).type == "cpu"
    made = kind if keeps(device, kind) else "fp32"
    if not on_cpu and KINDS[made].is_dense:
        return rows * columns * (4 if made == "fp32" else 2)
    if not on_cpu and made in FORMS:
        return rows * FORMS[made].row_bytes(columns)
    return KINDS[made].nbytes(rows, columns)
