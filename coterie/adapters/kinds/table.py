"""Every kind of adapter by name, and how a PEFT config tells which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.adapters.kinds import dora, ia3, lora, soft_prompt
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.base import Change
    from coterie.adapters.kinds.folding import Folding
    from coterie.adapters.kinds.options import Config


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind changes modules (`changes`, `apply`) or brings tokens (`soft`)."""

    name: str
    changes: Callable[[Config, Mapping[str, Tensor]], dict[str, Change]] | None = None
    # wraps the module's running meaning, at a weight
    apply: Callable[[Folding, Change, float], None] | None = None
    soft: Callable[[Config, Mapping[str, Tensor]], Tensor] | None = None


ADAPTERS: dict[str, Kind] = {
    "lora": Kind("lora", lora.read, lora.apply),
    "dora": Kind("dora", dora.read, dora.apply),
    "ia3": Kind("ia3", ia3.read, ia3.apply),
    "soft_prompt": Kind("soft_prompt", soft=soft_prompt.read),
}

_BY_TYPE = {
    lora.PEFT_TYPE: "lora",
    ia3.PEFT_TYPE: "ia3",
    soft_prompt.PEFT_TYPE: "soft_prompt",
}


def kind_of(config: Config) -> str:
    """The name in ADAPTERS."""
    found = _BY_TYPE.get(str(config.get("peft_type")))
    if found is None:
        raise WeightsError(
            f"adapter_config.json: peft_type={config.get('peft_type')!r} is not supported; one of "
            + ", ".join(_BY_TYPE)
        )
    return "dora" if found == "lora" and config.get("use_dora") else found
