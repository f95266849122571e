"""LoRA: f(x) + w * scaling * B A x.

Reads PEFT's `lora_A [r, in]`, `lora_B [out, r]` and the options that affect them (rank and alpha
patterns, rsLoRA). dora.py uses this file and adds its magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.adapters.base import AdapterContent, ModuleSize
from coterie.adapters.kinds import options
from coterie.core.errors import WeightsError
from coterie.packages.adapter_kinds import (
    FORMATS,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    AdapterFormat,
    PeftConfig,
)

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder

MAX_RANK = 4096

_UNDERSTOOD = options.keys(
    "r lora_alpha use_rslora rank_pattern alpha_pattern use_dora bias ensure_weight_tying",
    "target_modules exclude_modules layers_to_transform layers_pattern",
    # only used in training, or for the start of training; init_lora_weights is checked below
    "init_lora_weights lora_dropout eva_config loftq_config corda_config lora_ga_config",
    "runtime_config megatron_core qalora_group_size",
    # PEFT ignores it on Linear modules, and there are no others here
    "fan_in_fan_out",
)
_REFUSED = {
    "modules_to_save": "it replaces whole modules of the base model",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it builds another model out of the base's layers",
    "target_parameters": "it adapts the stacked weights of routed experts, which are not adapted",
    "lora_bias": "it adds biases beside the low-rank product",
    "use_qalora": "it pools inputs by quantisation groups",
    "alora_invocation_tokens": "activated LoRA switches on in the middle of a prompt",
    "megatron_config": "it is for Megatron's parallel layers",
    "arrow_config": "Arrow routes tokens between adapters",
    "use_bdlora": "block-diagonal factors are stored in another form",
    "kasa_config": "KaSA changes the base model's own weights",
    "monteclora_config": "it samples its weights",
    "velora_config": "VeLoRA is not known here",
}
# initialisations that do not change the base. PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ change the
# base's weights; saved with `path_initial_model_for_weight_conversion` they are plain LoRA.
_PLAIN_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class LoraChange:
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    # alpha / r, or alpha / sqrt(r), with the patterns applied
    scaling: float = 1.0

    def sizes(self) -> tuple[ModuleSize, ...]:
        return (
            ModuleSize("lora_A", self.a.shape[1], "in"),
            ModuleSize("lora_B", self.b.shape[0], "out"),
        )


def read(config: PeftConfig, tensors: Mapping[str, Tensor]) -> AdapterContent:
    for name in tensors:
        if name.endswith(MAGNITUDE):
            raise WeightsError(f"{name!r} is there, but use_dora is not set")
    factors = read_factors(config, tensors, FORMATS["lora"])
    changes = {
        path: LoraChange(parts[LORA_A], parts[LORA_B], scaling) for path, parts, scaling in factors
    }
    return AdapterContent(changes)


def apply(builder: ModulePatchBuilder, change: LoraChange, weight: float) -> None:
    if weight:
        builder.add(change.a, change.b, weight * change.scaling)


def read_factors(
    config: PeftConfig, tensors: Mapping[str, Tensor], stored: AdapterFormat
) -> Iterator[tuple[str, dict[str, Tensor], float]]:
    """For each module its path, its tensors by suffix, and its scaling."""
    _check(config, tensors)
    ranks, alphas = options.table(config, "rank_pattern"), options.table(config, "alpha_pattern")
    rank = options.whole(config, "r", 1, MAX_RANK)
    alpha = options.number(config.get("lora_alpha", 8), "lora_alpha")
    rooted, tied = options.flag(config, "use_rslora"), options.flag(config, "ensure_weight_tying")
    for path, parts in options.modules(config, tensors, stored).items():
        if tied and path.endswith("lm_head"):
            raise WeightsError("adapter_config.json: ensure_weight_tying adapts the embedding too")
        own = options.pick(ranks, path, rank)
        if type(own) is not int or not 0 < own <= MAX_RANK:
            raise WeightsError(f"adapter_config.json: rank_pattern gives {path} the rank {own!r}")
        strength = options.number(options.pick(alphas, path, alpha), "alpha_pattern")
        a, b = parts[LORA_A], parts[LORA_B]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != own or b.shape[1] != own:
            raise WeightsError(
                f"{path}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not have the rank "
                f"{own} that adapter_config.json gives this module"
            )
        yield path, parts, strength / (math.sqrt(own) if rooted else own)


def _check(config: PeftConfig, tensors: Mapping[str, Tensor]) -> None:
    options.check(config, _UNDERSTOOD, _REFUSED)
    if config.get("bias", "none") != "none":
        raise WeightsError(
            f"adapter_config.json: bias={config['bias']!r} is not supported: it replaces biases of "
            "the base model"
        )
    start = config.get("init_lora_weights")
    if start not in _PLAIN_INITIALISATIONS:
        raise WeightsError(
            f"adapter_config.json: init_lora_weights={start!r} took a part out of the base model's "
            "weights, so that the adapter is for a changed base. Save it with "
            "path_initial_model_for_weight_conversion, which makes it plain LoRA."
        )
    options.flag(config, "use_dora")
    for name in tensors:
        if ".lora_embedding_" in name:
            raise WeightsError(
                f"{name!r}: LoRA on an embedding is not supported: it changes every token's input. "
                "Train without embed_tokens in target_modules."
            )
