"""IA3: a learned vector times a module's output, or times its input for feedforward modules.

With weight w the vector is 1 + w * (l - 1). Reads PEFT's `ia3_l` ([out, 1], feedforward [1, in]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from coterie.adapters.base import ModuleChange
from coterie.adapters.kinds import options
from coterie.adapters.kinds.lora import PREFIX
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder

PEFT_TYPE = "IA3"

_UNDERSTOOD = options.keys(
    "target_modules exclude_modules feedforward_modules init_ia3_weights",
    # PEFT itself unsets it on Linear modules, the only ones here
    "fan_in_fan_out",
)
_REFUSED = {"modules_to_save": "it replaces whole modules of the base model"}
_SUFFIX = ".ia3_l"


def read(config: options.PeftConfig, tensors: Mapping[str, Tensor]) -> dict[str, ModuleChange]:
    options.check(config, _UNDERSTOOD, _REFUSED)
    is_target = options.targeting(options.names(config, "target_modules"))
    inner = options.names(config, "feedforward_modules")
    if inner is None:
        raise WeightsError("adapter_config.json: feedforward_modules is missing; [] means none")
    changes, is_inner = {}, _inner(inner)
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX) or not name.endswith(_SUFFIX):
            raise WeightsError(f"{name!r} is no tensor of an IA3 adapter as PEFT saves one")
        path = name[len(PREFIX) : -len(_SUFFIX)]
        if not is_target(path):
            raise WeightsError(f"{name!r}: target_modules does not name {path}")
        feedforward = is_inner(path)
        if tensor.dim() != 2 or tensor.shape[0 if feedforward else 1] != 1:
            form = "[1, in]: feedforward_modules names it" if feedforward else "[out, 1]"
            raise WeightsError(f"{name!r} has shape {list(tensor.shape)}, not {form}")
        changes[path] = ModuleChange(vector=tensor.flatten(), feedforward=feedforward)
    return changes


def apply(folding: ModulePatchBuilder, change: ModuleChange, weight: float) -> None:
    if change.vector is None or not weight:
        return
    vector = change.vector.float()
    if weight != 1:
        vector = 1 + weight * (vector - 1)
    (folding.scale_input if change.feedforward else folding.scale_output)(vector)


def _inner(names: list[str] | str) -> Callable[[str], bool]:
    """As PEFT matches them: by the end of the path, without regard to dots."""
    if isinstance(names, str):
        return options.targeting(names)
    ends = tuple(names)
    return lambda path: path.endswith(ends)
