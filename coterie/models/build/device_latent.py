"""Runs a whole model with latent attention on a CUDA device with few kernels.

As `device_decoder`, with the attention in three kernels where rows are few: the new token into the
cache and queries into the latent's space; attention split over the context; the splits merged and
the values out of the latent's space. With more rows the heads' matrices are torch's products. A
prompt with nothing before it attends to keys and values of full width, which is a third of the
work; other prompts attend to the cached latents. Import this module only where triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie.kernels.linear import Linear, ReferenceLinear
from coterie.kernels.triton import gemv
from coterie.kernels.triton.latent_attention import (
    FUSED_ROWS,
    LatentShape,
    decode_latent,
    latent_attention,
    place_latent,
)
from coterie.kernels.triton.layers import rms_norm
from coterie.kernels.triton.prompt_attention import without_context
from coterie.kernels.triton.quant_linear import QuantLinear
from coterie.kernels.triton.sizes import gemv_size
from coterie.models.build.device_decoder import MAX_ROWS, DeviceDecoder, device_matrix
from coterie.models.build.mla import INNER_EPS, LatentLayer

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.models.build.layers import EmbeddingAndHead
    from coterie.models.build.moe import MoeLayer
    from coterie.moe.runtime.device_pool import DevicePool

# in the order of their speed: the third supports two widths, the last any
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class LatentDecoder(DeviceDecoder):
    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        turn: tuple[Tensor, Tensor],
        ends: EmbeddingAndHead,
        norm: Tensor,
        moe_layers: Sequence[MoeLayer],
    ) -> None:
        super().__init__(shape, layers, turn, ends, norm, moe_layers)
        latent = _own(layers[0]).attend.latent
        self._latent = LatentShape(
            heads=shape.num_heads,
            nope=latent.nope,
            rope=latent.rope,
            rank=latent.kv_rank,
            value=latent.value,
            eps=INNER_EPS,
            attention_scale=shape.attention_scale,
        )
        self._ups = [_ups(_own(layer), norm.dtype) for layer in layers]

    @staticmethod
    def fits(
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        moe_layers: Sequence[MoeLayer],
        head: Linear,
    ) -> bool:
        parts = [_own(layer).attend.parts for layer in layers]
        dense = all(
            type(each.queries.last) in (ReferenceLinear, QuantLinear)
            and each.key_up.stacked is not None
            and each.value_up.stacked is not None
            for each in parts
        )
        return dense and DeviceDecoder.fits(shape, layers, moe_layers, head)

    def takes(self, batch: AttentionBatch, pool: DevicePool | None) -> bool:
        plain = not batch.patches and batch.patch_rows is None
        return plain and super().takes(batch, pool)

    def _attention(
        self, hidden: Tensor, batch: AttentionBatch, early: bool = False
    ) -> Callable[[DecoderLayer, Tensor, Tensor], Tensor]:
        """(layer, rows of q and kv_a, its cache) -> [T, heads * value], for this step's rows."""
        latent, count = self._latent, len(hidden)
        if count == len(batch.context_lens) <= MAX_ROWS:
            wide = hidden.new_empty((count, latent.heads, latent.rank))

            def decode(layer: DecoderLayer, qkv: Tensor, cache: Tensor) -> Tensor:
                return self._decode(_own(layer), qkv, cache, batch, wide, early)

            return decode
        # the backends of torch support 16-bit types only
        own = batch if hidden.dtype.itemsize == 2 else replace(batch, fresh=())
        covered = sum(last - first for first, last in own.fresh)
        left = without_context(own, own.fresh) if 0 < covered < count else own

        def prefill(layer: DecoderLayer, qkv: Tensor, cache: Tensor) -> Tensor:
            return self._prefill(_own(layer), qkv, cache, left)

        return prefill

    def _decode(
        self,
        layer: LatentLayer,
        qkv: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        wide: Tensor,
        early: bool,
    ) -> Tensor:
        latent, count = self._latent, len(qkv)
        key_up, value_up = self._ups[layer.attend.index]
        q, low = self._queries(layer, qkv, early)
        gain, turn = layer.attend.parts.kv_norm, self._turn
        fused = count <= FUSED_ROWS
        up = (key_up, wide) if fused else None
        place_latent(latent, q, low, gain, turn, cache, batch, up=up, dependent=early)
        heads = q.view(count, latent.heads, latent.head)
        turned, scale = heads[..., latent.nope :], latent.attention_scale
        if fused:
            values = qkv.new_empty((count, latent.heads * latent.value))
            decode_latent(wide, turned, cache, batch, scale, values, value_up, early)
            return values
        _by_head(heads[..., : latent.nope], key_up, wide)
        mixed = torch.empty_like(wide)
        decode_latent(wide, turned, cache, batch, scale, mixed)
        return _values(mixed, value_up)

    def _prefill(
        self, layer: LatentLayer, qkv: Tensor, cache: Tensor, batch: AttentionBatch
    ) -> Tensor:
        """`batch`: sequences whose rows are in `fresh` have no context, unless all rows are."""
        latent, count = self._latent, len(qkv)
        key_up, value_up = self._ups[layer.attend.index]
        q, low = self._queries(layer, qkv, early=False)
        gain, turn = layer.attend.parts.kv_norm, self._turn
        kept = low.new_empty((count, latent.cached)) if batch.fresh else None
        place_latent(latent, q, low, gain, turn, cache, batch, kept=kept)
        heads = q.view(count, latent.heads, latent.head)
        if kept is not None and batch.fresh == ((0, count),):
            return self._fresh(layer, heads, kept)
        covered = sum(last - first for first, last in batch.fresh)
        if covered < count:
            wide = qkv.new_empty((count, latent.heads, latent.rank))
            _by_head(heads[..., : latent.nope], key_up, wide)
            turned, scale = heads[..., latent.nope :], latent.attention_scale
            mixed = latent_attention(wide, turned, cache, batch, scale)
            values = _values(mixed, value_up)
        else:
            values = qkv.new_empty((count, latent.heads * latent.value))
        if kept is not None:
            for first, last in batch.fresh:
                rows = slice(first, last)
                values[rows] = self._fresh(layer, heads[rows], kept[rows])
        return values

    def _fresh(self, layer: LatentLayer, q: Tensor, kept: Tensor) -> Tensor:
        """Rows of one prompt among themselves, with keys and values of full width."""
        latent, count = self._latent, len(q)
        key_up, value_up = self._ups[layer.attend.index]
        rows = kept[:, : latent.rank].expand(latent.heads, -1, -1)
        k = torch.empty((count, latent.heads, latent.head), dtype=q.dtype, device=q.device)
        torch.bmm(rows, key_up, out=k[..., : latent.nope].transpose(0, 1))
        k[..., latent.nope :] = kept[:, None, latent.rank :]
        v = torch.bmm(rows, value_up.transpose(1, 2))
        with sdpa_kernel(_BACKENDS, set_priority=True):
            mixed = functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v[None],
                is_causal=True, scale=latent.attention_scale,
            )  # fmt: skip
        return mixed[0].transpose(0, 1).reshape(count, -1)

    def _queries(self, layer: LatentLayer, qkv: Tensor, early: bool) -> tuple[Tensor, Tensor]:
        """Queries [T, heads * (nope + rope)], and the rows of kv_a; both may be parts of qkv."""
        queries, split = layer.attend.parts.queries, qkv.shape[1] - self._latent.cached
        low = qkv[:, split:]
        if queries.first is None or queries.norm is None:
            return qkv[:, :split], low
        if len(qkv) > 1:
            normed = rms_norm(qkv[:, :split].contiguous(), queries.norm, INNER_EPS)
            return queries.last(normed), low
        matrix = device_matrix(queries.last)
        q = qkv.new_empty((1, matrix.count))
        size = gemv_size(matrix)
        gemv.norm_product(qkv, queries.norm, INNER_EPS, matrix, q, size, None, early)
        return q, low


def _own(layer: DecoderLayer) -> LatentLayer:
    assert isinstance(layer, LatentLayer)
    return layer


def _ups(layer: LatentLayer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[heads, rank, nope] and [heads, value, rank]. Those of quantised models are stored wider."""
    parts = layer.attend.parts
    key_up, value_up = parts.key_up.stacked, parts.value_up.stacked
    assert key_up is not None and value_up is not None
    return key_up.to(dtype).contiguous(), value_up.to(dtype).contiguous()


def _by_head(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """out [T, H, n] = x [T, H, k] times weights [H, n, k], head by head."""
    torch.bmm(x.transpose(0, 1), weights.transpose(1, 2), out=out.transpose(0, 1))


def _values(mixed: Tensor, value_up: Tensor) -> Tensor:
    """[T, heads * value] of mixed latents [T, heads, rank]."""
    heads, value, _ = value_up.shape
    out = mixed.new_empty((len(mixed), heads, value))
    _by_head(mixed, value_up, out)
    return out.view(len(mixed), heads * value)
