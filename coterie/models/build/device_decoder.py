"""Runs a whole model on a CUDA device with few kernels.

One row, or few where all matrices are int4: five kernels a dense layer (norm and qkv; attention; o
and residual; norm, gate and up; down and residual), six with experts (norm, gate and top-k; gate
and up of the chosen experts; their down, sum and residual), each started before the last has ended.
A shared expert is cut into experts of the routed ones' width, where that is possible, and else two
more products. Several rows: torch's products, and between them a norm with the residual, attention,
and the kernels of experts. Few decoding rows of dense models, and those with adapters:
`row_products`; one row with adapters: `patched_gemv`.
Supports models with plain attention (`device_latent`: with latent attention); other models, and
adapters with soft tokens or a changed head, take the road of `assemble`. Import this module only
where triton is installed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from coterie.kernels import patched
from coterie.kernels.batch import stack_record
from coterie.kernels.linear import Linear, ReferenceLinear
from coterie.kernels.triton import decode_attention as attention
from coterie.kernels.triton import expert_gemv, gemv, patched_gemv
from coterie.kernels.triton.attention import prompt_tiles
from coterie.kernels.triton.decoder import patch_rows_of, silu_rows
from coterie.kernels.triton.expert_tiles import RowNorm
from coterie.kernels.triton.layers import add_norm, silu_mul
from coterie.kernels.triton.patched_gemv import NormReader
from coterie.kernels.triton.patches import RANKS
from coterie.kernels.triton.prompt_attention import (
    paged_rows,
    place_all_heads,
    prompt_attention,
    rows_behind,
    shaped,
)
from coterie.kernels.triton.quant_linear import MixedLinear, QuantLinear
from coterie.kernels.triton.row_products import (
    PatchedNorm,
    RowProduct,
    expand_rows,
    gate_up_rows,
    norm_rows,
    product_rows,
    shrink_rows,
    split_product_rows,
)
from coterie.kernels.triton.sizes import context_splits, gemv_size, launches_early, pair_sizes
from coterie.models.build.device_moe import (
    add_experts,
    cut_shared,
    layer_pool,
    layer_share,
    new_choices,
    new_scratch,
    pair_rows,
    place_missing,
    routed_rows,
    with_shared,
)
from coterie.models.build.layers import GatedMlp
from coterie.models.build.piece_graph import Attend, PieceBuffers

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch, PatchRows
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.patch import Segment
    from coterie.kernels.triton.expert_groups import ExpertScratch
    from coterie.kernels.triton.link_prefetch import LinkPrefetch
    from coterie.models.build.layers import EmbeddingAndHead
    from coterie.models.build.moe import MoeLayer
    from coterie.moe.runtime.device_pool import DevicePool


# decoding rows of one step whose attention is one kernel
MAX_ROWS = 512
# decoding rows that may take the kernels of single rows
FEW_ROWS = 8
# decoding rows with adapters up to which the products of `row_products` are faster than torch's
ADAPTED_ROWS = 64
# the same without adapters, of dense models. Measured on an H200, us of a step: 64 rows of SmolLM2
# 774 instead of 957, of Qwen3-0.6B 1,482 instead of 1,569; not yet measured of wider models
OWN_ROWS = 32
# from so many rows on, attention's product adds to the residual itself. Measured on an H200, us
# with the norm behind it: 8,192 rows of 4096 x 2048 189 instead of 203, 2,048 rows 51 instead of 52
ADDED_ROWS = 4096
# columns of silu(gate) * up of a program, in steps with prompts
SILU_CHUNK = 128


class DeviceDecoder:
    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        turn: tuple[Tensor, Tensor],
        ends: EmbeddingAndHead,
        norm: Tensor,
        moe_layers: Sequence[MoeLayer],
    ) -> None:
        self._shape, self._layers, self._turn, self._norm = shape, layers, turn, norm
        self._embed = ends.embedding
        # in front of each layer, and the last
        self._norms = [*(layer.input_norm for layer in layers), norm]
        self._moe = {layer.index: (row, layer) for row, layer in enumerate(moe_layers)}
        self._qkv = [device_matrices(layer.qkv) for layer in layers]
        self._o = [device_matrix(layer.o) for layer in layers]
        self._gate_up = [_maybe(layer.gate_up) for layer in layers]
        self._down = [_maybe(layer.down) for layer in layers]
        self._head, self._head_product = device_matrix(ends.head), ends.head
        self._gates = {layer.index: _gate_weight(layer) for layer in moe_layers}
        self._shared = {
            layer.index: (device_matrix(layer.shared.gate_up), device_matrix(layer.shared.down))
            for layer in moe_layers
            if isinstance(layer.shared, GatedMlp)
        }
        # by layer: the pool, a shared expert cut into routed ones, and one row's choices with it
        self._cut: dict[int, tuple[Tensor, Tensor, expert_gemv.RoutedRows]] = {}
        # up to this many rows take the kernels of single rows, which read int4 matrices once
        few = (*(matrix for parts in self._qkv for matrix in parts), *self._o)
        quantised = all(gemv.on_tensor_cores(norm, each) for each in few)
        plain = len(self._moe) == len(layers) and not self._shared
        single = all(len(parts) == 1 for parts in self._qkv)
        self._few = FEW_ROWS if quantised and plain and single else 1
        products = [product for layer in layers for product in _products(layer)]
        # the kernels of rows with adapters read whole matrices
        self._dense = all(type(product) is ReferenceLinear for product in products)
        self._parts = (
            (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size)),
            (("gate", shape.intermediate), ("up", shape.intermediate)),
        )
        self.own_rows = OWN_ROWS if self._dense and not self._moe else 0
        self.adapted_rows = ADAPTED_ROWS
        device = norm.device
        # start each kernel before the last has ended
        self.dependent = launches_early(device)
        # of a gate: logits, and a counter that is zero between kernels; the last for guesses
        self._gate_scratch = (
            torch.empty(
                (FEW_ROWS + 1, max(map(len, self._gates.values()), default=1)), device=device
            ),
            torch.zeros(FEW_ROWS + 1, dtype=torch.int32, device=device),
        )
        self._by_row = [layer.index for layer in moe_layers]
        # copies of what is read ahead; and whether a step has given it some
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_forked = False
        # of attention
        self._counts = torch.zeros(MAX_ROWS * shape.num_kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def fits(
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        moe_layers: Sequence[MoeLayer],
        head: Linear,
    ) -> bool:
        """Whether the kernels support everything in this model."""
        # of several kinds only q, k and v: quantisers give v more bits
        products = [head, *(each for layer in layers for each in _products(layer)[1:])]
        qkv = [layer.qkv for layer in layers]
        moe = {layer.index for layer in moe_layers}
        return (
            all(type(product) in (ReferenceLinear, QuantLinear) for product in products)
            and all(type(each) in (ReferenceLinear, QuantLinear, MixedLinear) for each in qkv)
            and not any(layer.norms_whole(shape) for layer in layers)
            and all((layer.gate_up is None) == (at in moe) for at, layer in enumerate(layers))
            and all(_plain(layer) for layer in moe_layers)
        )

    def takes(self, batch: AttentionBatch, pool: DevicePool | None) -> bool:
        """Whether this step can run here: the device reads all experts, and adapters that the
        kernels support."""
        if self._moe and (pool is None or pool.loading is not None):
            return False
        if batch.patch_rows is not None or not batch.patches:
            return self._dense or batch.patch_rows is None
        device, soft = batch.positions.device, batch.phase != "decode"
        return self._dense and all(
            stack_record(part.stack, device).inside and not (soft and part.stack.soft is not None)
            for part in batch.patches
        )

    def run(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        rows: Tensor,
        pool: DevicePool | None,
    ) -> tuple[Tensor, Tensor | None]:
        """fp32 logits of `rows`, and the gates' choices int32 [layers, T, K], if there are
        experts."""
        x = self._embed(token_ids).contiguous()
        layers = [layer for _, layer in self._moe.values()]
        routed = new_choices(layers, len(x), x.device) if layers else None
        patches, rest = patch_rows_of(batch, len(self._layers))
        if patches is not None:
            patches.read = True
        few = 1 if pool is None else min(self._few, pair_rows(pool))
        decodes = not rest and len(x) == len(rows) and _decodes(batch)
        if decodes and patches is None and len(x) <= few:
            try:
                hidden = self._run_few(x, batch, kv, pool, routed)
                if len(x) == 1:
                    return self._one_head(hidden), routed
            finally:
                self._join()
            normed = add_norm(hidden, None, self._norm, self._shape.eps)
        elif decodes and patches is not None and len(x) == 1 and self._fits_one(patches):
            try:
                return self._run_one_patched(x, batch, kv, pool, routed, patches), routed
            finally:
                self._join()
        elif decodes and len(x) <= (self.own_rows if patches is None else self.adapted_rows):
            normed = self._run_patched(x, batch, kv, pool, routed, patches)
        elif patches is not None:
            normed = self._run_segments(x, batch, kv, pool, routed, patches, rest)
        else:
            normed = self._run_rows(x, batch, kv, pool, routed)
        return self.logits(normed[rows]), routed

    def _run_rows(
        self,
        hidden: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        pool: DevicePool | None,
        routed: Tensor | None,
    ) -> Tensor:
        """All rows behind the last norm. Each layer ends with the norm of the next."""
        attend = self._attention(hidden, batch)
        experts = _scratch_of(pool, routed, hidden)
        normed = add_norm(hidden, None, self._norms[0], self._shape.eps)
        for index, layer in enumerate(self._layers):
            qkv = patched.linear(layer.qkv, normed, index, self._parts[0], batch.patches)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            mixed = attend(layer, qkv, kv[index])
            normed = self._behind_attention(
                index, hidden, mixed, batch.patches, pool, routed, experts
            )
        return normed

    def _behind_attention(
        self,
        index: int,
        hidden: Tensor,
        mixed: Tensor,
        patches: tuple[Segment, ...],
        pool: DevicePool | None,
        routed: Tensor | None,
        experts: ExpertScratch | None,
    ) -> Tensor:
        """Adds the rest of a layer to hidden. Returns the norm of the next one, or the last."""
        shape, layer, norms = self._shape, self._layers[index], self._norms
        inner = self._parts[1]
        delta = self._add_o(hidden, mixed, index, patches)
        if layer.gate_up is not None and layer.down is not None:
            assert layer.post_norm is not None
            normed = add_norm(hidden, delta, layer.post_norm, shape.eps)
            gate_up = patched.linear(layer.gate_up, normed, index, inner, patches)
            acts, out = silu_mul(gate_up), (("down", shape.hidden),)
            delta = patched.linear(layer.down, acts, index, out, patches)
            return add_norm(hidden, delta, norms[index + 1], shape.eps)
        assert pool is not None and routed is not None
        normed = add_norm(hidden, delta, self._moe_norm(index), shape.eps)
        norm = RowNorm(norms[index + 1], shape.eps, normed)
        self._experts_of_rows(normed, hidden, index, pool, routed, experts, norm)
        return normed

    def new_buffers(self, rows: int) -> PieceBuffers:
        """Of steps that run in pieces, see `piece_graph`."""
        width, first, device = self._shape.hidden, self._layers[0], self._norm.device
        layers = [layer for _, layer in self._moe.values()]
        like = self._embed(torch.zeros(1, dtype=torch.int64, device=device))
        parts = width, first.qkv.out_features, first.o.in_features, width
        hidden, qkv, mixed, normed = (like.new_zeros((rows, columns)) for columns in parts)
        return PieceBuffers(hidden, qkv, mixed, normed, new_choices(layers, rows, device))

    def run_piece(self, index: int, buffers: PieceBuffers, pool: DevicePool) -> None:
        """What lies between the attention of layer `index` - 1 and of layer `index`."""
        hidden, routed = buffers.hidden, buffers.routed
        if index == 0:
            normed = add_norm(hidden, None, self._norms[0], self._shape.eps)
        else:
            # freed behind every piece: all share its memory
            experts = new_scratch(routed[0], pool, hidden)
            normed = self._behind_attention(
                index - 1, hidden, buffers.mixed, (), pool, routed, experts
            )
        if index == len(self._layers):
            buffers.normed.copy_(normed)
            return
        layer = self._layers[index]
        if isinstance(layer.qkv, ReferenceLinear) and layer.qkv_bias is None:
            torch.mm(normed, layer.qkv.weight.T, out=buffers.qkv)
            return
        buffers.qkv.copy_(layer.qkv(normed))
        if layer.qkv_bias is not None:
            buffers.qkv.add_(layer.qkv_bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed(token_ids)

    def attend(self, hidden: Tensor, batch: AttentionBatch) -> Attend:
        run = self._attention(hidden, batch)
        return lambda layer, qkv, cache: run(self._layers[layer], qkv, cache)

    def logits(self, normed: Tensor) -> Tensor:
        return _wide_logits(normed, self._head_product)

    def _add_o(
        self, hidden: Tensor, mixed: Tensor, index: int, patches: tuple[Segment, ...]
    ) -> Tensor | None:
        """hidden += a layer's product of attention; or that product, for the norm to add it."""
        product = self._layers[index].o
        many = len(hidden) >= ADDED_ROWS and not patches
        if many and isinstance(product, ReferenceLinear) and product.weight.dtype == hidden.dtype:
            torch.addmm(hidden, mixed, product.weight.T, out=hidden)
            return None
        return patched.linear(product, mixed, index, (("o", self._shape.hidden),), patches)

    def _moe_norm(self, index: int) -> Tensor:
        norm = self._moe[index][1].norm
        assert norm is not None
        return norm

    def _experts_of_rows(
        self,
        normed: Tensor,
        hidden: Tensor,
        index: int,
        pool: DevicePool,
        routed: Tensor,
        scratch: ExpertScratch | None,
        norm: RowNorm | None = None,
    ) -> None:
        """hidden += the experts of a layer, then perhaps `norm` of it."""
        row, moe = self._moe[index]
        own, chosen = layer_pool(pool, row, index), routed_rows(routed[row])
        logits = _wide_product(normed, self._gates[index])
        penalty = moe.gate.penalty(hidden.device)
        expert_gemv.choose(logits, moe.gate.rule, penalty, own.places, chosen)
        share, placed = layer_share(pool, row, len(normed)), place_missing(pool, row, chosen)
        if not isinstance(moe.shared, GatedMlp):
            with pool.layer(row, chosen.ids):
                slot = pool.slot_bytes
                add_experts(normed, chosen, own, hidden, scratch, slot, norm, share, placed)
            return
        delta = moe.shared.down(silu_mul(moe.shared.gate_up(normed)))
        with pool.layer(row, chosen.ids):
            slot = pool.slot_bytes
            add_experts(normed, chosen, own, hidden, scratch, slot, None, share, placed)
        if norm is None:
            hidden.add_(delta)
        else:
            add_norm(hidden, delta, norm.weight, norm.eps, norm.out)

    def _run_segments(
        self,
        hidden: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        pool: DevicePool | None,
        routed: Tensor | None,
        rows: PatchRows,
        rest: tuple[Segment, ...],
    ) -> Tensor:
        """The final norm of any rows with adapters: torch's products, and torch adds those of the
        segments in `rest`."""
        shape = self._shape
        attend = self._attention(hidden, batch)
        experts = _scratch_of(pool, routed, hidden)
        heads, inner = self._parts
        product: RowProduct | None = None
        for index, layer in enumerate(self._layers):
            norm = PatchedNorm(layer.input_norm, shape.eps, index, ("q", "k", "v"))
            hidden, normed, terms = norm_rows(rows, hidden, product, norm)
            qkv = patched.linear(layer.qkv, normed, index, heads, rest)
            expand_rows(rows, qkv, index, heads, terms)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            mixed = attend(layer, qkv, kv[index])
            y = patched.linear(layer.o, mixed, index, (("o", shape.hidden),), rest)
            product = RowProduct(y[None], index, "o", shrink_rows(rows, mixed, index, "o"))
            if layer.gate_up is None or layer.down is None:
                assert pool is not None and routed is not None
                norm = PatchedNorm(self._moe_norm(index), shape.eps)
                hidden, normed, _ = norm_rows(rows, hidden, product, norm)
                self._experts_of_rows(normed, hidden, index, pool, routed, experts)
                product = None
                continue
            assert layer.post_norm is not None
            norm = PatchedNorm(layer.post_norm, shape.eps, index, ("gate", "up"))
            hidden, normed, terms = norm_rows(rows, hidden, product, norm)
            gate_up = patched.linear(layer.gate_up, normed, index, inner, rest)
            acts, pieces = silu_rows(rows, gate_up, index, terms, SILU_CHUNK)
            y = patched.linear(layer.down, acts, index, (("down", shape.hidden),), rest)
            product = RowProduct(y[None], index, "down", pieces)
        return norm_rows(rows, hidden, product, PatchedNorm(self._norm, shape.eps)).normed

    def _run_patched(
        self,
        hidden: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        pool: DevicePool | None,
        routed: Tensor | None,
        rows: PatchRows | None,
    ) -> Tensor:
        """The final norm of decoding rows with adapters."""
        shape, early = self._shape, self.dependent
        attend = self._attention(hidden, batch, early)
        experts = _scratch_of(pool, routed, hidden)
        heads, _ = self._parts
        product: RowProduct | None = None
        for index, layer in enumerate(self._layers):
            norm = PatchedNorm(layer.input_norm, shape.eps, index, ("q", "k", "v"))
            hidden, normed, terms = norm_rows(rows, hidden, product, norm, early)
            weight, bias = self._qkv[index][0].weight, layer.qkv_bias
            qkv = product_rows(rows, normed, weight, index, heads, terms, bias, early)
            mixed, weight = attend(layer, qkv, kv[index]), self._o[index].weight
            product = split_product_rows(rows, mixed, mixed, weight, index, "o", early)
            gate_up, down = self._gate_up[index], self._down[index]
            if gate_up is None or down is None:
                assert pool is not None and routed is not None
                norm = PatchedNorm(self._moe_norm(index), shape.eps)
                hidden, normed, _ = norm_rows(rows, hidden, product, norm, early)
                self._experts_of_rows(normed, hidden, index, pool, routed, experts)
                product = None
                continue
            assert layer.post_norm is not None
            norm = PatchedNorm(layer.post_norm, shape.eps, index, ("gate", "up"))
            hidden, normed, terms = norm_rows(rows, hidden, product, norm, early)
            acts, raw = gate_up_rows(rows, normed, gate_up.weight, index, terms, early)
            product = split_product_rows(rows, acts, raw, down.weight, index, "down", early)
        return norm_rows(rows, hidden, product, PatchedNorm(self._norm, shape.eps), early).normed

    def _attention(
        self, hidden: Tensor, batch: AttentionBatch, early: bool = False
    ) -> Callable[[DecoderLayer, Tensor, Tensor], Tensor]:
        """(layer, qkv, its cache) -> [T, heads * head_dim], for the rows of this step."""
        shape, turn, count = self._shape, self._turn, len(hidden)
        if _decodes(batch):
            splits = self._splits(batch)
            scratch = self._scratch(count, splits, hidden.device)
            mixed = torch.empty((count, shape.q_size), dtype=hidden.dtype, device=hidden.device)

            def decode(layer: DecoderLayer, qkv: Tensor, cache: Tensor) -> Tensor:
                attention.decode_attention(
                    shape, layer, qkv, turn, cache, batch, scratch, splits, mixed, early
                )
                return mixed

            return decode
        own = shaped(batch, shape, hidden.dtype)
        paged, room, keep = paged_rows(own), rows_behind(own), bool(own.fresh)
        tiles = None
        if paged is not None and paged[0] > len(paged[1].context_lens):
            group = shape.num_heads // shape.num_kv_heads
            tiles = prompt_tiles(paged[1], paged[0], group, shape.head_dim, hidden.dtype)

        def prefill(layer: DecoderLayer, qkv: Tensor, cache: Tensor) -> Tensor:
            q, rows = place_all_heads(shape, layer, qkv, turn, cache, own, room, keep)
            return prompt_attention(q, rows, cache, own, paged, shape.attention_scale, tiles)

        return prefill

    def _run_few(
        self,
        x: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        pool: DevicePool | None,
        routed: Tensor | None,
    ) -> Tensor:
        """x after all layers."""
        shape, early, count = self._shape, self.dependent, len(x)
        device, dtype = x.device, x.dtype
        attend = self._attention(x, batch, early)
        qkv = torch.empty((count, self._layers[0].qkv.out_features), dtype=dtype, device=device)
        acts = torch.empty((count, shape.intermediate), dtype=dtype, device=device)
        for index, layer in enumerate(self._layers):
            self._project(x, index, layer, qkv, early)
            mixed = attend(layer, qkv, kv[index])
            matrix = self._o[index]
            gemv.product_add(mixed, matrix, x, gemv_size(matrix), early)
            gate_up, down = self._gate_up[index], self._down[index]
            if gate_up is None or down is None:
                assert pool is not None and routed is not None
                self._experts(x, index, pool, routed, batch.slots)
            else:
                assert layer.post_norm is not None
                size = gemv_size(gate_up)
                gemv.norm_gate_up(x, layer.post_norm, shape.eps, gate_up, acts, size, early)
                gemv.product_add(acts, down, x, gemv_size(down), early)
        return x

    def _project(
        self, x: Tensor, index: int, layer: DecoderLayer, qkv: Tensor, early: bool
    ) -> None:
        """qkv = norm and product of few rows; of one where there are several kinds."""
        first, eps, parts = 0, self._shape.eps, self._qkv[index]
        for matrix in parts:
            own, size, bias = qkv, gemv_size(matrix), layer.qkv_bias
            if len(parts) > 1:
                rows = slice(first, first + matrix.count)
                own, bias = qkv[:, rows], None if bias is None else bias[rows]
            gemv.norm_product(x, layer.input_norm, eps, matrix, own, size, bias, early)
            first += matrix.count

    def _one_head(self, x: Tensor) -> Tensor:
        """fp32 logits of one row."""
        logits = torch.empty((1, self._head.count), dtype=torch.float32, device=x.device)
        size, eps = gemv_size(self._head), self._shape.eps
        gemv.norm_product(x, self._norm, eps, self._head, logits, size, None, self.dependent)
        return logits

    def _fits_one(self, patches: PatchRows) -> bool:
        """Whether the kernels of one row support these patches."""
        rows = [gemv_size(matrix).rows for parts in self._qkv for matrix in parts]
        heights = (self._shape.q_size, self._shape.kv_size)
        return patches.kind == 0 and all(height % n == 0 for n in rows for height in heights)

    def _run_one_patched(
        self,
        x: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        pool: DevicePool | None,
        routed: Tensor | None,
        rows: PatchRows,
    ) -> Tensor:
        """`_run_one` with an adapter: the same launches, and one more after experts."""
        shape, early = self._shape, self.dependent
        device, dtype, eps = x.device, x.dtype, shape.eps
        splits = self._splits(batch)
        scratch = self._scratch(1, splits, device)
        qkv = torch.empty((1, shape.q_size + 2 * shape.kv_size), dtype=dtype, device=device)
        mixed = torch.empty((1, shape.q_size), dtype=dtype, device=device)
        acts = torch.empty((1, shape.intermediate), dtype=dtype, device=device)
        readers = [
            NormReader(layer.input_norm, index, ("q", "k", "v"))
            for index, layer in enumerate(self._layers)
        ]
        heights = (shape.q_size, shape.kv_size)
        pieces: Tensor | None = None
        for index, (layer, reader) in enumerate(zip(self._layers, readers, strict=True)):
            if pieces is None:
                pieces = patched_gemv.first_pieces(rows, x, reader, early)
            (matrix,) = self._qkv[index]
            patched_gemv.norm_product(
                rows, x, reader, eps, matrix, heights, qkv, gemv_size(matrix), pieces,
                layer.qkv_bias, early,
            )  # fmt: skip
            pieces = torch.empty((shape.num_kv_heads, 1, RANKS), device=device)
            attention.decode_attention(
                shape, layer, qkv, self._turn, kv[index], batch, scratch, splits, mixed, early,
                attention.AttentionPatch(rows, index, pieces),
            )  # fmt: skip
            gate_up, down, behind = self._gate_up[index], self._down[index], None
            if layer.post_norm is not None and gate_up is not None:
                behind = NormReader(layer.post_norm, index, ("gate", "up"))
            matrix = self._o[index]
            pieces = patched_gemv.product_add(
                rows, mixed, matrix, (index, "o"), x, gemv_size(matrix), pieces, behind, early
            )
            if gate_up is None or down is None or behind is None:
                assert pool is not None and routed is not None
                self._experts(x, index, pool, routed, batch.slots)
                pieces = None
                continue
            size = gemv_size(gate_up)
            pieces = patched_gemv.norm_gate_up(
                rows, x, behind, eps, gate_up, acts, size, pieces, early
            )
            last = index + 1 == len(readers)
            pieces = patched_gemv.product_add(
                rows, acts, down, (index, "down"), x, gemv_size(down), pieces,
                None if last else readers[index + 1], early,
            )  # fmt: skip
        logits = torch.empty((1, self._head.count), dtype=torch.float32, device=device)
        size = gemv_size(self._head)
        gemv.norm_product(x, self._norm, eps, self._head, logits, size, None, early)
        return logits

    def _experts(
        self, x: Tensor, index: int, pool: DevicePool, routed: Tensor, slots: Tensor
    ) -> None:
        row, layer = self._moe[index]
        own = layer_pool(pool, row, index)
        rule, penalty, early = layer.gate.rule, layer.gate.penalty(x.device), self.dependent
        assert layer.norm is not None
        # with the parts of a shared expert behind the chosen ones
        both = self._with_shared(index, own)
        chosen = routed_rows(routed[row]) if both is None else replace(both, ids=routed[row])
        ahead = None if both is not None or index in self._shared else pool.prefetch
        copies = ahead is not None and ahead.buffer is not None
        guess = None if ahead is None or not copies or row == 0 else ahead.layer(row)
        following = None if ahead is None else self._next_gate(row, pool, ahead)
        expert_gemv.route(
            x, layer.norm, self._shape.eps, self._gates[index], rule, penalty, own.places,
            self._gate_scratch, chosen, early, guess, following,
        )  # fmt: skip
        early = not place_missing(pool, row, chosen) and early
        sizes, inner = pair_sizes(own.record), own.record.intermediate
        share, taken = layer_share(pool, row, len(x)), None
        if share is not None:
            norm = layer.norm, chosen.norms
            taken = share.ring(x, routed[row], chosen.weights, norm, early, guess)
        chosen = both or chosen
        acts = torch.empty((chosen.places.numel(), inner), dtype=x.dtype, device=x.device)
        expert_gemv.pair_gate_up(x, chosen, own, acts, sizes, layer.norm, early, taken, guess)
        if both is not None or index not in self._shared:
            expert_gemv.pair_down(acts, chosen, own, x, sizes, dependent=early, taken=taken)
            if following is not None and copies:
                self._prefetch(pool, row + 1, None if guess is None else (chosen.ids, slots))
            if share is not None:
                share.add(x, early)
            return
        # both read x before one of them changes it
        gate_up, down = self._shared[index]
        inside = torch.empty((1, down.width), dtype=x.dtype, device=x.device)
        size = gemv_size(gate_up)
        gemv.norm_gate_up(x, layer.norm, self._shape.eps, gate_up, inside, size, early)
        expert_gemv.pair_down(acts, chosen, own, x, sizes, dependent=early, taken=taken)
        gemv.product_add(inside, down, x, gemv_size(down), early)
        if share is not None:
            share.add(x, early)

    def _next_gate(
        self, row: int, pool: DevicePool, ahead: LinkPrefetch
    ) -> expert_gemv.NextGate | None:
        """The layer behind number `row`, if it has experts."""
        index = self._by_row[row] + 1
        if index not in self._moe or self._gates[index].shape != self._gates[index - 1].shape:
            return None
        layer = self._moe[index][1]
        assert layer.norm is not None
        logits, counts = self._gate_scratch
        gate = self._gates[index]
        return expert_gemv.NextGate(
            layer.norm, gate, layer.gate.penalty(gate.device), pool.tiers[row + 1],
            (logits[-1], counts[-1:]), ahead.layer(row + 1),
        )  # fmt: skip

    def _prefetch(self, pool: DevicePool, row: int, before: tuple[Tensor, Tensor] | None) -> None:
        """Read the guess of layer number `row` ahead, beside what this stream is given from now
        on. `before`: see `LinkPrefetch.start`."""
        assert pool.prefetch is not None
        if self._beside is None:
            pool.prefetch.start(row, pool.places[row], before)
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._norm.device))
        with torch.cuda.stream(self._beside):
            pool.prefetch.start(row, pool.places[row], before)
        self._is_forked = True

    def _join(self) -> None:
        """Behind a step: whatever runs beside it has ended before what comes next."""
        if self._beside is not None and self._is_forked:
            torch.cuda.current_stream(self._norm.device).wait_stream(self._beside)
            self._is_forked = False

    def _with_shared(
        self, index: int, own: expert_gemv.ExpertPool
    ) -> expert_gemv.RoutedRows | None:
        """Room for one row's choices in a layer whose shared expert is cut into routed ones."""
        layer, known = self._moe[index][1], self._cut.get(index)
        if not isinstance(layer.shared, GatedMlp):
            return None
        if known is None or known[0] is not own.base:
            cut = cut_shared(layer.shared, own.record)
            if cut is None:
                return None
            known = own.base, cut, with_shared(own, layer.gate.rule.top_k, cut)
            self._cut[index] = known
        return known[2]

    def _splits(self, batch: AttentionBatch) -> int:
        rows, width = batch.block_tables.shape
        return context_splits(width * batch.block_size, rows, self._shape.num_kv_heads)

    def _scratch(self, rows: int, splits: int, device: torch.device) -> attention.AttentionScratch:
        return attention.AttentionScratch.empty(rows, self._shape, splits, device, self._counts)


