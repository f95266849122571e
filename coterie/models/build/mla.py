"""Multi-head latent attention: keys and values of all heads come from one small vector per token.

Only that vector is cached. Queries are projected into its space, and the mixed vector is projected
back per head, so that no key or value of a past token is computed again. This module defines the
tensors' names and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels import patched
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.decoder import DecoderLayer
from coterie.kernels.linear import Linear, ReferenceLinear, joined
from coterie.kernels.reference import layers as reference
from coterie.kernels.reference.layers import HeadLinear
from coterie.models.build.layers import (
    BackendOps,
    DecoderBlock,
    GatedMlp,
    RotaryCache,
    post_norm,
    read_mlp,
    rows_of,
)
from coterie.models.build.reader import BiasedLinear
from coterie.models.spec import LatentSpec
from coterie.weights.quantize import DenseWeight, Weight, dense

if TYPE_CHECKING:
    from coterie.models.build.reader import TensorReader

# transformers uses this for the two inner norms, whatever the config says for the others
INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """One product, or two with a norm between them."""

    last: Linear
    first: Linear | None = None
    norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentParts:
    queries: LatentQueries
    kv_a: Linear  # rows: the latent, then the key that is rotated
    kv_norm: Tensor  # [kv_rank]
    key_up: HeadLinear  # nope -> kv_rank
    value_up: HeadLinear  # kv_rank -> value
    o: Linear


@dataclass(frozen=True, slots=True)
class LatentAttention:
    parts: LatentParts
    latent: LatentSpec
    scale: float
    ops: BackendOps
    rotary: RotaryCache
    # the layer's number, by which adapters find it
    index: int

    def __call__(self, x: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> Tensor:
        parts, latent, cos_sin = self.parts, self.latent, self.rotary(batch)
        rank, rows = latent.kv_rank, self._product(parts.kv_a, "kv_a", x, batch)
        normed = self.ops.norm(rows[:, :rank].contiguous(), parts.kv_norm, INNER_EPS)
        key = reference.rotary(rows[:, None, rank:], *cos_sin)[:, 0]
        self.ops.write_latent(torch.cat((normed, key), dim=-1), kv_layer, batch.slots)
        q = self._queries(x, batch).view(len(x), -1, latent.nope + latent.rope)
        wide = parts.key_up(q[..., : latent.nope])
        turned = reference.rotary(q[..., latent.nope :], *cos_sin)
        mixed = self.ops.latent(wide, turned, kv_layer, batch, self.scale)
        values = parts.value_up(mixed).reshape(len(x), -1)
        return self._product(parts.o, "o", values, batch)

    def _queries(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        queries = self.parts.queries
        if queries.first is None or queries.norm is None:
            return self._product(queries.last, "q", x, batch)
        low = self._product(queries.first, "q_a", x, batch)
        normed = self.ops.norm(low, queries.norm, INNER_EPS)
        return self._product(queries.last, "q_b", normed, batch)

    def _product(self, product: Linear, part: str, x: Tensor, batch: AttentionBatch) -> Tensor:
        parts = ((part, product.out_features),)
        return patched.linear(product, x, self.index, parts, batch.patches)


def read_block(
    reader: TensorReader, index: int, ops: BackendOps, rotary: RotaryCache
) -> DecoderBlock:
    """One layer; of one with experts only the attention."""
    spec, base = reader.spec, f"model.layers.{index}."
    latent = spec.latent
    if latent is None:
        raise TypeError(f"{spec.architecture} has no latent attention")
    parts = _read_parts(reader, base + "self_attn.", latent)
    attend = LatentAttention(parts, latent, spec.attention_scale, ops, rotary, index)
    input_norm = reader.vector(base + "input_layernorm.weight", spec.hidden)
    if spec.moe is not None and index in spec.moe.layers:
        return DecoderBlock(input_norm, attend)
    mlp = read_mlp(reader, index, spec.intermediate)
    return DecoderBlock(input_norm, attend, reader.vector(post_norm(index), spec.hidden), mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer(DecoderLayer):
    """qkv: rows of q (or of its first product), then of kv_a."""

    attend: LatentAttention


def joined_layers(blocks: Sequence[DecoderBlock]) -> list[DecoderLayer]:
    """The layers for kernels that read q and kv_a as one matrix; none if their kinds differ."""
    layers: list[DecoderLayer] = []
    for block in blocks:
        attend, mlp = block.attend, block.mlp
        assert isinstance(attend, LatentAttention)
        queries, kv_a = attend.parts.queries, attend.parts.kv_a
        qkv = _joined(queries.first or queries.last, kv_a)
        if qkv is None:
            return []
        layers.append(
            LatentLayer(
                input_norm=block.input_norm,
                qkv=qkv,
                q_norm=None,
                k_norm=None,
                qkv_bias=None,
                o=attend.parts.o,
                post_norm=block.post_norm,
                gate_up=mlp.gate_up if isinstance(mlp, GatedMlp) else None,
                down=mlp.down if isinstance(mlp, GatedMlp) else None,
                attend=attend,
            )
        )
    return layers


def _joined(first: Linear, second: Linear) -> Linear | None:
    from coterie.kernels.triton.quant_linear import MixedLinear, QuantLinear

    if isinstance(first, ReferenceLinear) and isinstance(second, ReferenceLinear):
        return joined([first, second])
    if isinstance(first, QuantLinear) and isinstance(second, QuantLinear):
        same = first.matrix.kind == second.matrix.kind
        return QuantLinear.joined([first, second]) if same else MixedLinear([first, second])
    return None


def _read_parts(reader: TensorReader, stem: str, latent: LatentSpec) -> LatentParts:
    spec = reader.spec
    order = _halves(1, latent.kv_rank, latent.rope)
    name = stem + "kv_a_proj_with_mqa"
    product = _reordered(reader, name, spec.hidden, order, spec.qkv_bias)
    key_up, value_up = _ups(reader, stem, latent)
    return LatentParts(
        queries=_read_queries(reader, stem, latent),
        kv_a=product,
        kv_norm=reader.vector(stem + "kv_a_layernorm.weight", latent.kv_rank),
        key_up=key_up,
        value_up=value_up,
        o=reader.linear(
            [stem + "o_proj"], [spec.hidden], spec.num_heads * latent.value, spec.o_bias
        ),
    )


def _read_queries(reader: TensorReader, stem: str, latent: LatentSpec) -> LatentQueries:
    spec, rank = reader.spec, latent.q_rank
    order = _halves(spec.num_heads, latent.nope, latent.rope)
    if rank is None:
        return LatentQueries(_reordered(reader, stem + "q_proj", spec.hidden, order))
    return LatentQueries(
        last=_reordered(reader, stem + "q_b_proj", rank, order),
        first=reader.linear([stem + "q_a_proj"], [rank], spec.hidden, spec.qkv_bias),
        norm=reader.vector(stem + "q_a_layernorm.weight", rank),
    )


def _reordered(
    reader: TensorReader, name: str, columns: int, order: Tensor, biased: bool = False
) -> Linear:
    """One product whose row i is row order[i] of the stored matrix."""
    rows = len(order)
    product = reader.product([rows_of(reader.matrix(name + ".weight", rows, columns), order)])
    biases = [reader.vector(name + ".bias", rows)] if biased else []
    reader.add_targets(product, [name], [rows], biases, order)
    if not biases:
        return product
    return BiasedLinear(product, biases[0][order.to(reader.device)])


def _halves(heads: int, plain: int, rotated: int) -> Tensor:
    """An order of rows in which the pairs of the rotated part are two halves and not adjacent.
    Scores do not depend on the order, and so one rotary kernel serves all models."""
    pairs = torch.arange(plain, plain + rotated).view(-1, 2).T.reshape(-1)
    one = torch.cat((torch.arange(plain), pairs))
    return (torch.arange(heads)[:, None] * (plain + rotated) + one).reshape(-1)


def _ups(reader: TensorReader, stem: str, latent: LatentSpec) -> tuple[HeadLinear, HeadLinear]:
    """kv_b_proj, head by head: [nope rows of keys, value rows] x kv_rank."""
    heads, size = reader.spec.num_heads, latent.nope + latent.value
    if reader.has(stem + "k_b_proj.weight"):
        return _split_ups(reader, stem, latent)
    weight = reader.matrix(stem + "kv_b_proj.weight", heads * size, latent.kv_rank)
    rows = torch.arange(heads * size).view(heads, size)
    keys = [_transposed(rows_of(weight, own[: latent.nope])) for own in rows]
    values = [rows_of(weight, own[latent.nope :]) for own in rows]
    return reader.per_head(keys), reader.per_head(values)


def _split_ups(
    reader: TensorReader, stem: str, latent: LatentSpec
) -> tuple[HeadLinear, HeadLinear]:
    """As GGUF files store them: a stack of heads each, the keys already transposed."""
    heads, rank = reader.spec.num_heads, latent.kv_rank
    keys = dense(reader.take(stem + "k_b_proj.weight", (heads, rank, latent.nope)))
    values = dense(reader.take(stem + "v_b_proj.weight", (heads, latent.value, rank)))
    # stacks are widened when read: round them no further than to the model's own type
    kept = torch.bfloat16 if reader.dtype == "bf16" else torch.float32
    return (
        reader.per_head([DenseWeight(head.to(kept)) for head in keys]),
        reader.per_head([DenseWeight(head.to(kept)) for head in values]),
    )


def _transposed(weight: Weight) -> Weight:
    """Quantised groups are parts of a row, so a transposed matrix has to be dense."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.tensor.T.contiguous())
    return DenseWeight(dense(weight).T.contiguous())
