"""What a mixture-of-experts model adds to a dense one, as values: routing, experts, latent heads.

Owns the reading of the keys that several architectures share. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.core.errors import WeightsError
from coterie.kernels.expert_gate import Routing

__all__ = ["Latent", "MoeSpec", "Routing", "check_moe", "flag", "gated_parts"]

GATED_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True, slots=True)
class MoeSpec:
    # layers that have experts; the others are dense
    layers: tuple[int, ...]
    num_experts: int
    # rows of an expert's gate
    intermediate: int
    routing: Routing
    # tensor names: the router (without .weight) and part -> expert tensor, with {layer}, {expert}
    router: str
    parts: Mapping[str, str] = field(hash=False)
    gated: bool = True
    # width of the expert that every token passes; it stays in the backbone
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: what is cached is `kv_rank + rope` values per token."""

    q_rank: int | None
    kv_rank: int
    # dimensions of a head without and with rotary positions, and of its values
    nope: int
    rope: int
    value: int


def gated_parts(block: str) -> dict[str, str]:
    """Expert tensors below `block` ("mlp"), as Llama's MLP names them."""
    stem = f"model.layers.{{layer}}.{block}.experts.{{expert}}."
    return {part: f"{stem}{name}.weight" for part, name in GATED_PARTS.items()}


def check_moe(moe: MoeSpec) -> MoeSpec:
    """Refuses numbers that no router can satisfy."""
    routing, experts = moe.routing, moe.num_experts
    if not moe.layers:
        raise WeightsError("config: no layer has experts; this is a dense model")
    if not 0 < routing.top_k <= experts:
        raise WeightsError(f"config: {routing.top_k} of {experts} experts cannot be picked")
    if experts % routing.groups or not 0 < routing.top_groups <= routing.groups:
        raise WeightsError(
            f"config: {experts} experts do not form {routing.groups} groups of which "
            f"{routing.top_groups} are picked"
        )
    if routing.top_k > experts // routing.groups * routing.top_groups:
        raise WeightsError(
            f"config: {routing.top_groups} groups of {experts // routing.groups} experts hold "
            f"fewer than the {routing.top_k} to pick"
        )
    return moe


def flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    return default if value is None else bool(value)
