"""Whether an adapter could be loaded, checked from its config and weights file. No torch.

Runs the reader of its kind with shapes instead of tensors, compares the result with the modules of
a base and its size with the memory for adapters, then checks every number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from coterie.adapters.base import MASKS, ModuleChange, check_finite, check_sizes
from coterie.adapters.kinds.table import ADAPTERS
from coterie.core.adapters import AdaptableModules
from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import BASE_HEAD, PeftConfig, device_size, kind_of
from coterie.packages.paths import CONFIG, WEIGHTS
from coterie.packages.safetensors_header import read_header

TYPES = tuple(MASKS)


class _Shape:
    """The attributes of a tensor that the readers use."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def dim(self) -> int:
        return len(self.shape)

    def flatten(self) -> _Shape:
        size = 1
        for length in self.shape:
            size *= length
        return _Shape((size,))

    def __len__(self) -> int:
        return self.shape[0]


def check_adapter(folder: Path, bases: Mapping[str, AdaptableModules], room: int | None) -> None:
    """Raises WeightsError that names what is wrong. `bases`: the models it must fit, by name.
    `room`: bytes for adapters; None = unknown."""
    _check_shapes(folder, bases)
    _check_room(folder, bases, room)
    # last, because it reads the whole file
    check_finite(folder / WEIGHTS)


def _check_room(folder: Path, bases: Mapping[str, AdaptableModules], room: int | None) -> None:
    size = device_size(folder)
    shifts = size.shifts if any(base.has_bias for base in bases.values()) else 0
    nbytes = size.narrow or size.wide + shifts
    if room is not None and nbytes > room:
        raise WeightsError(
            f"the adapter takes {nbytes} bytes beside a model and there is room for {room}; raise "
            "adapters.device_bytes (--adapter-bytes)"
        )


def _check_shapes(folder: Path, bases: Mapping[str, AdaptableModules]) -> None:
    config = _config(folder / CONFIG)
    shapes = {name: _shape(name, facts) for name, facts in read_header(folder / WEIGHTS).items()}
    tensors = cast("dict[str, Any]", shapes)
    head = tensors.pop(BASE_HEAD, None)
    content = ADAPTERS[kind_of(config)].read(config, tensors)
    if not content.changes and content.soft is None:
        raise WeightsError(f"{WEIGHTS}: it changes no module")
    if head is not None and "lm_head" not in content.changes:
        raise WeightsError(f"{BASE_HEAD!r} is there, but no adapter of the LM head")
    for name, base in bases.items():
        if content.soft is not None and content.soft.shape[1] != base.hidden:
            raise WeightsError(
                f"prompt_embeddings is {content.soft.shape[1]} wide, {name} is {base.hidden}"
            )
        for path, change in content.changes.items():
            _check(path, change, base, name)


def _config(path: Path) -> PeftConfig:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{CONFIG}: missing, or not valid JSON") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{CONFIG}: not a JSON object")
    return value


def _shape(name: str, facts: Mapping[str, Any]) -> _Shape:
    if facts["dtype"] not in TYPES:
        raise WeightsError(f"{name!r} is {facts['dtype']}; use one of {', '.join(TYPES)}")
    shape = tuple(facts["shape"])
    if len(shape) not in (1, 2) or 0 in shape:
        raise WeightsError(f"{name!r} has shape {list(shape)}: neither vector nor matrix")
    return _Shape(shape)


def _check(path: str, change: ModuleChange, base: AdaptableModules, name: str) -> None:
    shape = base.shapes.get(path)
    if shape is None:
        raise WeightsError(
            f"{path}: {name} has no such module that adapters may change; the adapter is for "
            "another model, or for embeddings, norms, routers or routed experts"
        )
    check_sizes(path, change, shape, name)