def _decodes(batch: AttentionBatch) -> bool:
    """Whether every sequence has one row, and attention is one kernel."""
    return len(batch.positions) == len(batch.context_lens) <= MAX_ROWS


def _scratch_of(
    pool: DevicePool | None, routed: Tensor | None, hidden: Tensor
) -> ExpertScratch | None:
    return None if pool is None or routed is None else new_scratch(routed[0], pool, hidden)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x times a matrix, summed and kept in fp32."""
    if x.dtype == weight.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


def _wide_logits(x: Tensor, head: Linear) -> Tensor:
    if isinstance(head, QuantLinear):
        return head.product(x, torch.float32)
    assert isinstance(head, ReferenceLinear)
    return _wide_product(x, head.weight)


def _products(layer: DecoderLayer) -> list[Linear]:
    every = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return [product for product in every if product is not None]


def _plain(layer: MoeLayer) -> bool:
    gate, shared = layer.gate, layer.shared
    products: list[Linear] = [gate.product]
    if shared is not None:
        if not isinstance(shared, GatedMlp):
            return False
        products += [shared.gate_up, shared.down]
    added = layer.norm is not None and layer.after is operator.add
    supported = all(type(each) in (ReferenceLinear, QuantLinear) for each in products)
    return added and gate.is_plain and supported and type(gate.product) is ReferenceLinear


def _gate_weight(layer: MoeLayer) -> Tensor:
    """In bf16 if that changes no value: half the bytes."""
    assert isinstance(layer.gate.product, ReferenceLinear)
    weight = layer.gate.product.weight
    half = weight.bfloat16()
    return half if torch.equal(half.float(), weight.float()) else weight


def device_matrix(product: Linear) -> gemv.DeviceMatrix:
    if isinstance(product, QuantLinear):
        return product.matrix
    assert isinstance(product, ReferenceLinear)
    return gemv.dense_matrix(product.weight)


def device_matrices(product: Linear) -> tuple[gemv.DeviceMatrix, ...]:
    parts = product.parts if isinstance(product, MixedLinear) else (product,)
    return tuple(map(device_matrix, parts))


def _maybe(product: Linear | None) -> gemv.DeviceMatrix | None:
    return None if product is None else device_matrix(product)
