"""Plain torch versions of every fast kernel: native and Triton code must give the same results.

They are correct on any device and dtype, and written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from coterie.kernels import patched
from coterie.kernels.backend import make_linear
from coterie.kernels.linear import ReferenceLinear
from coterie.weights.quantize import Weight, dense

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.decoder import DecoderLayer, DecoderShape

Attention = Callable[["Tensor", "Tensor", "AttentionBatch", float], "Tensor"]

# Query rows scored at once: bounds the [rows, context] score matrix of a long prompt.
_ROWS_AT_ONCE = 512


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] times weight [N, K] transposed, in x's dtype."""
    return functional.linear(x, dense(weight, x.dtype).to(x.device))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in fp32, rounded to x's dtype before the weight, as in HF."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight.to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim], cos and sin [T, head_dim/2]; halves rotate against each other."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def write_kv(k: Tensor, v: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
    """Scatter k and v [T, kv_heads, head_dim] into [2, blocks, kv_heads, block_size, head_dim]."""
    block_size = kv_layer.shape[3]
    block = torch.div(slots, block_size, rounding_mode="floor")
    offset = slots - block * block_size
    kv_layer[0][block, :, offset] = k.to(kv_layer.dtype)
    kv_layer[1][block, :, offset] = v.to(kv_layer.dtype)


