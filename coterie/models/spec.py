"""A model's shape as a value, and how it is read from `config.json`.

Defines which options the dense decoder family supports; every other value is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.core.errors import ConfigError, WeightsError
from coterie.kernels.expert_gate import GateRule
from coterie.models.build.rope import Rope, read_rope, rope_kind
from coterie.models.config_fields import shown

# Options that change what a dense decoder computes, with the only values that are supported here.
# They appear in forks and in the files of similar architectures.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "no_rope_layers": (None, []),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    # the longest context that is served; a sliding window limits it
    max_positions: int
    eps: float
    # the LM head is the embedding
    tied: bool
    eos_ids: tuple[int, ...]
    # None: learned positions (DWR)
    rope: Rope | None
    # RMS norm over each query and key head before rope
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    # the norm is over all query (or key) heads together, and its output may be clipped (OLMoE)
    flat_qk_norm: bool = False
    clip_qkv: float | None = None
    # with it, head_dim is the number of cached values per token, and num_kv_heads is 1 (DeepSeek)
    latent: LatentSpec | None = None
    moe: MoeSpec | None = None

    @property
    def attention_scale(self) -> float:
        if self.latent is None:
            return float(self.head_dim**-0.5)
        scale = float((self.latent.nope + self.latent.rope) ** -0.5)
        return scale * self.rope.magnitude() ** 2 if self.rope else scale

    @property
    def rotary(self) -> Rope:
        """`rope`, for code that only runs for models with rotary positions."""
        if self.rope is None:
            raise TypeError(f"{self.architecture} has no rotary positions")
        return self.rope

    @property
    def kv_planes(self) -> int:
        """Keys and values, or one latent for both."""
        return 1 if self.latent else 2


def read_dense(config: dict[str, Any], max_context: int | None, **options: Any) -> ModelSpec:
    """The keys that all architectures of this family share; `options` are ModelSpec's flags."""
    refuse_unknown_meanings(config)
    heads, hidden = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    kv_heads = whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise WeightsError(
            f"config: {heads} attention heads cannot share {kv_heads} key-value heads"
        )
    positions = served_positions(config, max_context)
    head_dim = whole(config, "head_dim", hidden // heads)
    return ModelSpec(
        architecture=config["architectures"][0],
        num_layers=whole(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=whole(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=whole(config, "vocab_size"),
        max_positions=positions,
        eps=float(config.get("rms_norm_eps") or 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=token_ids(config.get("eos_token_id")),
        rope=read_rope(config, head_dim, positions),
        **options,
    )


def whole(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number, or an error that names the key."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise WeightsError(f"config: {key} must be a positive whole number, not {shown(value)}")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    """eos_token_id is a number, a list or missing."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def served_positions(config: dict[str, Any], max_context: int | None) -> int:
    """The served context. No layer attends beyond a sliding window, so inside the window full
    attention computes the same; longer contexts are not served."""
    limit = whole(config, "max_position_embeddings", 2048)
    asked = max_context or limit
    if asked > limit and rope_kind(config) != "dynamic":
        raise ConfigError(f"a context of {asked} tokens is over the model's own limit of {limit}")
    window = config.get("sliding_window")
    return min(asked, window) if window else asked


def refuse_unknown_meanings(config: dict[str, Any]) -> None:
    for key, allowed in _NEUTRAL.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise WeightsError(f"config: {key} {shown(value)} is not supported")


__all__ = ["GateRule", "LatentSpec", "MoeSpec", "check_moe", "flag", "gated_parts"]

GATED_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True, slots=True)
class MoeSpec:
    # layers that have experts; the others are dense
    layers: tuple[int, ...]
    num_experts: int
    # rows of an expert's gate
    intermediate: int
    gate_rule: GateRule
    # tensor names: the gate (without .weight) and part -> expert tensor, with {layer}, {expert}
    gate: str
    parts: Mapping[str, str] = field(hash=False)
    gated: bool = True
    # width of the shared expert, which every token uses; it belongs to the backbone
    shared: int = 0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: the cache has `kv_rank + rope` values per token."""

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
    """Refuse numbers that no gate can satisfy."""
    rule, experts = moe.gate_rule, moe.num_experts
    if not moe.layers:
        raise WeightsError("config: no layer has experts; this is a dense model")
    if not 0 < rule.top_k <= experts:
        raise WeightsError(f"config: {rule.top_k} of {experts} experts cannot be picked")
    if experts % rule.groups or not 0 < rule.top_groups <= rule.groups:
        raise WeightsError(
            f"config: {experts} experts do not form {rule.groups} groups of which "
            f"{rule.top_groups} are picked"
        )
    if rule.top_k > experts // rule.groups * rule.top_groups:
        raise WeightsError(
            f"config: {rule.top_groups} groups of {experts // rule.groups} experts hold "
            f"fewer than the {rule.top_k} to pick"
        )
    return moe


def flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    return default if value is None else bool(value)
