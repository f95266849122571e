"""Writes a mixture of experts again with fewer experts, narrower experts, or another number of
active ones, from the same weights: for `coterie sweep`, which measures what each costs.

Experts and neurons that are left out are the last ones. Nothing is trained again, so the text of a
variant is worse; its speed and its memory are those of a model of that shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.models.base import read_spec
from coterie.models.carve.files import write_tokenizer
from coterie.moe.store.base import ExpertShape
from coterie.weights.formats.safetensors import INDEX
from coterie.weights.quantize import DenseWeight, dense

if TYPE_CHECKING:
    from coterie.models.spec import MoeSpec
    from coterie.weights.checkpoint import Checkpoint

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """What differs from the model; None = as it is."""

    active: int | None = None
    experts: int | None = None
    # neurons of each expert
    width: int | None = None

    def __str__(self) -> str:
        words = {"active": self.active, "experts": self.experts, "neurons": self.width}
        changed = [f"{value} {word}" for word, value in words.items() if value is not None]
        return ", ".join(changed) or "as it is"


def moe_of(checkpoint: Checkpoint) -> MoeSpec:
    moe = read_spec(checkpoint).moe
    if moe is None:
        raise ConfigError(
            f"{checkpoint.path}: a dense model has no experts to sweep; coterie carve makes some",
            param="model",
        )
    return moe


def write_variant(checkpoint: Checkpoint, variant: ModelVariant, out: Path) -> None:
    """A directory of safetensors, one file for each layer."""
    moe = moe_of(checkpoint)
    _check(checkpoint, moe, variant)
    out.mkdir(parents=True)
    cuts = _cuts(moe, variant)
    where: dict[str, str] = {}
    for number, names in enumerate(_groups(checkpoint, moe)):
        tensors = {name: cut for name in names if (cut := _cut(checkpoint, name, cuts)) is not None}
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, out / file)
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": dict(sorted(where.items()))}
    (out / INDEX).write_text(json.dumps(index), encoding="utf-8")
    config = json.dumps(_config(checkpoint, moe, variant))
    (out / "config.json").write_text(config, encoding="utf-8")
    write_tokenizer(checkpoint, out)


def _check(checkpoint: Checkpoint, moe: MoeSpec, variant: ModelVariant) -> None:
    if not checkpoint.path.is_dir():
        raise ConfigError(
            f"{checkpoint.path}: variants are made of a safetensors directory", param="model"
        )
    most = {
        "active": (variant.active, variant.experts or moe.num_experts),
        "experts": (variant.experts, moe.num_experts),
        "width": (variant.width, moe.intermediate),
    }
    for param, (value, limit) in most.items():
        if value is not None and not 0 < value <= limit:
            raise ConfigError(f"{param} {value} must be from 1 to {limit}", param=param)
    own_width = any(key.startswith("shared_") for key in checkpoint.config)
    if variant.width is not None and moe.shared and not own_width:
        raise ConfigError(
            "one setting of this model sizes routed and shared experts: neurons cannot be swept",
            param="width",
        )
    if variant.experts is not None and variant.experts < moe.gate_rule.top_k:
        raise ConfigError(
            f"experts {variant.experts} must be at least the {moe.gate_rule.top_k} that are active",
            param="experts",
        )


def _config(checkpoint: Checkpoint, moe: MoeSpec, variant: ModelVariant) -> dict[str, object]:
    config = dict(checkpoint.config)
    if variant.active is not None:
        config["num_experts_per_tok"] = variant.active
    if variant.experts is not None:
        config[next(key for key in _COUNTS if key in config)] = variant.experts
    if variant.width is not None:
        width = next(key for key in _WIDTHS if config.get(key) == moe.intermediate)
        config[width] = variant.width
    return config


# tensor name -> (dimension, size) to cut to; None: left out
Cuts = Mapping[str, tuple[int, int] | None]


def _cuts(moe: MoeSpec, variant: ModelVariant) -> Cuts:
    cuts: dict[str, tuple[int, int] | None] = {}
    experts = variant.experts or moe.num_experts
    for layer in moe.layers:
        gate = moe.gate.format(layer=layer)
        # of some models the gate has a bias, or corrects its scores
        for ending in ("weight", "bias", "e_score_correction_bias"):
            cuts[f"{gate}.{ending}"] = (0, experts)
        for expert in range(moe.num_experts):
            for part, text in moe.parts.items():
                name = text.format(layer=layer, expert=expert)
                if expert >= experts:
                    cuts[name] = None
                elif variant.width is not None and (at := _width_axis(moe, part)) is not None:
                    cuts[name] = (at, variant.width)
    return cuts


def _width_axis(moe: MoeSpec, part: str) -> int | None:
    """The dimension of a part that has a row or column for each neuron."""
    # sizes that cannot be taken for each other
    shape = ExpertShape(hidden=-1, intermediate=-2, gated=moe.gated).of(part)
    return shape.index(-2) if -2 in shape else None


def _groups(checkpoint: Checkpoint, moe: MoeSpec) -> list[list[str]]:
    """Names by layer, so that one layer is in memory at a time."""
    stems = {
        moe.gate.format(layer=layer).partition(str(layer))[0] + f"{layer}." for layer in moe.layers
    }
    groups: dict[str, list[str]] = {}
    for name in checkpoint.names():
        stem = next((stem for stem in stems if name.startswith(stem)), "")
        groups.setdefault(stem, []).append(name)
    return list(groups.values())


def _cut(checkpoint: Checkpoint, name: str, cuts: Cuts) -> Tensor | None:
    if name in cuts and cuts[name] is None:
        return None
    weight = checkpoint.read(name)
    tensor = weight.tensor if isinstance(weight, DenseWeight) else dense(weight)
    if cut := cuts.get(name):
        dimension, size = cut
        tensor = tensor.narrow(dimension, 0, size)
    return tensor.contiguous().clone()
