"""An adapter as it was read, and what composing it must ask of the model.

`ADAPTERS` in table.py names every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from coterie.core.errors import WeightsError
from coterie.packages.safetensors_header import read_header

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.core.adapters import AdaptableModules
    from coterie.kernels.patch import Site


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """What an adapter does to one module, in PEFT's own terms. What is None is left out."""

    a: Tensor | None = None  # lora_A [r, in]
    b: Tensor | None = None  # lora_B [out, r]
    # alpha / r, or alpha / sqrt(r), with the patterns applied
    scaling: float = 1.0
    magnitude: Tensor | None = None  # DoRA: [out]
    # IA3: [out], or [in] where `feedforward`
    vector: Tensor | None = None
    feedforward: bool = False
    # |W_i| of the base weight that the file carries beside the adapter, fp32 [out]
    base_norms: Tensor | None = None


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


class TargetModule(Protocol):
    """One matrix of the model that a change can be for."""

    site: Site
    in_features: int
    out_features: int
    bias: Tensor | None  # [out]
    # row i of the product is row order[i] of the module; None: as in the module
    order: Tensor | None

    def row_norms_squared(self) -> Tensor:
        """[out] fp64: |W_i|^2 of the weight as the kernels see it. Kept after the first call."""

    def project(self, x: Tensor) -> Tensor:
        """x [n, in] fp32 -> W x, [n, out] fp32, without the bias."""


class AdaptableModel(Protocol):
    """The model, as far as adapters may change it (models/build/targets.py)."""

    hidden: int

    def modules(self) -> AdaptableModules:
        """What there is to change, for checks that see no weights."""

    def find(self, path: str) -> TargetModule:
        """The matrix at a module path. Raises WeightsError that says why it cannot be adapted:
        no such module, an embedding, a routed expert, an absorbed matrix ..."""


# type -> words of its width, all bits but the sign, the exponent of infinity and NaN
MASKS: dict[str, tuple[type[np.signedinteger[Any]], int, int]] = {
    "F32": (np.int32, 0x7FFF_FFFF, 0x7F80_0000),
    "BF16": (np.int16, 0x7FFF, 0x7F80),
    "F16": (np.int16, 0x7FFF, 0x7C00),
}
# stays in a core's cache
_CHUNK = 1 << 16


def is_finite(words: np.ndarray[Any, Any], dtype: str) -> bool:
    """`words` is flat, in the words of `dtype`."""
    _, magnitude, infinity = MASKS[dtype]
    scratch = np.empty(min(_CHUNK, len(words)), words.dtype)
    for begin in range(0, len(words), _CHUNK):
        part = words[begin : begin + _CHUNK]
        if np.bitwise_and(part, magnitude, out=scratch[: len(part)]).max() >= infinity:
            return False
    return True


def check_finite(path: Path) -> None:
    """Every number of a safetensors file with types of `MASKS`, a little of it in RAM at a time.
    Raises WeightsError that names the first tensor with another."""
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
