"""KV and experts in one memory: the same answers while slabs change hands, inside the budget.

greedy: contexts grow and end; the tokens are transformers' in fp32, captured and eager. growth: for
some seconds contexts of 6 streams grow and shrink beside experts of megabytes; answers are those
with all experts resident and KV of its own, the peak stays inside the budget, nothing grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM, load_model
from coterie.models.build.moe import moe_factory
from coterie.moe.runtime.runtime import ExpertRuntime
from coterie.weights.checkpoint import open_checkpoint
from tests.cuda import answers
from tests.cuda.bank import LARGE
from tests.cuda.suite import Check, NotHere
from tests.helpers.serving.greedy_engine import run

MODELS = {
    "qwen3_moe": ("adaptive", "lru", "chunked", "hot_cached_static", "static_pin"),
    "mixtral": ("active_only",),
    "deepseek_v2": ("adaptive", "lru"),
}
SETTINGS = MoeSettings(warmup="none", predict="off", elastic_memory=True)
# bytes of KV and experts: 62 slots of 3.1 MB, and 128 KV blocks of 64 KB
BUDGET = 204_000_000
OWN_KV = 8_400_000
# what steps, captured graphs and their inputs take beside that
STEP_BYTES = 192_000_000
STREAMS, OUTPUT = 6, 48


def checks(device: str, prompts: int, seconds: float) -> Iterator[Check]:
    for name, strategies in MODELS.items():
        for strategy in strategies:
            for mode in ("captured", "eager"):
                call = partial(_greedy, device, prompts, name, strategy, mode)
                name_of = f"elastic/{name}/{strategy}/{mode}"
                yield Check(f"elastic {name}", name_of, _on_cuda(device, call))
    for strategy in ("adaptive", "lru"):
        call = partial(_growth, device, strategy, seconds / 2)
        group, name_of = f"elastic growth {strategy}", f"elastic/growth/{strategy}"
        yield Check(group, name_of, _on_cuda(device, call))


def _on_cuda(device: str, call: Callable[[], str]) -> Callable[[], str]:
    def run_check() -> str:
        if device != "cuda":
            raise NotHere("needs CUDA")
        return call()

    return run_check


def _greedy(device: str, count: int, name: str, strategy: str, mode: str) -> str:
    path = answers._checkpoint(name)
    # half of them: slabs of tiny experts are few
    settings = replace(SETTINGS, strategy=strategy, cache_capacity=12)
    if device == "cpu":
        settings = replace(settings, host_budget="20%")
    factory = moe_factory(settings, own_kv=100_000)
    model = load_model(open_checkpoint(path), dtype="fp32", device=device, experts=factory)
    try:
        if mode == "eager":
            model.graphs = None
        trade = model.memory_trade
        assert trade is not None
        assert device == "cpu" or _runtime(model).parts.bank is not None
        lane: dict[str, Any] = {"num_blocks": trade.layout.num_blocks, "prefix_cache": False}
        prompts = answers._prompts(name, count)[: min(count, 12)]
        # all at once, then one after another, so that slabs go back
        for waves in (1, len(prompts)):
            got = run(model, path, prompts, waves=waves, **lane)
            want = answers._expected(name, prompts, got)
            wrong = sum(a != b for a, b in zip(got.tokens, want, strict=True))
            assert not wrong, f"{waves} waves: {wrong} of {len(want)} answers differ"
        taken, returned = trade.taken, trade.returned
        assert taken and returned, f"{taken} slabs taken, {returned} given back"
        _runtime(model).check()
        return f"{2 * len(prompts)} answers; {taken} slabs taken, {returned} given back"
    finally:
        model.close()


def _runtime(model: CausalLM) -> ExpertRuntime:
    return cast(ExpertRuntime, model.experts)


def _growth(device: str, strategy: str, seconds: float) -> str:
    from benchmarks.gpu_runs import free_memory, make_engine, tokenizer_of
    from benchmarks.moe.growth import elastic_engine
    from benchmarks.random_models import SHAPES, make_model

    config = SHAPES["Qwen3-30B-A3B"] | LARGE
    lengths = [[40] * STREAMS, [400, 900, 1500, 2100, 700, 1200], [2600] * STREAMS, [60] * STREAMS]
    resident = make_model(config, device, dtype="fp32", experts="fp32")
    tokenizer = tokenizer_of(resident.spec.vocab)
    plain = make_engine(resident, tokenizer, STREAMS, 2700, step_tokens=2048)
    want = [_answers(plain, resident, own) for own in lengths]
    resident.close()
    del resident, plain
    free_memory()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    settings = replace(SETTINGS, strategy=strategy, device_budget=f"{BUDGET}")
    if device == "cpu":
        settings = replace(settings, host_budget="20%")
    model = make_model(
        config, device, dtype="fp32", experts="fp32", dispatch=settings, own_kv=OWN_KV
    )
    try:
        engine, trade = elastic_engine(model, STREAMS, context=2700)
        memory = len(_runtime(model).parts.device.memory)
        assert memory <= BUDGET, f"{memory:,} bytes for KV and experts"
        held, begin, rounds = [], time.perf_counter(), 0
        while rounds < 2 or time.perf_counter() - begin < seconds:
            for own, tokens in zip(lengths, want, strict=True):
                got = _answers(engine, model, own)
                differ = sum(a != b for a, b in zip(got, tokens, strict=True))
                assert not differ, f"round {rounds}: {differ} of {len(got)} answers differ"
            engine.check()
            trade.check()
            held.append(torch.cuda.memory_allocated())
            rounds += 1
        peak = torch.cuda.max_memory_allocated() - before
        taken, returned, slabs = trade.taken, trade.returned, trade.layout.num_slabs
    finally:
        model.close()
    weights = model.weight_bytes + model.spec.vocab * model.spec.hidden * 4
    most = weights + BUDGET + STEP_BYTES
    assert peak <= most, f"peak {peak / 1e6:.0f} MB, budget and weights {most / 1e6:.0f}"
    assert held[-1] <= held[1] + 2**20, f"held {[each // 2**20 for each in held]} MB"
    assert taken > slabs // 4 and returned > 0, f"{taken} taken, {returned} given back"
    return (
        f"{rounds} rounds; {taken} of {slabs} slabs taken, {returned} given back; "
        f"peak {peak / 1e6:.0f} of {most / 1e6:.0f} MB"
    )


def _answers(engine: Any, model: CausalLM, lengths: list[int]) -> list[list[int]]:
    from benchmarks.gpu_runs import SAMPLED, drive
    from benchmarks.random_models import make_prompts

    prompts = make_prompts(model.spec.vocab, lengths, seed=len(lengths) + lengths[0])
    return [stream.tokens for stream in drive(engine, prompts, OUTPUT, SAMPLED).streams]
