"""Reads the parts of a decoder from a checkpoint's tensors: embedding, layers, LM head.

Defines the tensor names of the family and the precision of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels import patched
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.decoder import DecoderLayer
from coterie.kernels.linear import Linear, ReferenceLinear
from coterie.kernels.reference import layers as reference
from coterie.kernels.reference.layers import latent_attention, write_latent
from coterie.models.build.targets import TargetMatrix
from coterie.weights.formats.gguf_blocks import check_factors
from coterie.weights.quantize import (
    DenseWeight,
    GgufBlocks,
    Int4Weight,
    Int8Weight,
    Weight,
    dense,
    split,
)

if TYPE_CHECKING:
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.patch import Segment
    from coterie.models.build.reader import TensorReader

Progress = Callable[[int, int], None]


class TokenEmbedding:
    """Rows of a table by token. `nbytes`: of the table, unless it is the head."""

    def __init__(self, rows: Callable[[Tensor], Tensor], dtype: torch.dtype, nbytes: int) -> None:
        self._rows, self.dtype, self.nbytes = rows, dtype, nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._rows(token_ids).to(self.dtype)


def stored_embedding(
    weight: Weight, device: torch.device, dtype: torch.dtype, backend: str = "reference"
) -> TokenEmbedding:
    """Of a stored matrix; only the rows that are read are widened."""
    if isinstance(weight, GgufBlocks):
        check_factors(weight.blocks(), weight.type)
    if backend == "triton":
        weight = split(weight)
        if isinstance(weight, GgufBlocks):
            from coterie.kernels.triton.quant_linear import QuantLinear

            kept = QuantLinear([weight], device)
            return TokenEmbedding(lambda ids: kept.rows(ids, dtype), dtype, kept.nbytes)
    table = _moved(weight, device)
    if isinstance(table, DenseWeight):
        return TokenEmbedding(table.tensor.__getitem__, dtype, table.nbytes)
    return TokenEmbedding(lambda ids: dense(rows_of(table, ids), dtype), dtype, table.nbytes)


def _head_embedding(head: Linear, dtype: torch.dtype, backend: str) -> TokenEmbedding | None:
    """The rows of a tied head; None where its product does not give them."""
    from coterie.kernels.cpu.layers import PackedLinear

    if isinstance(head, ReferenceLinear):
        return TokenEmbedding(lambda ids: head.weight[ids], dtype, 0)
    if isinstance(head, PackedLinear):
        return TokenEmbedding(head.rows, dtype, 0)
    if backend == "triton":
        from coterie.kernels.triton.quant_linear import QuantLinear

        if isinstance(head, QuantLinear):
            return TokenEmbedding(lambda ids: head.rows(ids, dtype), dtype, 0)
    return None


def _moved(weight: Weight, device: torch.device) -> Weight:
    match weight:
        case DenseWeight(tensor):
            return DenseWeight(tensor.to(device))
        case Int8Weight(q, scale):
            return Int8Weight(q.to(device), scale.to(device))
        case Int4Weight(q, scale, minimum):
            return Int4Weight(q.to(device), scale.to(device), minimum.to(device))
        case GgufBlocks(stored, data):
            return GgufBlocks(stored, data.to(device))


def rows_of(weight: Weight, index: Tensor) -> Weight:
    match weight:
        case DenseWeight(tensor):
            return DenseWeight(tensor[index])
        case Int8Weight(q, scale):
            return Int8Weight(q[index], scale[index])
        case Int4Weight(q, scale, minimum):
            return Int4Weight(q[index], scale[index], minimum[index])
        case GgufBlocks(stored, data):
            return GgufBlocks(stored, data[index])


@dataclass(frozen=True, slots=True)
class EmbeddingAndHead:
    """The embedding before a decoder stack and the LM head after it."""

    embedding: TokenEmbedding
    head: Linear


class GatedMlp:
    """down(silu(gate(x)) * up(x)): a dense layer's MLP, or a shared expert."""

    def __init__(self, gate_up: Linear, down: Linear, layer: int, prefix: str = "") -> None:
        self.gate_up, self.down, self._layer = gate_up, down, layer
        half = gate_up.out_features // 2
        self._inner = ((prefix + "gate", half), (prefix + "up", half))
        self._outer = ((prefix + "down", down.out_features),)

    def __call__(self, x: Tensor, patches: tuple[Segment, ...] = ()) -> Tensor:
        inner = patched.linear(self.gate_up, x, self._layer, self._inner, patches)
        acts = reference.silu_mul(inner)
        return patched.linear(self.down, acts, self._layer, self._outer, patches)


