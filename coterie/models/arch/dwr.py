"""DWRForCausalLM: learned positions, post-norm blocks with biases, and fc1-GELU-fc2 experts in all
layers.

The architecture of DWR-Transformer. transformers does not have it: its config keys and tensor names
are defined here and in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from coterie.core.errors import WeightsError
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.expert_gate import ExpertGate
from coterie.kernels.linear import Linear
from coterie.kernels.reference import layers as reference
from coterie.models.build.assemble import AssembledModel
from coterie.models.build.layers import BackendOps, Progress, ops_for, read_embedding_and_head
from coterie.models.build.moe import MoeLayer
from coterie.models.build.targets import ModelTargets
from coterie.models.config_fields import shown
from coterie.models.spec import (
    GateRule,
    ModelSpec,
    MoeSpec,
    check_moe,
    refuse_unknown_meanings,
    served_positions,
    token_ids,
    whole,
)
from coterie.weights.quantize import dense

if TYPE_CHECKING:
    from coterie.models.build.reader import TensorReader

_PARTS = {"fc1": "fc1.weight", "fc1_bias": "fc1.bias", "fc2": "fc2.weight", "fc2_bias": "fc2.bias"}


def read(config: dict[str, Any], max_context: int | None = None) -> ModelSpec:
    if config.get("hidden_act", "gelu") != "gelu":
        raise WeightsError(f"config: hidden_act {shown(config['hidden_act'])} is not supported")
    refuse_unknown_meanings({**config, "hidden_act": "silu"})
    heads, hidden = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    if hidden % heads:
        raise WeightsError(f"config: hidden_size {hidden} is not a multiple of {heads} heads")
    layers = whole(config, "num_hidden_layers")
    stem = "blocks.{layer}.experts.{expert}."
    moe = MoeSpec(
        layers=tuple(range(layers)),
        num_experts=whole(config, "num_experts"),
        intermediate=whole(config, "intermediate_size"),
        gate_rule=GateRule(top_k=whole(config, "num_experts_per_tok", 2), normalise=True),
        gate="blocks.{layer}.router",
        parts={part: stem + name for part, name in _PARTS.items()},
        gated=False,
    )
    return ModelSpec(
        architecture=config["architectures"][0],
        num_layers=layers,
        hidden=hidden,
        intermediate=moe.intermediate,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab=whole(config, "vocab_size"),
        max_positions=served_positions(config, max_context),
        eps=float(config.get("layer_norm_eps") or 1e-5),
        tied=False,
        eos_ids=token_ids(config.get("eos_token_id")),
        rope=None,
        moe=check_moe(moe),
    )


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (len(self.weight),), self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class AttentionHalf:
    qkv: Linear
    out: Linear
    norm: LayerNorm


class DwrBackbone:
    """All of the blocks except gates and experts."""

    def __init__(
        self, positions: Tensor, halves: Sequence[AttentionHalf], num_heads: int, ops: BackendOps
    ) -> None:
        self._positions, self._halves, self._num_heads = positions, halves, num_heads
        self._attention = ops.attention

    def forward(
        self, hidden: Tensor, kv: Sequence[Tensor], batch: AttentionBatch, first: int, last: int
    ) -> Tensor:
        if first == 0:
            hidden = hidden + self._positions[batch.positions]
        for index in range(first, last):
            half = self._halves[index]
            hidden = half.norm(hidden + self._attend(half, hidden, kv[index], batch))
        return hidden

    def _attend(
        self, half: AttentionHalf, hidden: Tensor, kv_layer: Tensor, batch: AttentionBatch
    ) -> Tensor:
        rows = half.qkv(hidden).view(len(hidden), 3, self._num_heads, -1)
        reference.write_kv(rows[:, 1], rows[:, 2], kv_layer, batch.slots)
        queries = rows[:, 0].contiguous()
        mixed = self._attention(queries, kv_layer, batch, queries.shape[-1] ** -0.5)
        return half.out(mixed.reshape(hidden.shape))


def build(reader: TensorReader, backend: str, progress: Progress) -> AssembledModel:
    spec, ops = reader.spec, ops_for(backend)
    embedding_and_head = read_embedding_and_head(reader, "embeddings.weight", "output.weight")
    # the served context may be shorter than the table
    limit = reader.rows("positions.weight")
    table = dense(reader.take("positions.weight", (limit, spec.hidden)))
    positions = table[: spec.max_positions].to(reader.device, reader.placement.hidden_dtype)
    halves, layers = [], []
    for index in range(spec.num_layers):
        progress(index + 1, spec.num_layers + 1)
        halves.append(_read_half(reader, f"blocks.{index}."))
        layers.append(_read_experts(reader, index))
    return AssembledModel(
        embedding_and_head,
        DwrBackbone(positions, halves, spec.num_heads, ops).forward,
        _read_norm(reader, "norm"),
        tuple(layers),
        reader.device,
        reader.product_bytes + embedding_and_head.embedding.nbytes + positions.nbytes,
        ModelTargets(spec, {}),
    )


def _read_half(reader: TensorReader, stem: str) -> AttentionHalf:
    hidden = reader.spec.hidden
    return AttentionHalf(
        qkv=reader.linear([stem + "attn.qkv"], [3 * hidden], hidden, biased=True),
        out=reader.linear([stem + "attn.out"], [hidden], hidden, biased=True),
        norm=_read_norm(reader, stem + "norm1"),
    )


def _read_experts(reader: TensorReader, index: int) -> MoeLayer:
    spec, moe = reader.spec, reader.spec.moe
    if moe is None:
        raise TypeError("a DWR model has experts")
    name = moe.gate.format(layer=index)
    product = reader.exact(f"{name}.weight", moe.num_experts, spec.hidden)
    gate = ExpertGate(
        moe.gate_rule, product, reader.vector(f"{name}.bias", moe.num_experts).float()
    )
    add_and_norm = partial(_add_and_norm, _read_norm(reader, f"blocks.{index}.norm2"))
    return MoeLayer(index, gate, before=_unchanged, after=add_and_norm)


def _read_norm(reader: TensorReader, name: str) -> LayerNorm:
    size = reader.spec.hidden
    weight = reader.vector(f"{name}.weight", size)
    return LayerNorm(weight, reader.vector(f"{name}.bias", size), reader.spec.eps)


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _add_and_norm(norm: LayerNorm, hidden: Tensor, out: Tensor) -> Tensor:
    return norm(hidden + out)
