"""Every kind of adapter by name: how it is stored, how it is read and what it does to a module.

Imports no torch: the gateway checks packages with it (adapters/check.py).
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
    # is also given shapes in place of tensors: `shape`, `dim()`, `len()` and `flatten()` work
    read: Callable[[PeftConfig, Mapping[str, Tensor]], AdapterContent]
    # wraps what a module means so far in one of its changes, at a weight; None: it makes none
    apply: Callable[[ModulePatchBuilder, Any, float], None] | None = None


ADAPTERS: dict[str, AdapterKind] = {
    "lora": AdapterKind(FORMATS["lora"], lora.read, lora.apply),
    "dora": AdapterKind(FORMATS["dora"], dora.read, dora.apply),
    "ia3": AdapterKind(FORMATS["ia3"], ia3.read, ia3.apply),
    "soft_prompt": AdapterKind(FORMATS["soft_prompt"], soft_prompt.read),
}