def read_embedding_and_head(
    reader: TensorReader, first: str = "model.embed_tokens.weight", last: str = "lm_head.weight"
) -> EmbeddingAndHead:
    """Embedding and LM head. At int4 both stay at int8, as in GGUF files: they influence the token
    directly and are read only once per step."""
    spec = reader.spec
    dtype = "int8" if reader.dtype == "int4" else reader.dtype
    stored = reader.take(first, (spec.vocab, spec.hidden))
    table = reader.fitted(stored, dtype)
    rows = table
    if spec.tied:
        reader.drop(last)
    else:
        rows = reader.matrix(last, spec.vocab, spec.hidden, dtype)
    head = reader.product([rows])
    read = reader.reread(first if spec.tied else last, dtype)
    reader.targets["lm_head"] = TargetMatrix((-1, "head"), head, 0, spec.vocab, read)
    hidden_dtype, backend = reader.placement.hidden_dtype, reader.placement.backend
    embedding = _head_embedding(head, hidden_dtype, backend) if spec.tied else None
    if embedding is None:
        # the stored form is not larger and has the same values
        table = stored if dtype in ("auto", "fp32") else table
        with reader.naming(first):
            embedding = stored_embedding(table, reader.device, hidden_dtype, backend)
    return EmbeddingAndHead(embedding, head)


def read_mlp(reader: TensorReader, layer: int, width: int, shared: bool = False) -> GatedMlp:
    """A layer's MLP, or its shared expert."""
    hidden, biased = reader.spec.hidden, reader.spec.mlp_bias
    stem = f"model.layers.{layer}.mlp." + ("shared_experts." if shared else "")
    gate_up = reader.linear([stem + "gate_proj", stem + "up_proj"], [width, width], hidden, biased)
    down = reader.linear([stem + "down_proj"], [hidden], width, biased)
    return GatedMlp(gate_up, down, layer, "shared_" if shared else "")


def read_layer(reader: TensorReader, index: int) -> DecoderLayer:
    """One block; of a layer with experts only the attention."""
    spec, base = reader.spec, f"model.layers.{index}."
    attention = base + "self_attn."
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    names = [f"{attention}{part}_proj" for part in "qkv"]
    sizes = [q_size, kv_size, kv_size]
    qkv = reader.linear(names, sizes, spec.hidden)
    biases = _biases(reader, names, sizes) if spec.qkv_bias else []
    if biases:
        # the decoders add them after the product
        reader.add_targets(qkv, names, sizes, biases)
    routed = spec.moe is not None and index in spec.moe.layers
    mlp = None if routed else read_mlp(reader, index, spec.intermediate)
    q_norm, k_norm = _qk_norms(reader, attention, q_size, kv_size)
    return DecoderLayer(
        input_norm=reader.vector(base + "input_layernorm.weight", spec.hidden),
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        qkv_bias=torch.cat(biases) if biases else None,
        o=reader.linear([attention + "o_proj"], [spec.hidden], q_size, spec.o_bias),
        post_norm=None if routed else reader.vector(post_norm(index), spec.hidden),
        gate_up=mlp.gate_up if mlp else None,
        down=mlp.down if mlp else None,
    )


def post_norm(index: int) -> str:
    return f"model.layers.{index}.post_attention_layernorm.weight"


def _qk_norms(
    reader: TensorReader, attention: str, q_size: int, kv_size: int
) -> tuple[Tensor | None, Tensor | None]:
    spec = reader.spec
    if not spec.qk_norm:
        return None, None
    sizes = (q_size, kv_size) if spec.flat_qk_norm else (spec.head_dim, spec.head_dim)
    q_norm = reader.vector(attention + "q_norm.weight", sizes[0])
    return q_norm, reader.vector(attention + "k_norm.weight", sizes[1])


def _biases(reader: TensorReader, names: list[str], sizes: list[int]) -> list[Tensor]:
    pairs = zip(names, sizes, strict=True)
    return [reader.vector(f"{name}.bias", size) for name, size in pairs]


