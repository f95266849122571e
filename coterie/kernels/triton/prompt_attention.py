"""Attention of prompts on a CUDA device: heads placed with one program per row; rows of prompts
that have nothing before them through cuDNN, later parts of long prompts through cuDNN in two parts
that are merged, all others through the paged kernel.

cuDNN plans each shape once, which takes long: lengths are padded, so that there are few. Rows
behind a prompt are never seen by its own, whatever they contain. Import this module only where
triton is installed.
"""

# Jitted functions are compiled by Triton: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie.kernels.triton.attention import paged_attention

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.decoder import DecoderLayer, DecoderShape

# lengths of prompts, and of what is before them, are multiples of these
_ROWS, _BEFORE = 128, 1024


@triton.jit
def _place_all_heads(
    qkv, q_norm, k_norm, cos, sin, positions, slots, q, rows, kv,
    eps, half_stride, part_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One program per row: norm and rotation of all its heads. Queries go to q [T, heads, dim],
    keys and values to the row's slot in the cache and, with KEEP, to rows [2, T, kv_heads, dim]."""
    row = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, COUNT), tl.arange(0, HALF)
    inside = half < HEAD_DIM // 2
    used = head < HEADS + 2 * KV_HEADS
    mask = used[:, None] & inside[None, :]
    source = qkv + row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    place = source + head[:, None] * HEAD_DIM + half[None, :]
    first = tl.load(place, mask=mask, other=0).to(tl.float32)
    second = tl.load(place + HEAD_DIM // 2, mask=mask, other=0).to(tl.float32)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    turned, again = first, second
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = tl.load(q_norm + half, mask=inside, other=0).to(tl.float32)[None, :]
        high = tl.load(q_norm + HEAD_DIM // 2 + half, mask=inside, other=0).to(tl.float32)[None, :]
        k_low = tl.load(k_norm + half, mask=inside, other=0).to(tl.float32)[None, :]
        k_high = tl.load(k_norm + HEAD_DIM // 2 + half, mask=inside, other=0)
        k_high = k_high.to(tl.float32)[None, :]
        turned = turned * scale * tl.where(is_q[:, None], low, k_low)
        again = again * scale * tl.where(is_q[:, None], high, k_high)
    turn = tl.load(positions + row) * (HEAD_DIM // 2) + half
    c = tl.load(cos + turn, mask=inside, other=0)[None, :]
    s = tl.load(sin + turn, mask=inside, other=0)[None, :]
    low_half, high_half = turned * c - again * s, again * c + turned * s
    dtype = qkv.dtype.element_ty
    low_half = tl.where(is_v[:, None], first, low_half).to(dtype)
    high_half = tl.where(is_v[:, None], second, high_half).to(dtype)
    target = q + (row * HEADS + head)[:, None] * HEAD_DIM + half[None, :]
    own = is_q[:, None] & inside[None, :]
    tl.store(target, low_half, mask=own)
    tl.store(target + HEAD_DIM // 2, high_half, mask=own)
    # heads of keys, then of values
    part = (head - HEADS) // KV_HEADS
    kv_head = (head - HEADS) % KV_HEADS
    own = mask & (head >= HEADS)[:, None]
    if KEEP:
        own_row = part * part_stride + (row * KV_HEADS + kv_head) * HEAD_DIM
        target = rows + own_row[:, None] + half[None, :]
        tl.store(target, low_half, mask=own)
        tl.store(target + HEAD_DIM // 2, high_half, mask=own)
    slot = tl.load(slots + row)
    token = ((slot // BLOCK_SIZE) * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = kv + (part * half_stride + token * HEAD_DIM)[:, None] + half[None, :]
    kept = kv.dtype.element_ty
    own = own & (slot >= 0)
    tl.store(target, low_half.to(kept), mask=own)
    tl.store(target + HEAD_DIM // 2, high_half.to(kept), mask=own)


def place_all_heads(
    shape: DecoderShape, layer: DecoderLayer, qkv: Tensor, turn: tuple[Tensor, Tensor],
    kv_layer: Tensor, batch: AttentionBatch, room: int = 0, keep: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries [T, heads, dim], and keys and values of the rows [2, T, kv_heads, dim], which are in
    the cache too; with `room` so many rows of zeros behind them. Without `keep` keys and values are
    only in the cache. qkv has its bias already; norms over all heads at once are not supported."""
    count, heads, dim = len(qkv), shape.num_heads, shape.head_dim
    total, kv_heads = count + room, shape.num_kv_heads
    q = torch.empty((total, heads, dim), dtype=qkv.dtype, device=qkv.device)
    kept = (2, total if keep else 0, kv_heads, dim)
    rows = torch.empty(kept, dtype=qkv.dtype, device=qkv.device)
    if room:
        q[count:].zero_()
        rows[:, count:].zero_()
    unused: Any = qkv
    _place_all_heads[(count,)](
        qkv, unused if layer.q_norm is None else layer.q_norm,
        unused if layer.k_norm is None else layer.k_norm, *turn, batch.positions, batch.slots,
        q, rows, kv_layer, shape.eps, kv_layer.stride(0), rows.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, HALF=triton.next_power_of_2(dim // 2),
        COUNT=triton.next_power_of_2(heads + 2 * kv_heads),
        BLOCK_SIZE=batch.block_size, NORM=layer.q_norm is not None, KEEP=keep, num_warps=4,
    )  # fmt: skip
    return q, rows


# counts change from prompt to prompt: specialising on them would compile while serving
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table"])
def _gather_tokens(
    kv, table, out, count, half_stride, part_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """out[part, position] = keys or values of all heads, for the first `count` positions of a
    sequence, zeros behind them. Grid: (tiles of positions, heads, parts)."""
    position = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, part = tl.program_id(1), tl.program_id(2)
    dim = tl.arange(0, DIM)
    live = position < count
    block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    token = ((block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    inside = (dim < HEAD_DIM)[None, :]
    source = kv + part * half_stride + token[:, None] + dim[None, :]
    value = tl.load(source, mask=live[:, None] & inside, other=0)
    target = (
        out + part * part_stride + (position.to(tl.int64) * KV_HEADS + head)[:, None] * HEAD_DIM
    )
    tl.store(target + dim[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["one_rows", "two_rows", "skipped"])
def _merge_parts(
    one, one_sums, two, two_sums, out, one_rows, two_rows, skipped,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program per row: attention over all keys from that over two parts of them, whose sums are
    logarithms [heads, rows]. Rows of the second part begin behind `skipped` others."""
    row = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, COUNT), tl.arange(0, DIM)
    used = head < HEADS
    inside = used[:, None] & (dim < HEAD_DIM)[None, :]
    first = tl.load(one_sums + head * one_rows + row, mask=used, other=0)
    second = tl.load(two_sums + head * two_rows + skipped + row, mask=used, other=0)
    top = tl.maximum(first, second)
    first, second = tl.exp(first - top), tl.exp(second - top)
    share = (first / (first + second))[:, None]
    place = (row * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    mixed = tl.load(one + place, mask=inside, other=0).to(tl.float32) * share
    behind = tl.load(two + skipped * HEADS * HEAD_DIM + place, mask=inside, other=0)
    mixed += behind.to(tl.float32) * (1.0 - share)
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside)


def gather_tokens(
    kv_layer: Tensor, table: Tensor, count: int, room: int, dtype: torch.dtype
) -> Tensor:
    """Keys and values of a sequence's first `count` tokens: [2, count + room, kv_heads, dim], the
    rest zeros."""
    _, _, kv_heads, block_size, dim = kv_layer.shape
    shape = (2, count + room, kv_heads, dim)
    out = torch.empty(shape, dtype=dtype, device=kv_layer.device)
    tokens = min(32, _ROWS)
    # a multiple of `tokens`, as both lengths that are padded are
    assert (count + room) % tokens == 0
    _gather_tokens[((count + room) // tokens, kv_heads, 2)](
        kv_layer, table, out, count, kv_layer.stride(0), out.stride(0),
        KV_HEADS=kv_heads, HEAD_DIM=dim, DIM=triton.next_power_of_2(dim), BLOCK_SIZE=block_size,
        TOKENS=tokens, num_warps=4,
    )  # fmt: skip
    return out


def attend_part(q: Tensor, kv: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention [rows, heads, dim] of q over keys and values [2, tokens, kv_heads, dim], and the
    logarithms of its sums [heads, rows]."""
    own, keys, values = (part.transpose(0, 1)[None] for part in (q, kv[0], kv[1]))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        own, keys, values, None, True, 0.0, causal, False, scale=scale
    )
    rows, heads = q.shape[:2]
    return out[0].transpose(0, 1).contiguous(), sums.reshape(heads, rows).contiguous()


def _attend_whole(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of whole prompts [1, heads, rows, dim]."""
    if has_parts(q.shape[1], keys.shape[1], q.shape[3], q.dtype, q.device.index):
        # without the choice among kernels, which takes longer than their launch
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, keys, values, None, False, 0.0, True, False, scale=scale
        )
        return cast(Tensor, found[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(
            q, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )


def continued_attention(
    q: Tensor, kv_layer: Tensor, table: Tensor, before: int, scale: float, out: Tensor
) -> None:
    """out [n, heads * dim] = causal attention of q [n, heads, dim] over `before` earlier tokens and
    its own, all of which are in the cache: over whole multiples of tokens that all rows see, and
    over the rest as a prompt whose first rows are not used."""
    count, heads, dim = q.shape
    rest = before % _BEFORE
    room = _padding(rest + count)
    both = gather_tokens(kv_layer, table, before + count, room, q.dtype)
    padded = q
    if rest or room:
        padded = q.new_zeros((rest + count + room, heads, dim))
        padded[rest : rest + count] = q
    two, two_sums = attend_part(padded, both[:, before - rest :], scale, causal=True)
    if before == rest:
        out.copy_(two[rest : rest + count].view(count, -1))
        return
    rows = padded[rest:]
    if _padding(len(rows)):
        rows = functional.pad(rows, (0, 0, 0, 0, 0, _padding(len(rows))))
    one, one_sums = attend_part(rows, both[:, : before - rest], scale, causal=False)
    _merge_parts[(count,)](
        one, one_sums, two, two_sums, out, one_sums.shape[1], two_sums.shape[1], rest,
        HEADS=heads, HEAD_DIM=dim, COUNT=triton.next_power_of_2(heads),
        DIM=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip


def _padding(rows: int) -> int:
    """Fewer lengths among the long ones, whose plans take longest."""
    return -rows % (_ROWS if rows <= 16 * _ROWS else 2 * _ROWS)


@cache
def has_parts(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: int) -> bool:
    """Whether cuDNN runs this shape, so that attention can be merged from parts."""
    q, k = (torch.empty((1, n, _ROWS, dim), dtype=dtype, device=device) for n in (heads, kv_heads))
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, True)
    return bool(torch.backends.cuda.can_use_cudnn_attention(params))


def shaped(batch: AttentionBatch, shape: DecoderShape, dtype: torch.dtype) -> AttentionBatch:
    """The batch without what cuDNN does not support."""
    if dtype.itemsize != 2:
        return replace(batch, fresh=(), continued=())
    device = batch.positions.device
    if batch.continued and not has_parts(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, device.index or 0
    ):
        return replace(batch, continued=())
    return batch


def rows_behind(batch: AttentionBatch) -> int:
    """Rows that the padding of prompts needs behind the last one."""
    count = len(batch.positions)
    return max([0, *(last + _padding(last - first) - count for first, last in batch.fresh)])


def paged_rows(batch: AttentionBatch) -> tuple[int, AttentionBatch] | None:
    """What the paged kernel has to compute: the first rows, and their batch; None if nothing. Where
    prompts for cuDNN are between others, all rows, with no context for those of cuDNN."""
    count, sequences = len(batch.positions), len(batch.context_lens)
    covered = sorted((first, last) for first, last, *_ in (*batch.fresh, *batch.continued))
    begin = count - sum(last - first for first, last in covered)
    if begin == 0:
        return None
    if not covered:
        return count, batch
    if covered[0][0] == begin:
        left = sequences - len(covered)
        return begin, replace(
            batch,
            query_starts=batch.query_starts[: left + 1],
            context_lens=batch.context_lens[:left],
            block_tables=batch.block_tables[:left],
        )
    return count, without_context(batch, covered)


def without_context(batch: AttentionBatch, spans: Sequence[tuple[int, int]]) -> AttentionBatch:
    """The sequences whose rows are in `spans` have no context, and the paged kernel no work."""
    starts = torch.tensor([first for first, _ in spans], dtype=torch.int32)
    found = torch.isin(batch.query_starts[:-1], starts.to(batch.query_starts.device))
    return replace(batch, context_lens=torch.where(found, 0, batch.context_lens))


def prompt_attention(
    q: Tensor,
    rows: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    paged: tuple[int, AttentionBatch] | None,
    scale: float,
    tiles: Tensor | None = None,
) -> Tensor:
    """[T, heads * dim]; `paged`: from `paged_rows`; `tiles`: from `prompt_tiles` for its batch."""
    count = len(batch.positions)
    if paged is not None and paged[0] == count:
        out = paged_attention(q[:count], kv_layer, paged[1], scale, tiles).view(count, -1)
    else:
        out = torch.empty((count, q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if paged is not None:
            some = paged[0]
            out[:some] = paged_attention(q[:some], kv_layer, paged[1], scale, tiles).view(some, -1)
    for first, last in batch.fresh:
        end = last + _padding(last - first)
        parts = (q[first:end], rows[0, first:end], rows[1, first:end])
        own, keys, values = (part.transpose(0, 1)[None] for part in parts)
        mixed = _attend_whole(own, keys, values, scale)
        mixed = mixed[0].transpose(0, 1)[: last - first].reshape(last - first, -1)
        if last - first == count:
            return mixed
        out[first:last] = mixed
    for first, last, sequence, before in batch.continued:
        table = batch.block_tables[sequence]
        continued_attention(q[first:last], kv_layer, table, before, scale, out[first:last])
    return out