def paged_attention(q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over paged K and V; softmax in fp32."""
    out = torch.empty_like(q)
    starts = batch.query_starts.tolist()
    for index, context in enumerate(batch.context_lens.tolist()):
        begin, end = starts[index], starts[index + 1]
        blocks = batch.block_tables[index, : -(-context // batch.block_size)].long()
        keys, values = (_gather(kv_layer[half], blocks, context) for half in (0, 1))
        for row in range(begin, end, _ROWS_AT_ONCE):
            stop = min(row + _ROWS_AT_ONCE, end)
            first_visible = context - (end - row)
            out[row:stop] = _attend(q[row:stop], keys, values, first_visible, scale)
    return out


def _gather(cache: Tensor, blocks: Tensor, context: int) -> Tensor:
    """[blocks, kv_heads, block_size, head_dim] -> fp32 [kv_heads, context, head_dim]."""
    picked = cache[blocks].transpose(0, 1)
    return picked.reshape(cache.shape[1], -1, cache.shape[3])[:, :context].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, last_seen: int, scale: float) -> Tensor:
    """Row i attends to positions 0 .. last_seen + i. Query heads are grouped by KV head."""
    rows, heads, head_dim = q.shape
    kv_heads, context, _ = keys.shape
    folded = q.float().view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = folded.reshape(kv_heads, -1, head_dim) @ keys.transpose(1, 2) * scale
    scores = scores.view(kv_heads, -1, rows, context)
    if rows > 1 or last_seen + 1 < context:
        seen = torch.arange(rows, device=q.device)[:, None] + last_seen
        hidden = torch.arange(context, device=q.device)[None, :] > seen
        scores = scores.masked_fill(hidden, float("-inf"))
    mixed = torch.softmax(scores, dim=-1).view(kv_heads, -1, context) @ values
    mixed = mixed.view(kv_heads, heads // kv_heads, rows, head_dim).permute(2, 0, 1, 3)
    return mixed.reshape(rows, heads, head_dim).to(q.dtype)


def decoder(
    shape: DecoderShape,
    layers: Sequence[DecoderLayer],
    cos: Tensor,
    sin: Tensor,
    hidden: Tensor,
    kv: Sequence[Tensor],
    batch: AttentionBatch,
    attention: Attention = paged_attention,
    first: int = 0,
) -> Tensor:
    """Run `layers` over hidden [T, D]; `kv` has one cache per given layer. No final norm.

    The first given layer is number `first` of the model, by which patches are found.
    """
    turn, patches = (cos[batch.positions], sin[batch.positions]), batch.patches
    heads = (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size))
    inner = (("gate", shape.intermediate), ("up", shape.intermediate))
    for index, (layer, kv_layer) in enumerate(zip(layers, kv, strict=True), first):
        normed = rms_norm(hidden, layer.input_norm, shape.eps)
        qkv = patched.linear(layer.qkv, normed, index, heads, patches)
        q, k, v = project(shape, layer, qkv)
        write_kv(rotary(k, *turn), v, kv_layer, batch.slots)
        mixed = attention(rotary(q, *turn), kv_layer, batch, shape.attention_scale)
        mixed = mixed.reshape(-1, shape.q_size)
        hidden = hidden + patched.linear(layer.o, mixed, index, (("o", shape.hidden),), patches)
        if layer.post_norm is None or layer.gate_up is None or layer.down is None:
            continue
        normed = rms_norm(hidden, layer.post_norm, shape.eps)
        acts = silu_mul(patched.linear(layer.gate_up, normed, index, inner, patches))
        hidden = hidden + patched.linear(
            layer.down, acts, index, (("down", shape.hidden),), patches
        )
    return hidden


def project(shape: DecoderShape, layer: DecoderLayer, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, heads, head_dim], with bias and norm, not yet rotated."""
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias.to(qkv.dtype)
    q, k, v = torch.split(qkv, [shape.q_size, shape.kv_size, shape.kv_size], dim=-1)
    if layer.q_norm is not None:
        q = _norm_heads(q, layer.q_norm, shape.eps)
    if layer.k_norm is not None:
        k = _norm_heads(k, layer.k_norm, shape.eps)
    by_head = (len(qkv), -1, shape.head_dim)
    return q.reshape(by_head), k.reshape(by_head), v.reshape(by_head)


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, heads * head_dim], normalised over as many elements as the weight has."""
    return rms_norm(x.reshape(len(x), -1, len(weight)), weight, eps)


class HeadLinear:
    """A separate product for every head: x [T, H, in] -> [T, H, out]."""

    def __init__(self, weights: Sequence[Weight], backend: str, device: torch.device) -> None:
        # of a GPU one batched product of dense matrices
        plain = "cpu" if backend == "cpu" else "reference"
        products = [make_linear([weight], plain, device) for weight in weights]
        self.nbytes = sum(product.nbytes for product in products)
        self._out = products[0].out_features
        self._products = products
        self._stacked: Tensor | None = None
        if all(isinstance(product, ReferenceLinear) for product in products):
            # [H, in, out]: one batched product instead of one per head
            own = [p.weight for p in products if isinstance(p, ReferenceLinear)]
            self._stacked, self._products = torch.stack(own).transpose(1, 2), []

    @property
    def stacked(self) -> Tensor | None:
        """The matrices [H, out, in], if they are dense."""
        return None if self._stacked is None else self._stacked.transpose(1, 2)

    def __call__(self, x: Tensor) -> Tensor:
        if self._stacked is not None:
            rows = x.transpose(0, 1).to(self._stacked.dtype)
            return torch.bmm(rows, self._stacked).transpose(0, 1).to(x.dtype)
        out = x.new_empty(len(x), len(self._products), self._out)
        for head, product in enumerate(self._products):
            out[:, head] = product(x[:, head])
        return out


def write_latent(rows: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
    """Scatter rows [T, rank + rope] into the cache."""
    block_size = kv_layer.shape[3]
    block = torch.div(slots, block_size, rounding_mode="floor")
    kv_layer[0, block, 0, slots - block * block_size] = rows.to(kv_layer.dtype)


def latent_attention(
    wide: Tensor,
    turned: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    scale: float,
    attention: Attention | None = None,
) -> Tensor:
    """Causal attention of queries wide [T, heads, rank] and turned [T, heads, rope] over a cache
    with one plane: [T, heads, rank]. `attention`: one that supports such a cache."""
    q = torch.cat((wide, turned), dim=-1)
    if attention is None:
        attention, kv_layer = paged_attention, kv_layer.expand(2, -1, -1, -1, -1)
    return attention(q, kv_layer, batch, scale)[..., : wide.shape[-1]]
