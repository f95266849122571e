"""Sizes of the GPU's programs by device and shape: tables that `coterie tune` measures offline.

A table is a JSON file with one entry per shape class: the numbers of its sizes. The table of this
machine's device comes with the package (`triton/tables`) or was made here (below COTERIE_HOME),
whose entries come first. Serving only reads: a shape without an entry takes a safe default.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from coterie.weights.home import home

_log = logging.getLogger(__name__)
_SHIPPED = Path(__file__).parent / "triton" / "tables"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A matrix of a model. `kernel`: norm and "product", product and "add", or norm and "gate_up"
    (gate's rows, then up's)."""

    kernel: str
    kind: str
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class ExpertPoolShape:
    """The experts of a layer, `top_k` of them to a row."""

    kind: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int


DeviceShape = MatrixShape | ExpertPoolShape


@dataclass(frozen=True, slots=True)
class SizeTable:
    """The entries of one device, and the files that they come from."""

    device: str
    entries: Mapping[str, tuple[int, ...]]
    files: tuple[Path, ...]

    def missing(self, shapes: Iterable[str]) -> list[str]:
        return [shape for shape in shapes if shape not in self.entries]


def matrix_shape(kind: str, count: int, width: int) -> str:
    """The shape class of a product of few rows with a matrix."""
    return f"gemv {kind} {count}x{width}"


def expert_shape(kernel: str, kind: str, hidden: int, intermediate: int) -> str:
    return f"{kernel} {kind} {hidden}x{intermediate}"


def file_name(device: str) -> str:
    """NVIDIA H200 -> nvidia-h200.json"""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def own_file(device: str) -> Path:
    """Where the table that was made on this machine is kept."""
    return home() / "gpu_sizes" / file_name(device)


def read_table(device: str) -> SizeTable:
    """Empty where nothing is known of the device."""
    entries: dict[str, tuple[int, ...]] = {}
    files = []
    for file in (_SHIPPED / file_name(device), own_file(device)):
        found = _read(file)
        if found:
            entries |= found
            files.append(file)
    return SizeTable(device, entries, tuple(files))


def write_table(device: str, entries: Mapping[str, Iterable[int]]) -> Path:
    """Add entries to this machine's own table."""
    file = own_file(device)
    kept = {**_read(file), **{shape: tuple(numbers) for shape, numbers in entries.items()}}
    lines = [f"  {json.dumps(shape)}: {list(kept[shape])}" for shape in sorted(kept)]
    text = f'{{"device": {json.dumps(device)}, "sizes": {{\n' + ",\n".join(lines) + "\n}}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_suffix(".new")
    whole.write_text(text)
    whole.replace(file)
    _table.cache_clear()
    return file


def _read(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        found = json.loads(file.read_text())["sizes"]
        return {str(shape): tuple(map(int, numbers)) for shape, numbers in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as problem:
        _log.warning("%s is not a table of sizes (%s): its entries are not used", file, problem)
        return {}


def device_name() -> str:
    """The name of the CUDA device in use; empty without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


@cache
def _table() -> SizeTable:
    return read_table(device_name())


def tuned(shape: str, default: T) -> T:
    """The sizes of the table in use, as a dataclass like `default`; `default` without an entry."""
    numbers = _table().entries.get(shape)
    if numbers is None:
        return default
    if len(numbers) != len(numbers_of(default)):
        _log.warning("%s: %s are not its sizes; run `coterie tune` again", shape, numbers)
        return default
    return with_numbers(default, numbers)


def numbers_of(sizes: Any) -> tuple[int, ...]:
    """All numbers of a (nested) dataclass of sizes, in the order of its fields."""
    if not is_dataclass(sizes):
        return (int(sizes),)
    return tuple(n for item in fields(sizes) for n in numbers_of(getattr(sizes, item.name)))


def with_numbers(like: T, numbers: Iterable[int]) -> T:
    """The inverse of `numbers_of`."""
    filled: T = _filled(like, iter(numbers))
    return filled


def _filled(like: Any, numbers: Any) -> Any:
    if not is_dataclass(like):
        return type(like)(next(numbers))
    values = {item.name: _filled(getattr(like, item.name), numbers) for item in fields(like)}
    return type(like)(**values)  # type: ignore[misc]
