"""LoRA: f(x) + w * scaling * B A x.

Reads PEFT's `lora_A [r, in]`, `lora_B [out, r]` and the options that shape them (rank and alpha
patterns, rsLoRA). DoRA reads through this file and adds its magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from coterie.adapters.base import ModuleChange
from coterie.adapters.kinds import options
from coterie.core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.adapters.kinds.patch_builder import ModulePatchBuilder

PEFT_TYPE = "LORA"
MAX_RANK = 4096

_UNDERSTOOD = options.keys(
    "r lora_alpha use_rslora rank_pattern alpha_pattern use_dora bias ensure_weight_tying",
    "target_modules exclude_modules layers_to_transform layers_pattern",
    # of training alone, or of where training began; init_lora_weights is checked below
    "init_lora_weights lora_dropout eva_config loftq_config corda_config lora_ga_config",
    "runtime_config megatron_core qalora_group_size",
    # PEFT itself unsets it on Linear modules, the only ones here
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
# beginnings that leave the base as it is. PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ take a part out of
# the base's weights; saved with `path_initial_model_for_weight_conversion` they are plain LoRA.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# tensor name behind the module's path -> part
_SUFFIXES = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_magnitude_vector": "magnitude"}
PREFIX = "base_model.model."


def read(config: options.PeftConfig, tensors: Mapping[str, Tensor]) -> dict[str, ModuleChange]:
    """By module path. Every tensor must belong, and every module must be whole."""
    _check(config)
    ranks, alphas = options.table(config, "rank_pattern"), options.table(config, "alpha_pattern")
    rank = options.whole(config, "r", 1, MAX_RANK)
    alpha = options.number(config.get("lora_alpha", 8), "lora_alpha")
    rooted, dora = options.flag(config, "use_rslora"), options.flag(config, "use_dora")
    changes = {}
    for path, parts in _modules(config, tensors).items():
        own = options.pick(ranks, path, rank)
        if type(own) is not int or not 0 < own <= MAX_RANK:
            raise WeightsError(f"adapter_config.json: rank_pattern gives {path} the rank {own!r}")
        strength = options.number(options.pick(alphas, path, alpha), "alpha_pattern")
        scaling = strength / (math.sqrt(own) if rooted else own)
        _check_module(path, parts, own, dora)
        changes[path] = ModuleChange(
            a=parts["a"], b=parts["b"], scaling=scaling, magnitude=parts.get("magnitude")
        )
    return changes


def apply(folding: ModulePatchBuilder, change: ModuleChange, weight: float) -> None:
    if change.a is not None and change.b is not None and weight:
        folding.add(change.a, change.b, weight * change.scaling)


def _check(config: options.PeftConfig) -> None:
    options.check(config, _UNDERSTOOD, _REFUSED)
    if config.get("bias", "none") != "none":
        raise WeightsError(
            f"adapter_config.json: bias={config['bias']!r} is not supported: it replaces biases of "
            "the base model"
        )
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise WeightsError(
            f"adapter_config.json: init_lora_weights={start!r} took a part out of the base model's "
            "weights, so that the adapter is for a changed base. Save it with "
            "path_initial_model_for_weight_conversion, which makes it plain LoRA."
        )


def _modules(
    config: options.PeftConfig, tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    is_target = options.targeting(options.names(config, "target_modules"))
    tied = options.flag(config, "ensure_weight_tying")
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        suffix = name[name.rfind(".lora_") :]
        if ".lora_embedding_" in name:
            raise WeightsError(
                f"{name!r}: LoRA on an embedding is not supported: it changes every token's input. "
                "Train without embed_tokens in target_modules."
            )
        if suffix not in _SUFFIXES or not name.startswith(PREFIX):
            raise WeightsError(f"{name!r} is no tensor of a LoRA adapter as PEFT saves one")
        path = name[len(PREFIX) : -len(suffix)]
        if path not in found and not is_target(path):
            raise WeightsError(f"{name!r}: target_modules does not name {path}")
        if tied and path.endswith("lm_head"):
            raise WeightsError("adapter_config.json: ensure_weight_tying adapts the embedding too")
        found.setdefault(path, {})[_SUFFIXES[suffix]] = tensor
    return found


def _check_module(path: str, parts: Mapping[str, Tensor], rank: int, dora: bool) -> None:
    missing = {"a", "b", *(("magnitude",) if dora else ())} - parts.keys()
    if missing:
        names = {part: suffix[1:] for suffix, part in _SUFFIXES.items()}
        raise WeightsError(f"{path}: lacks {names[min(missing)]}")
    if not dora and "magnitude" in parts:
        raise WeightsError(f"{path}: has lora_magnitude_vector, but use_dora is not set")
    a, b = parts["a"], parts["b"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise WeightsError(
            f"{path}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not have the rank "
            f"{rank} that adapter_config.json gives this module"
        )
    if dora and parts["magnitude"].shape != (b.shape[0],):
        raise WeightsError(f"{path}: lora_magnitude_vector is not as long as lora_B has rows")
