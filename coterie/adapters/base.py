"""An adapter as it was read, and what composing it needs from the model.

`ADAPTERS` in kinds/table.py names every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from coterie.core.errors import WeightsError
from coterie.packages.safetensors_header import read_header

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.core.adapters import AdaptableModules
    from coterie.kernels.patch import Site


class ModuleSize(NamedTuple):
    """The number of a module's features that a tensor was made for."""

    tensor: str
    features: int
    side: Literal["in", "out"]


class ModuleChange(Protocol):
    """What an adapter changes in one module, in PEFT's terms: a dataclass in the kind's file."""

    def sizes(self) -> tuple[ModuleSize, ...]:
        """The sizes that its tensors need the module to have."""


def check_sizes(path: str, change: ModuleChange, features: tuple[int, int], model: str) -> None:
    """`features`: numbers of input and output features of the module of `model`."""
    for tensor, actual, side in change.sizes():
        expected = features[side == "out"]
        if actual != expected:
            raise WeightsError(
                f"{path}.{tensor} is for {actual} features, {model} has {expected}: the adapter is "
                "for another model"
            )


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The content of an adapter file, as its kind reads it: changes by module path, or soft
    tokens."""

    changes: Mapping[str, ModuleChange] = field(default_factory=dict)
    soft: Tensor | None = None  # [tokens, hidden]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter on the host, as stored. Immutable."""

    digest: str
    kind: str
    # by the module's path in the model: "model.layers.0.self_attn.q_proj"
    changes: Mapping[str, ModuleChange] = field(default_factory=dict)
    # [tokens, hidden]
    soft: Tensor | None = None
    nbytes: int = 0
    # |W_i| of the base's LM head, if the file contains it with the adapter, fp32 [out]
    head_norms: Tensor | None = None


class TargetModule(Protocol):
    """One matrix of the model that can be changed."""

    site: Site
    in_features: int
    out_features: int
    bias: Tensor | None  # [out]
    # row i of the product is row order[i] of the module; None: the same order
    order: Tensor | None

    def row_norms_squared(self) -> Tensor:
        """[out] fp64: |W_i|^2 of the weight as the kernels use it. Cached after the first call."""

    def project(self, x: Tensor) -> Tensor:
        """x [n, in] fp32 -> W x, [n, out] fp32, without the bias."""


class AdaptableModel(Protocol):
    """The parts of the model that adapters may change (models/build/targets.py)."""

    hidden: int

    def modules(self) -> AdaptableModules:
        """Everything that can be changed, for checks without weights."""

    def find(self, path: str) -> TargetModule:
        """The matrix at a module path. Raises WeightsError that says why it cannot be adapted:
        no such module, an embedding, a routed expert, an absorbed matrix ..."""


# type -> integer type of its width, mask of all bits except the sign, exponent of infinity and NaN
MASKS: dict[str, tuple[type[np.signedinteger[Any]], int, int]] = {
    "F32": (np.int32, 0x7FFF_FFFF, 0x7F80_0000),
    "BF16": (np.int16, 0x7FFF, 0x7F80),
    "F16": (np.int16, 0x7FFF, 0x7C00),
}
# fits in a core's cache
_CHUNK = 1 << 16


def is_finite(words: np.ndarray[Any, Any], dtype: str) -> bool:
    """`words` is flat, in the integer type of `dtype`."""
    _, magnitude, infinity = MASKS[dtype]
    scratch = np.empty(min(_CHUNK, len(words)), words.dtype)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK]
        if np.bitwise_and(part, magnitude, out=scratch[: len(part)]).max() >= infinity:
            return False
    return True


def check_finite(path: Path) -> None:
    """Checks every number of a safetensors file whose types are in `MASKS`, in small pieces. Raises
    WeightsError that names the first tensor with NaN or infinity."""
    header = read_header(path)
    first = path.stat().st_size - max(facts["data_offsets"][1] for facts in header.values())
    with path.open("rb") as file:
        for name, facts in header.items():
            words, _, _ = MASKS[facts["dtype"]]
            begin, end = facts["data_offsets"]
            file.seek(first + begin)
            for at in range(begin, end, _CHUNK * words().itemsize):
                part = file.read(min(_CHUNK * words().itemsize, end - at))
                if not is_finite(np.frombuffer(part, words), facts["dtype"]):
                    raise WeightsError(f"{name!r} holds NaN or infinity")
