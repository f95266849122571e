"""CarvedForCausalLM: a dense Llama or Qwen3 whose MLPs were divided into experts (see carve.py).

Its config is the dense model's with the division added. Every chosen expert has weight 1: if all
are chosen, the layer computes the dense MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coterie.core.errors import WeightsError
from coterie.models.arch import llama, mistral, qwen3
from coterie.models.spec import GateRule, ModelSpec, MoeSpec, check_moe, gated_parts, whole

ARCHITECTURE = "CarvedForCausalLM"

# dense architectures that can be divided, and how their config is read
DENSE = {
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "Qwen3ForCausalLM": qwen3.read,
}


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    origin = config.get("carved_from")
    if origin not in DENSE:
        raise WeightsError(f"config: carved_from={origin!r} is not one of {', '.join(DENSE)}")
    shared = config.get("shared_intermediate_size", 0)
    if not isinstance(shared, int) or shared < 0:
        raise WeightsError(f"config: shared_intermediate_size={shared!r} is not a whole number")
    moe = MoeSpec(
        layers=tuple(range(whole(config, "num_hidden_layers"))),
        num_experts=whole(config, "num_experts"),
        intermediate=whole(config, "moe_intermediate_size"),
        gate_rule=GateRule(whole(config, "num_experts_per_tok"), normalise=False, equal=True),
        gate="model.layers.{layer}.mlp.gate",
        parts=gated_parts("mlp"),
        shared=shared,
    )
    dense = DENSE[origin](config, max_context)
    return replace(dense, moe=check_moe(moe))
