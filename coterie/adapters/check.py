"""Whether an adapter could be loaded, told from its config and its weights' file. No torch.

Runs the kinds' own readers over shapes in place of tensors, holds what they found against the
modules of a base and its size against the room for adapters, then looks at every number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from coterie.adapters.base import MASKS, ModuleChange, check_finite
from coterie.adapters.kinds import ia3, lora, options, soft_prompt
from coterie.core.adapters import AdaptableModules
from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import device_size
from coterie.packages.paths import CONFIG, WEIGHTS
from coterie.packages.safetensors_header import read_header

TYPES = tuple(MASKS)
BASE_HEAD = "base_model.model.lm_head.base_layer.weight"


class _Shape:
    """As much of a tensor as the readers look at."""

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
    """Raises WeightsError that names what is wrong. `bases`: by name, what it has to fit. `room`:
    bytes for adapters beside them; None = nobody knows."""
    _check_shapes(folder, bases)
    _check_room(folder, bases, room)
    # reads the whole file: last
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
    kind = config.get("peft_type")
    if kind == soft_prompt.PEFT_TYPE:
        soft = soft_prompt.read(config, tensors)
        for name, base in bases.items():
            if soft.shape[1] != base.hidden:
                raise WeightsError(
                    f"prompt_embeddings is {soft.shape[1]} wide, {name} is {base.hidden}"
                )
        return
    head = tensors.pop(BASE_HEAD, None)
    changes = _readers(kind)(config, tensors)
    if not changes:
        raise WeightsError(f"{WEIGHTS}: it changes no module")
    if head is not None and "lm_head" not in changes:
        raise WeightsError(f"{BASE_HEAD!r} is there, but no adapter of the LM head")
    for name, base in bases.items():
        for path, change in changes.items():
            _check(path, change, base, name)


def _readers(kind: object) -> Any:
    readers = {lora.PEFT_TYPE: lora.read, ia3.PEFT_TYPE: ia3.read}
    if kind not in readers:
        listed = ", ".join([*readers, soft_prompt.PEFT_TYPE])
        raise WeightsError(f"{CONFIG}: peft_type={kind!r} is not supported; one of {listed}")
    return readers[str(kind)]


def _config(path: Path) -> options.PeftConfig:
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
    found = base.shapes.get(path)
    if found is None:
        raise WeightsError(
            f"{path}: {name} has no such module that adapters may change; the adapter is for "
            "another model, or for embeddings, norms, routers or routed experts"
        )
    wide, tall = found
    for part, tensor, axis, wanted in (
        ("lora_A", change.a, 1, wide),
        ("lora_B", change.b, 0, tall),
        ("lora_magnitude_vector", change.magnitude, 0, tall),
        ("ia3_l", change.vector, 0, wide if change.feedforward else tall),
    ):
        if tensor is not None and tensor.shape[axis] != wanted:
            raise WeightsError(
                f"{path}.{part} is for {tensor.shape[axis]} features, {name} has {wanted}: the "
                "adapter is for another model"
            )
