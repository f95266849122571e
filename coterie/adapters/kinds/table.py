"""All kinds of adapters by name: how each is stored, how it is read and how it changes a module.

Does not import torch: the gateway checks packages with it (adapters/check.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coterie.adapters.kinds import dora, ia3, lora, soft_prompt
from coterie.packages.adapter_kinds import FORMATS, AdapterFormat, PeftConfig

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.base import AdapterContent
    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder


@dataclass(frozen=True, slots=True)
class AdapterKind:
    stored: AdapterFormat
    # also called with shapes instead of tensors: `shape`, `dim()`, `len()` and `flatten()` work
    read: Callable[[PeftConfig, Mapping[str, Tensor]], AdapterContent]
    # applies one change to a module at a weight, on top of earlier ones; None: the kind makes none
    apply: Callable[[ModulePatchBuilder, Any, float], None] | None = None


ADAPTERS: dict[str, AdapterKind] = {
    "lora": AdapterKind(FORMATS["lora"], lora.read, lora.apply),
    "dora": AdapterKind(FORMATS["dora"], dora.read, dora.apply),
    "ia3": AdapterKind(FORMATS["ia3"], ia3.read, ia3.apply),
    "soft_prompt": AdapterKind(FORMATS["soft_prompt"], soft_prompt.read),
}
