"""Correctness parts of `dense_gpu`: Triton attention against its twin, bf16 logits against fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coterie.kernels.batch import AttentionBatch
from coterie.kernels.reference import layers as reference
from coterie.models.base import CausalLM

# (query rows, context lengths) of one step
BATCHES = {
    "decode": ([1] * 5, [1, 17, 300, 1024, 64]),
    "decode one": ([1], [4000]),
    "decode many": ([1] * 256, [200 + i for i in range(256)]),
    "prefill": ([1, 130, 700], [1, 130, 700]),
    "prefix": ([64, 33, 1, 250], [500, 33, 900, 1000]),
}
HEADS = [(9, 3, 64), (16, 8, 128)]
OTHER_HEADS = [(32, 4, 128), (8, 1, 256), (4, 2, 80)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# every variant takes seconds to compile, so not all combinations with the other head shapes are
# tried
CASES = [(dtype, batch, heads) for dtype in TOLERANCE for batch in BATCHES for heads in HEADS]
CASES += [(torch.bfloat16, batch, heads) for batch in ("decode", "prefix") for heads in OTHER_HEADS]


def make_batch(
    rows: Sequence[int], contexts: Sequence[int], device: str, block_size: int = 16
) -> tuple[AttentionBatch, int]:
    """Sequences over a shuffled pool; every block belongs to one of them."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts)).int()
    tables = torch.zeros((len(contexts), max(counts)), dtype=torch.int32)
    positions, slots, used = [], [], 0
    for index, (count, context, new) in enumerate(zip(counts, contexts, rows, strict=True)):
        tables[index, :count] = order[used : used + count]
        used += count
        where = torch.arange(context - new, context)
        positions.append(where)
        slots.append(tables[index, where // block_size].long() * block_size + where % block_size)
    batch = AttentionBatch(
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        query_starts=torch.tensor([0, *rows]).cumsum(0).int().to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        block_size=block_size,
    )
    return batch, sum(counts)


@contextmanager
def poisoned() -> Iterator[None]:
    """Make torch.empty return NaN, so that an element that is never written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def attention_errors() -> dict[str, Any]:
    """Worst relative error per type over every batch and head shape; NaN never passes."""
    from coterie.kernels.triton.attention import paged_attention

    torch.manual_seed(11)
    worst: dict[str, tuple[float, str]] = {}
    for dtype, name, (heads, kv_heads, dim) in CASES:
        rows, contexts = BATCHES[name]
        batch, blocks = make_batch(rows, contexts, "cuda")
        q = torch.randn((sum(rows), heads, dim), device="cuda").to(dtype)
        kv = torch.randn((2, blocks, kv_heads, 16, dim), device="cuda").to(dtype)
        with poisoned():
            got = paged_attention(q, kv, batch, dim**-0.5).double()
        want = reference.paged_attention(q.float(), kv.float(), batch, dim**-0.5).double()
        error = ((got - want).norm() / want.norm()).item()
        if not error < TOLERANCE[dtype]:
            raise AssertionError(f"{dtype} {name} {heads}x{kv_heads}x{dim}: {error}")
        if error > worst.get(str(dtype), (0.0, ""))[0]:
            worst[str(dtype)] = (error, f"{name} {heads}x{kv_heads}x{dim}")
    return {name: {"worst": error, "at": where} for name, (error, where) in worst.items()}


def prompt_logits(model: CausalLM, ids: Sequence[int], chunk: int) -> Tensor:
    """fp32 logits at every position, `chunk` tokens per step, with a new KV cache."""
    device = str(model.device)
    whole, blocks = make_batch([len(ids)], [len(ids)], device)
    shape = model.kv_shape(blocks, whole.block_size)
    kv = [
        torch.zeros(shape, dtype=model.kv_dtype, device=device)
        for _ in range(model.spec.num_layers)
    ]
    tokens, parts = torch.tensor(ids, device=device), []
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        batch = AttentionBatch(
            positions=whole.positions[start:stop],
            slots=whole.slots[start:stop],
            query_starts=torch.tensor([0, stop - start], dtype=torch.int32, device=device),
            context_lens=torch.tensor([stop], dtype=torch.int32, device=device),
            block_tables=whole.block_tables,
            block_size=whole.block_size,
        )
        rows = torch.arange(stop - start, device=device)
        parts.append(model.forward(tokens[start:stop], batch, kv, rows).clone())
    return torch.cat(parts)


def decode_step(model: CausalLM, streams: int, context: int) -> Callable[[], Tensor]:
    """One step of `streams` sequences at `context` tokens, ready to be timed."""
    device = str(model.device)
    batch, blocks = make_batch([1] * streams, [context] * streams, device)
    shape = model.kv_shape(blocks, batch.block_size)
    kv = [
        torch.randn(shape, device=device).to(model.kv_dtype) for _ in range(model.spec.num_layers)
    ]
    tokens, rows = torch.arange(streams, device=device), torch.arange(streams, device=device)
    return lambda: model.forward(tokens, batch, kv, rows)


def cast(peer: Any, dtype: torch.dtype) -> Any:
    """Cast only the parameters: rotary frequencies are buffers and stay fp32, as after loading."""
    for parameter in peer.parameters():
        parameter.data = parameter.data.to(dtype)
    return peer


@torch.no_grad()
def teacher_forced(model: CausalLM, peer: Any, ids: Sequence[int]) -> dict[str, Any]:
    """bf16 logits of both over one text, against the peer in fp32 with the same weights."""
    given = torch.tensor([list(ids)], device=model.device)
    theirs = peer(given).logits[0].float()
    truth = cast(peer, torch.float32)(given).logits[0]
    cast(peer, torch.bfloat16)
    best = truth.topk(2).values
    found: dict[str, Any] = {}
    runs = {
        "transformers": theirs,
        "coterie prefill": prompt_logits(model, ids, len(ids)),
        "coterie decode": prompt_logits(model, ids, 1),
    }
    for name, logits in runs.items():
        off = (logits - truth).abs().max().item()
        clear = (best[:, 0] - best[:, 1]) > 2 * off
        same = logits.argmax(-1) == truth.argmax(-1)
        found[name] = {
            "relative_error": ((logits - truth).norm() / truth.norm()).item(),
            "max_error": off,
            "same_argmax": same.float().mean().item(),
            "same_argmax_where_clear": bool(same[clear].all()),
            "clear_positions": int(clear.sum()),
        }
    return found
