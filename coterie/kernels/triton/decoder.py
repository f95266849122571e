"""A stack of decoder layers on Triton kernels, with and without adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from coterie.kernels import patched
from coterie.kernels.batch import (
    FEW,
    KINDS,
    LONG_ROWS,
    AttentionBatch,
    PatchRows,
    Places,
    stack_record,
)
from coterie.kernels.decoder import DecoderLayer, DecoderShape
from coterie.kernels.reference import layers as reference
from coterie.kernels.triton.attention import paged_attention
from coterie.kernels.triton.layers import HeadPatches, add_norm, place_heads, silu_mul
from coterie.kernels.triton.patches import RANKS, _norm_rows, _silu_rows, site_of

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.patch import Segment


def _normed_whole(
    shape: DecoderShape, layer: DecoderLayer, qkv: Tensor
) -> tuple[DecoderLayer, Tensor]:
    """torch adds the bias and the norms over all heads; the returned layer has neither."""
    heads = torch.cat([part.flatten(1) for part in reference.project(shape, layer, qkv)], dim=1)
    return replace(layer, qkv_bias=None, q_norm=None, k_norm=None), heads


def decoder(
    shape: DecoderShape,
    layers: Sequence[DecoderLayer],
    cos: Tensor,
    sin: Tensor,
    hidden: Tensor,
    kv: Sequence[Tensor],
    batch: AttentionBatch,
    first: int = 0,
) -> Tensor:
    """Run `layers` over hidden [T, D], which is overwritten. No final norm.

    The first given layer is number `first` of the model, by which patches are found.
    """
    if batch.patches or batch.patch_rows is not None:
        reads = find_patch_reads(shape, layers, batch, first)
        if reads is not None:
            return patched_decoder(shape, layers, (cos, sin), hidden, kv, batch, reads)
    patches = batch.patches
    delta: Tensor | None = None
    heads = (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size))
    inner = (("gate", shape.intermediate), ("up", shape.intermediate))
    for index, (layer, kv_layer) in enumerate(zip(layers, kv, strict=True), first):
        normed = add_norm(hidden, delta, layer.input_norm, shape.eps)
        qkv = patched.linear(layer.qkv, normed, index, heads, patches)
        if layer.norms_whole(shape):
            layer, qkv = _normed_whole(shape, layer, qkv)
        q = place_heads(shape, layer, qkv, (cos, sin), kv_layer, batch)
        mixed = paged_attention(q, kv_layer, batch, shape.attention_scale).view(len(hidden), -1)
        delta = patched.linear(layer.o, mixed, index, (("o", shape.hidden),), patches)
        if layer.post_norm is None or layer.gate_up is None or layer.down is None:
            continue
        normed = add_norm(hidden, delta, layer.post_norm, shape.eps)
        acts = silu_mul(patched.linear(layer.gate_up, normed, index, inner, patches))
        delta = patched.linear(layer.down, acts, index, (("down", shape.hidden),), patches)
    return hidden if delta is None else hidden + delta


DEEP, WIDE = KINDS.index("deep"), KINDS.index("wide")
# the most elements of a matrix that fit the registers of one program
_TILE, _TILE_WIDE = 32768, 16384


class ProgramSizes(NamedTuple):
    """The sizes of programs, chosen by measurement."""

    # of one warp of a program with whole rows: a thread has all ranks of columns / 32 columns
    columns: int
    # programs that share the ranks of a part
    shares: int
    # columns of silu(gate) * up that one program makes
    chunk: int
    # sites that are fetched before they are needed: o to down, then q, k and v of the next layer
    fetched: int


# measured at 576 and at 2048 columns: see docs/kernels.md
SLIM_WIDTH = 1024
SLIM, BROAD = ProgramSizes(128, 2, 64, 7), ProgramSizes(256, 1, 128, 0)


def sizes_of(rows: PatchRows, width: int) -> ProgramSizes:
    sizes = SLIM if width <= SLIM_WIDTH else BROAD
    if triton.knobs.runtime.interpret:
        # the interpreter has no prefetch instruction
        sizes = sizes._replace(fetched=0)
    # 128: loads of fp32 and bf16 then have one layout
    return sizes._replace(columns=128, shares=1) if rows.kind == WIDE else sizes


class PatchReads(NamedTuple):
    """The patches that the rows of a step read."""

    rows: PatchRows
    # segments that torch computes
    rest: tuple[Segment, ...]
    # number of the first layer that is run
    first: int


class PatchedProduct(NamedTuple):
    """The output of `o` or `down` of a layer, and the inputs of its low-rank terms."""

    y: Tensor
    layer: int
    part: str
    # x itself, or the pieces of x a^T [T, pieces, room] that were made with x
    source: Tensor | None = None
    terms: Tensor | None = None


class NormStep(NamedTuple):
    """A norm, and the parts of a layer that read its result."""

    weight: Tensor
    eps: float
    layer: int
    parts: tuple[str, ...]


def norm_rows(
    rows: PatchRows, hidden: Tensor, product: PatchedProduct | None, norm: NormStep | None
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden + patched product; its norm; and the terms of the parts that read the norm."""
    count, width = hidden.shape
    parts = norm.parts if norm else ()
    source, terms = (product.source, product.terms) if product else (None, None)
    summed = torch.empty_like(hidden) if product else hidden
    normed = torch.empty_like(hidden) if norm else hidden
    shrunk = _room(rows, count, max(1, len(parts)))
    inner = 0 if source is None else source.shape[1]
    splits = 1 if terms is None else terms.shape[1]
    widest = triton.next_power_of_2(max(width, inner))
    sizes = sizes_of(rows, width)
    tile = _TILE_WIDE if rows.kind == WIDE else _TILE
    ranks = max(2, min(RANKS, tile // widest))
    _norm_rows[(count, max(1, len(parts) * sizes.shares))](
        hidden,
        product.y if product else hidden,
        hidden if source is None else source,
        shrunk if terms is None else terms,
        norm.weight if norm else hidden,
        rows.table,
        summed,
        normed,
        shrunk,
        norm.eps if norm else 0.0,
        rows.table.shape[1],
        shrunk.shape[2],
        site_of(product.layer, product.part) if product else 0,
        site_of(norm.layer, parts[0]) if norm else 0,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        SOURCE=inner,
        SOURCE_PADDED=triton.next_power_of_2(max(1, inner)),
        SPLITS=splits,
        PARTS=len(parts),
        SHARES=sizes.shares,
        ADD=product is not None,
        RANKS=ranks,
        # fewer ranks at a time than there may be: in a loop
        KIND=max(rows.kind, DEEP) if ranks < RANKS else rows.kind,
        ALIGN=sizes.columns // 16,
        num_warps=min(16, max(1, widest // sizes.columns)),
    )
    return summed, normed, shrunk


def silu_rows(
    rows: PatchRows, gate_up: Tensor, layer: int, terms: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, as `down` reads it, and the pieces of down's terms."""
    count, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    chunks = triton.cdiv(width, chunk)
    shrunk = _room(rows, count, chunks)
    _silu_rows[(count, chunks)](
        gate_up,
        rows.table,
        terms,
        out,
        shrunk,
        rows.table.shape[1],
        shrunk.shape[2],
        site_of(layer, "gate"),
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS=chunks,
        RANKS=RANKS,
        KIND=rows.kind,
        ALIGN=8,
        num_warps=1,
    )
    return out, shrunk


def _room(rows: PatchRows, count: int, pieces: int) -> Tensor:
    room = -(-rows.rank // 16) * 16
    return torch.empty((count, pieces, room), device=rows.table.device)


def find_patch_reads(
    shape: DecoderShape, layers: Sequence[DecoderLayer], batch: AttentionBatch, first: int
) -> PatchReads | None:
    """None when torch computes all of it. Patches are applied before biases and norms: where torch
    adds those, it must apply patches too."""
    products = [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in layers]
    biased = any(hasattr(product, "bias") for four in products for product in four)
    if biased or any(layer.norms_whole(shape) for layer in layers):
        return None
    rows, rest = patch_rows_of(batch, first + len(layers))
    if rows is None:
        return None
    rows.read = True
    return PatchReads(rows, rest, first)


def patched_decoder(
    shape: DecoderShape,
    layers: Sequence[DecoderLayer],
    turn: tuple[Tensor, Tensor],
    hidden: Tensor,
    kv: Sequence[Tensor],
    batch: AttentionBatch,
    given: PatchReads,
) -> Tensor:
    rows, rest, first = given
    sizes = sizes_of(rows, shape.hidden)
    before: PatchedProduct | None = None
    heads = (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size))
    inner = (("gate", shape.intermediate), ("up", shape.intermediate))
    for index, (layer, kv_layer) in enumerate(zip(layers, kv, strict=True), first):
        norm = NormStep(layer.input_norm, shape.eps, index, ("q", "k", "v"))
        hidden, normed, terms = norm_rows(rows, hidden, before, norm)
        qkv = patched.linear(layer.qkv, normed, index, heads, rest)
        patches = HeadPatches(rows, index, terms, sizes.fetched)
        q = place_heads(shape, layer, qkv, turn, kv_layer, batch, patches)
        mixed = paged_attention(q, kv_layer, batch, shape.attention_scale).view(len(hidden), -1)
        y = patched.linear(layer.o, mixed, index, (("o", shape.hidden),), rest)
        before = PatchedProduct(y, index, "o", source=mixed)
        if layer.post_norm is None or layer.gate_up is None or layer.down is None:
            continue
        norm = NormStep(layer.post_norm, shape.eps, index, ("gate", "up"))
        hidden, normed, terms = norm_rows(rows, hidden, before, norm)
        gate_up = patched.linear(layer.gate_up, normed, index, inner, rest)
        acts, pieces = silu_rows(rows, gate_up, index, terms, sizes.chunk)
        y = patched.linear(layer.down, acts, index, (("down", shape.hidden),), rest)
        before = PatchedProduct(y, index, "down", terms=pieces)
    return hidden if before is None else norm_rows(rows, hidden, before, None)[0]


def patch_rows_of(
    batch: AttentionBatch, layers: int
) -> tuple[PatchRows | None, tuple[Segment, ...]]:
    """What the row kernels read, and the segments that torch computes: long ones, and those that
    the kernels do not support. `layers` is the number up to the last one of this call."""
    if batch.patch_rows is not None:
        return batch.patch_rows, ()
    device = batch.positions.device
    short, rest = [], []
    for part in batch.patches:
        if not part.stack.patches:
            continue
        record = stack_record(part.stack, device)
        if record.sites is None or part.last - part.first >= LONG_ROWS:
            rest.append(part)
            continue
        short.append((part.first, part.last, record))
        layers = max(layers, record.layers)
    if not short:
        return None, tuple(rest)
    return _gathered(tuple(short), len(batch.positions), layers, device), tuple(rest)


# a model that runs layer by layer calls it for each of them
@lru_cache(maxsize=1)
def _gathered(places: Places, rows: int, layers: int, device: torch.device) -> PatchRows:
    found = PatchRows(rows, layers, device, max(record.kind for _, _, record in places))
    found.rank = max(FEW, *(record.rank for _, _, record in places))
    found.fill(places)
    return found
