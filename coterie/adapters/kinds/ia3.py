"""IA3: multiplies a module's output by a learned vector, or its input for feedforward modules.

With weight w the vector is 1 + w * (l - 1). Reads PEFT's `ia3_l` ([out, 1], feedforward [1, in]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.adapters.base import AdapterContent, ModuleSize
from coterie.adapters.kinds import options
from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import FORMATS, IA3_L, PeftConfig

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder

_UNDERSTOOD = options.keys(
    "target_modules exclude_modules feedforward_modules init_ia3_weights",
    # PEFT ignores it on Linear modules, and there are no others here
    "fan_in_fan_out",
)
_REFUSED = {"modules_to_save": "it replaces whole modules of the base model"}


@dataclass(frozen=True, slots=True)
class Ia3Change:
    vector: Tensor  # [out], or [in] where `feedforward`
    feedforward: bool = False

    def sizes(self) -> tuple[ModuleSize, ...]:
        return (ModuleSize("ia3_l", self.vector.shape[0], "in" if self.feedforward else "out"),)


def read(config: PeftConfig, tensors: Mapping[str, Tensor]) -> AdapterContent:
    options.check(config, _UNDERSTOOD, _REFUSED)
    inner = options.names(config, "feedforward_modules")
    if inner is None:
        raise WeightsError("adapter_config.json: feedforward_modules is missing; [] means none")
    changes, is_inner = {}, _inner(inner)
    for path, parts in options.modules(config, tensors, FORMATS["ia3"]).items():
        tensor, feedforward = parts[IA3_L], is_inner(path)
        if tensor.dim() != 2 or tensor.shape[0 if feedforward else 1] != 1:
            form = "[1, in]: feedforward_modules names it" if feedforward else "[out, 1]"
            raise WeightsError(f"{path}.ia3_l has shape {list(tensor.shape)}, not {form}")
        changes[path] = Ia3Change(tensor.flatten(), feedforward)
    return AdapterContent(changes)


def apply(builder: ModulePatchBuilder, change: Ia3Change, weight: float) -> None:
    if not weight:
        return
    vector = change.vector.float()
    if weight != 1:
        vector = 1 + weight * (vector - 1)
    (builder.scale_input if change.feedforward else builder.scale_output)(vector)


def _inner(names: list[str] | str) -> Callable[[str], bool]:
    """Matches like PEFT: by the end of the path, without regard to dots."""
    if isinstance(names, str):
        return options.targeting(names)
    ends = tuple(names)
    return lambda path: path.endswith(ends)
