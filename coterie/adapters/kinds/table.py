"""Every kind of adapter by name, and how a PEFT config tells which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.adapters.kinds import dora, ia3, lora, soft_prompt
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.base import ModuleChange
    from coterie.adapters.kinds.options import PeftConfig
    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """A kind changes modules (`changes`, `apply`) or brings tokens (`soft`)."""

    name: str
    changes: Callable[[PeftConfig, Mapping[str, Tensor]], dict[str, ModuleChange]] | None = None
    # wraps the module's running meaning, at a weight
    apply: Callable[[ModulePatchBuilder, ModuleChange, float], None] | None = None
    soft: Callable[[PeftConfig, Mapping[str, Tensor]], Tensor] | None = None


ADAPTERS: dict[str, AdapterKind] = {
    "lora": AdapterKind("lora", lora.read, lora.apply),
    "dora": AdapterKind("dora", dora.read, dora.apply),
    "ia3": AdapterKind("ia3", ia3.read, ia3.apply),
    "soft_prompt": AdapterKind("soft_prompt", soft=soft_prompt.read),
}

_BY_TYPE = {
    lora.PEFT_TYPE: "lora",
    ia3.PEFT_TYPE: "ia3",
    soft_prompt.PEFT_TYPE: "soft_prompt",
}


def kind_of(config: PeftConfig) -> str:
    """The name in ADAPTERS."""
    found = _BY_TYPE.get(str(config.get("peft_type")))
    if found is None:
        raise WeightsError(
            f"adapter_config.json: peft_type={config.get('peft_type')!r} is not supported; one of "
            + ", ".join(_BY_TYPE)
        )
    return "dora" if found == "lora" and config.get("use_dora") else found
