"""Checks a safetensors file by its header only: types, shapes, offsets, size. No torch, no numpy.

A file that passes can be mapped and read safely.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError
from coterie.packages.paths import open_regular

MAX_HEADER_BYTES = 8 << 20
_MAX_TENSORS = 50_000
_MAX_RANK = 8
_MAX_SIZE = 1 << 48
_FACTS = {"dtype", "shape", "data_offsets"}

# bits per element of every type that adapters use
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


def header_length(start: bytes, size: int, where: str) -> int:
    """Bytes of JSON after the first eight, for a file of `size` bytes."""
    if size < 8 or len(start) < 8:
        raise WeightsError(f"{where}: refused, {size} bytes are too few for safetensors.")
    length = int.from_bytes(start[:8], "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise WeightsError(
            f"{where}: refused, not safetensors (a header of {length} bytes in a file of {size})."
        )
    return length


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Reads and checks the header of a file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = header_length(file.read(8), size, path.name)
        return check_header(file.read(length), size, path.name)


def check_header(header: bytes, size: int, where: str) -> dict[str, dict[str, Any]]:
    """`header` is the JSON; the tensors must fill the rest of the `size` bytes exactly. Returns
    dtype, shape and data_offsets by name."""
    table = _parsed(header, where)
    metadata = table.pop("__metadata__", {})
    plain = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not plain:
        raise WeightsError(f"{where}: refused, the metadata of its header is no map of texts.")
    if not table or len(table) > _MAX_TENSORS:
        raise WeightsError(f"{where}: refused, {len(table)} tensors in it.")
    reached = 0
    for begin, end, name in sorted(_span(name, facts, where) for name, facts in table.items()):
        if begin != reached:
            raise WeightsError(f"{where}: refused, tensor {name!r} overlaps or leaves a gap.")
        reached = end
    if 8 + len(header) + reached != size:
        raise WeightsError(
            f"{where}: refused, its tensors end at byte {8 + len(header) + reached} of {size}."
        )
    return table


def _parsed(header: bytes, where: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(table := dict(pairs)) != len(pairs):
            raise ValueError("a name twice")
        return table

    try:
        table = json.loads(header.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where}: refused, its header is not valid JSON.") from error
    if not isinstance(table, dict):
        raise WeightsError(f"{where}: refused, its header is not a JSON object.")
    return table


def _span(name: str, facts: Any, where: str) -> tuple[int, int, str]:
    if not isinstance(facts, dict) or facts.keys() != _FACTS:
        raise _senseless(name, where)
    shape, offsets = facts["shape"], facts["data_offsets"]
    if not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise _senseless(name, where)
    bits = _BITS.get(facts["dtype"]) if isinstance(facts["dtype"], str) else None
    if bits is None:
        raise WeightsError(f"{where}: refused, tensor {name[:80]!r} is of an unknown type.")
    begin, end = offsets
    if begin > end or math.prod(shape) * bits != (end - begin) * 8:
        raise _senseless(name, where)
    return begin, end, name


def _senseless(name: str, where: str) -> WeightsError:
    return WeightsError(f"{where}: refused, the header of tensor {name[:80]!r} makes no sense.")


def _whole(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        return False
    if any(type(item) is not int for item in value):
        return False
    return not value or (min(value) >= 0 and max(value) < _MAX_SIZE)