# (input of the block [T, D], the layer's cache, batch) -> what to add to the residual
Attend = Callable[[Tensor, Tensor, AttentionBatch], Tensor]


@dataclass(frozen=True, slots=True)
class BackendOps:
    """The backend's kernels, with the signatures of `kernels.reference`."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    attention: Callable[[Tensor, Tensor, AttentionBatch, float], Tensor]
    # for a cache with one plane for keys and values
    latent: Callable[[Tensor, Tensor, Tensor, AttentionBatch, float], Tensor] = latent_attention
    write_latent: Callable[[Tensor, Tensor, Tensor], None] = write_latent


def ops_for(backend: str) -> BackendOps:
    if backend == "triton":
        from coterie.kernels.triton import attention as triton_attention
        from coterie.kernels.triton import latent_attention as triton_latent
        from coterie.kernels.triton import layers as triton_layers

        return BackendOps(
            triton_layers.rms_norm,
            triton_attention.paged_attention,
            triton_latent.latent_attention,
            triton_latent.write_latent,
        )
    if backend == "cpu":
        from coterie.kernels.cpu import layers as cpu

        latent = partial(latent_attention, attention=cpu.paged_attention)
        return BackendOps(cpu.rms_norm, cpu.paged_attention, latent)
    return BackendOps(reference.rms_norm, reference.paged_attention)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    input_norm: Tensor
    attend: Attend
    # None where experts follow
    post_norm: Tensor | None = None
    mlp: Callable[[Tensor, tuple[Segment, ...]], Tensor] | None = None


class BlockDecoder:
    """Pre-norm blocks one after another."""

    def __init__(self, blocks: Sequence[DecoderBlock], ops: BackendOps, eps: float) -> None:
        self._blocks, self._norm, self._eps = blocks, ops.norm, eps

    def forward(
        self, hidden: Tensor, kv: Sequence[Tensor], batch: AttentionBatch, first: int, last: int
    ) -> Tensor:
        for index in range(first, last):
            block = self._blocks[index]
            normed = self._norm(hidden, block.input_norm, self._eps)
            hidden = hidden + block.attend(normed, kv[index], batch)
            if block.mlp is not None and block.post_norm is not None:
                normed = self._norm(hidden, block.post_norm, self._eps)
                hidden = hidden + block.mlp(normed, batch.patches)
        return hidden


class RotaryCache:
    """The rows of the rotary tables for a batch, gathered once for all its layers."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._tables = cos, sin
        # positions, whether in a captured step, rows
        self._last: tuple[Tensor, bool, tuple[Tensor, Tensor]] | None = None

    def __call__(self, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        positions = batch.positions
        # a captured step has to gather again each time it runs
        captured = positions.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._last is None or self._last[0] is not positions or self._last[1] != captured:
            cos, sin = self._tables
            self._last = positions, captured, (cos[positions], sin[positions])
        return self._last[2]


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Queries and keys are normalised (per head, or over all heads as in OLMoE: the width of the
    norm's weight decides), then clipped, then rotated."""

    shape: DecoderShape
    layer: DecoderLayer
    ops: BackendOps
    rotary: RotaryCache
    clip: float | None
    # the layer's number, by which adapters find it
    index: int

    def __call__(self, x: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> Tensor:
        shape, layer = self.shape, self.layer
        parts = (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size))
        qkv = patched.linear(layer.qkv, x, self.index, parts, batch.patches)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        sizes = [shape.q_size, shape.kv_size, shape.kv_size]
        q, k, v = torch.split(qkv, sizes, dim=-1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        q, k, v = (part.reshape(len(x), -1, shape.head_dim) for part in (q, k, v))
        cos_sin = self.rotary(batch)
        reference.write_kv(reference.rotary(k, *cos_sin), v, kv_layer, batch.slots)
        q = reference.rotary(q, *cos_sin)
        mixed = self.ops.attention(q, kv_layer, batch, shape.attention_scale)
        mixed, outer = mixed.reshape(len(x), shape.q_size), (("o", shape.hidden),)
        return patched.linear(layer.o, mixed, self.index, outer, batch.patches)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.ops.norm(rows.reshape(len(rows), -1, len(weight)), weight, self.shape.eps)
