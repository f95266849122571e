"""Steps with prompts while a quarter of the experts is on the device: the same bits as with all.

bits: logits of prompts of all lengths, of later parts of prompts and of prompts beside decoding
rows, and of rows that decode after them, in every precision; experts move between the steps.
memory: the peak stays inside a budget in bytes, which has the buffers in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from benchmarks.gpu_runs import free_memory, make_batch
from benchmarks.random_models import SHAPES, make_model
from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM
from coterie.moe.runtime.runtime import ExpertRuntime
from tests.cuda.bank import LARGE
from tests.cuda.suite import Check, NotHere

# New rows of each sequence, and its tokens with them. From 3 to 16 rows other kernels run where
# experts are read over the link.
STEPS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((20,), (20,)),
    ((30,), (30,)),
    ((1, 1), (40, 9)),
    ((90,), (90,)),
    ((400,), (1000,)),
    ((1, 1, 700), (40, 9, 700)),
    ((1, 1), (40, 9)),
    ((2500,), (2500,)),
    ((2048, 300), (2048, 600)),
)
KINDS = (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int8"), ("bf16", "int4"))
STRATEGIES = ("lru", "hot_cached_static")


def checks(device: str) -> Iterator[Check]:
    for dtype, experts in KINDS:
        for strategy in STRATEGIES:
            call = partial(_same_bits, device, dtype, experts, strategy)
            yield Check(f"prompts {experts}", f"prompts/bits/{experts}/{strategy}", call)
    yield Check("prompts memory", "prompts/memory", partial(_memory, device))


def _large(dtype: str, experts: str, dispatch: MoeSettings | None) -> CausalLM:
    config = SHAPES["Qwen3-30B-A3B"] | LARGE
    return make_model(config, "cuda", dtype=dtype, experts=experts, dispatch=dispatch)


def _same_bits(device: str, dtype: str, experts: str, strategy: str) -> str:
    if device != "cuda":
        raise NotHere("needs CUDA")
    settings = MoeSettings(strategy=strategy, device_budget="25%", warmup="none", predict="off")
    found, copied = [], (0, 0)
    for dispatch in (None, settings):
        model = _large(dtype, experts, dispatch)
        # captured steps are padded, which may choose other kernels
        model.graphs = None
        try:
            found.append([_logits(model, *step, seed) for seed, step in enumerate(STEPS * 2)])
            banked = cast(ExpertRuntime, model.experts)._banked
            if banked is not None and banked.prompts is not None:
                copied = banked.prompts.stream.steps, banked.prompts.stream.copied_bytes
        finally:
            model.close()
            del model
            free_memory()
    pairs = list(zip(STEPS * 2, *found, strict=True))
    assert all(bool(want.isfinite().all()) for _, want, _ in pairs), "logits are not finite"
    wrong = [rows for (rows, _), want, got in pairs if not torch.equal(want, got)]
    assert not wrong, f"other bits with rows {wrong}"
    prompts = sum(max(rows) > MANY_ROWS for rows, _ in STEPS)
    assert copied[0] >= 2 * prompts, f"only {copied[0]} steps copied experts"
    return f"{len(pairs)} steps, {copied[0]} with copies, {copied[1] / 1e9:.1f} GB"


# prompts that use nearly all experts
MANY_ROWS = 256


@torch.inference_mode()
def _logits(model: CausalLM, rows: Sequence[int], contexts: Sequence[int], seed: int) -> Tensor:
    torch.manual_seed(seed)
    batch, blocks = make_batch(rows, contexts, "cuda")
    kv = model.new_kv(blocks, batch.block_size)
    for cache in kv:
        cache.normal_()
    tokens = torch.randint(3, model.spec.vocab, (sum(rows),), device="cuda")
    last = batch.query_starts[1:].long() - 1
    logits = model.forward(tokens, batch, kv, last).clone()
    (model.launched_usage() or model.take_usage)()
    return logits


def _memory(device: str) -> str:
    if device != "cuda":
        raise NotHere("needs CUDA")
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    before, budget, rows = torch.cuda.memory_allocated(), 600_000_000, 2048
    settings = MoeSettings(strategy="lru", device_budget=f"{budget}", warmup="none", predict="off")
    model = _large("fp32", "fp32", settings)
    try:
        parts = cast(ExpertRuntime, model.experts).parts
        assert parts.device.buffers > 0 and parts.device.budget_bytes <= budget
        for seed in range(3):
            _logits(model, (rows,), (rows,), seed)
        peak = torch.cuda.max_memory_allocated() - before
        weights = model.weight_bytes + model.spec.vocab * model.spec.hidden * 4
    finally:
        model.close()
    # of the step itself: rows sorted by expert, their activations, heads, keys and values
    step = rows * 4 * (LARGE["num_experts_per_tok"] * 1024 + 8 * LARGE["hidden_size"]) + 64_000_000
    most = weights + budget + step
    assert peak <= most, f"{peak / 1e6:.0f} MB of {most / 1e6:.0f}"
    return f"peak {peak / 1e6:.0f} MB of {most / 1e6:.0f}"
