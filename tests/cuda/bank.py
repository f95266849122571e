"""Experts beyond the device: the same answers with a quarter of them in slots and all in RAM.

greedy: every strategy gives transformers' tokens in fp32, captured and eager, alone and in batches.
bits: decode logits equal those with all experts resident, bit for bit, where the same kernels run.
race: experts of megabytes, moved beside steps that are launched ahead, give the same tokens as all
resident. once: what lru and active_only miss crosses the link once, and the host knows the device's
slots. memory: the peak stays inside the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch

from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM, load_model
from coterie.moe.dispatch.table import STRATEGIES
from coterie.moe.runtime.runtime import ExpertRuntime
from coterie.weights.checkpoint import open_checkpoint
from tests.cuda import answers
from tests.cuda.suite import Check, NotHere
from tests.helpers.models.paged_model import prompt_logits
from tests.helpers.serving.greedy_engine import run

# name of a model in `answers` -> strategies that serve it
MODELS: dict[str, tuple[str, ...]] = {
    "qwen3_moe": (*STRATEGIES, "lru+active_only", "hot_cached_static+lru"),
    "qwen3_moe odd": ("adaptive", "lru"),
    "mixtral": ("adaptive", "active_only"),
    "deepseek_v2": ("adaptive", "lru", "cpu_only"),
    "deepseek_v2 groups": ("lru",),
}
MODES = {"captured": ("alone", "8", "odd chunks"), "eager": ("alone",)}
SHARE = 0.25
# of the model whose moves take as long as its steps; 25% of its experts are 201 MB
LARGE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
}
RACING = ("lru", "active_only", "chunked", "static_pin", "hot_cached_static", "adaptive")


def checks(device: str, prompts: int) -> Iterator[Check]:
    for name, strategies in MODELS.items():
        for strategy in strategies:
            for mode, batches in MODES.items():
                call = partial(_equals_transformers, device, prompts, name, strategy, mode, batches)
                yield Check(f"bank {name}", f"bank/{name}/{strategy}/{mode}", _freed(call))
        call = partial(_same_bits, device, name, strategies[0])
        yield Check(f"bank {name}", f"bank/{name}/bits", _freed(call))
    for strategy in RACING:
        yield Check("bank race", f"bank/race/{strategy}", _freed(partial(_race, device, strategy)))
    for strategy in ("lru", "active_only"):
        call = partial(_crosses_once, device, strategy)
        yield Check("bank once", f"bank/once/{strategy}", _freed(call))
    yield Check("bank memory", "bank/memory", _freed(partial(_memory, device)))


# the last model, and its captured steps
_loaded: dict[tuple[str, str], tuple[CausalLM, Any]] = {}


def _freed(call: Callable[[], str]) -> Callable[[], str]:
    def run_check() -> str:
        try:
            return call()
        except BaseException:
            _close_all()
            raise

    return run_check


def _close_all() -> None:
    for model, _ in _loaded.values():
        model.close()
    _loaded.clear()


def _runtime(model: CausalLM) -> ExpertRuntime:
    return cast(ExpertRuntime, model.experts)


def _settings(total: int, strategy: str, share: float = SHARE) -> MoeSettings:
    slots = max(1, int(total * share)) if strategy != "cpu_only" else 0
    return MoeSettings(strategy=strategy, cache_capacity=slots, warmup="none", predict="prefetch")


def _model(device: str, name: str, strategy: str, mode: str) -> CausalLM:
    if device != "cuda":
        raise NotHere("needs CUDA")
    key = (name, strategy)
    if key not in _loaded:
        _close_all()
        checkpoint = open_checkpoint(answers._checkpoint(name))
        config = checkpoint.config
        experts = next(
            config[word]
            for word in ("num_experts", "num_local_experts", "n_routed_experts")
            if config.get(word)
        )
        layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
        settings = _settings(layers * experts, strategy)
        model = load_model(checkpoint, dtype="fp32", device=device, dispatch=settings)
        assert _runtime(model).parts.bank is not None, "experts are not in the bank"
        _runtime(model).wait_loaded()
        _loaded[key] = model, model.graphs
    model, graphs = _loaded[key]
    model.graphs = None if mode == "eager" else graphs
    return model


def _equals_transformers(
    device: str, count: int, name: str, strategy: str, mode: str, batches: tuple[str, ...]
) -> str:
    model, told = _model(device, name, strategy, mode), []
    for batch in batches:
        waves, lane = answers.BATCHES[batch]
        prompts = answers._prompts(name, count)[: min(count, answers.COUNTS.get(batch, 8))]
        got = run(model, answers._checkpoint(name), prompts, waves=min(waves, len(prompts)), **lane)
        want = answers._expected(name, prompts, got)
        wrong = [at for at, (a, b) in enumerate(zip(got.tokens, want, strict=True)) if a != b]
        assert not wrong, f"{batch}: {len(wrong)} of {len(want)} answers differ"
        told.append(f"{batch} {len(want)}")
    runtime = _runtime(model)
    runtime.check()
    total = runtime.telemetry.total()
    assert total.device_misses > 0 and total.host_runs == 0, "nothing was read from the bank"
    hits = total.device_hits / max(1, total.device_hits + total.device_misses)
    return f"{', '.join(told)} answers; {hits:.0%} hits, {total.moved_bytes / 1e6:.1f} MB moved"


def _same_bits(device: str, name: str, strategy: str) -> str:
    if device != "cuda":
        raise NotHere("needs CUDA")
    found = []
    ids = answers._prompts(name, 2)[0] + list(range(4, 40))
    for share in (SHARE, 1.0):
        if share < 1:
            model = _model(device, name, strategy, "captured")
        else:
            model = answers._model(device, name)
        for _ in range(2):
            logits = prompt_logits(model, ids, 1)
            (model.launched_usage() or model.take_usage)()
        found.append(logits)
    differ = int((found[0] != found[1]).any(1).sum())
    assert bool(found[0].isfinite().all()), "logits are not finite"
    assert not differ, f"{differ} of {len(ids)} rows differ"
    return f"{len(ids)} rows"


@cache
def _large_answers() -> list[list[int]]:
    """With all experts resident."""
    model = _large(None)
    try:
        return _answers(model)
    finally:
        model.close()


def _large(settings: MoeSettings | None) -> CausalLM:
    from benchmarks.random_models import SHAPES, make_model

    config = SHAPES["Qwen3-30B-A3B"] | LARGE
    return make_model(config, "cuda", dtype="fp32", experts="fp32", dispatch=settings)


def _answers(model: CausalLM, output: int = 96) -> list[list[int]]:
    from benchmarks.gpu_runs import SAMPLED, drive, make_engine, tokenizer_of
    from benchmarks.random_models import make_prompts

    engine = make_engine(model, tokenizer_of(model.spec.vocab), 6, 256)
    prompts = make_prompts(model.spec.vocab, [9, 30, 50, 64, 17, 40], seed=4)
    sampled = replace(SAMPLED, seed=0)
    done = drive(engine, prompts, output, sampled).streams
    engine.check()
    return [stream.tokens for stream in done]


def _race(device: str, strategy: str) -> str:
    if device != "cuda":
        raise NotHere("needs CUDA")
    want = _large_answers()
    total = LARGE["num_hidden_layers"] * LARGE["num_experts"]
    model = _large(_settings(total, strategy))
    try:
        got = _answers(model)
        runtime = _runtime(model)
        assert runtime.parts.bank is not None
        moved, swaps = runtime.telemetry.total().moved_bytes, runtime.swaps
        evicted = sum(runtime.parts.device.evictions.values())
    finally:
        model.close()
    differ = sum(a != b for a, b in zip(got, want, strict=True))
    assert not differ, f"{differ} of {len(want)} answers differ"
    return f"{len(want)} answers; {moved / 1e9:.1f} GB moved, {evicted} evictions, {swaps} swaps"


def _crosses_once(device: str, strategy: str) -> str:
    """One stream, then four: bytes over the link are those of the misses, once."""
    if device != "cuda":
        raise NotHere("needs CUDA")
    from benchmarks.gpu_runs import SAMPLED, Streams, make_engine, tokenizer_of
    from benchmarks.random_models import make_prompts

    model, told = _large(_settings(LARGE["num_hidden_layers"] * LARGE["num_experts"], strategy)), []
    try:
        runtime = _runtime(model)
        banked = runtime._banked
        assert banked is not None and banked._victims is not None, "the host decides"
        for count in (1, 4):
            engine = make_engine(model, tokenizer_of(model.spec.vocab), count, 160)
            streams = Streams(engine)
            for ids in make_prompts(model.spec.vocab, [12] * count, seed=count):
                streams.send(ids, 96, replace(SAMPLED, seed=0))
            while not all(len(stream.tokens) > 2 for stream in streams.all):
                streams.step()
            before = runtime.telemetry.total().as_dict()
            streams.drain()
            after = runtime.telemetry.total().as_dict()
            spent = {name: after[name] - before[name] for name in after}
            record = int(banked._record_bytes[0])
            assert spent["device_misses"] > 50, "nothing was missed"
            assert spent["moved_bytes"] == spent["device_misses"] * record, "not once"
            runtime.check()
            victims, width = banked._victims, runtime.geometry.num_experts
            for slot, key in enumerate(victims.state.keys.tolist()):
                own = None if key < 0 else (runtime.geometry.layers[key // width], key % width)
                assert own == runtime.parts.slots.key_at(slot), f"slot {slot}: {own}"
            assert bool((banked._table.known() == banked.pool.places.cpu().numpy()).all())
            hits = spent["device_hits"] / (spent["device_hits"] + spent["device_misses"])
            told.append(f"{count} streams {hits:.0%} hits, {spent['moved_bytes'] / 1e9:.2f} GB")
    finally:
        model.close()
    return "; ".join(told)


def _memory(device: str) -> str:
    """A budget in bytes holds KV and experts; captured steps have their own, which is counted."""
    if device != "cuda":
        raise NotHere("needs CUDA")
    from benchmarks.gpu_runs import free_memory

    free_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    budget = 400_000_000
    text = f"{budget}"
    settings = MoeSettings(strategy="lru", device_budget=text, warmup="none")
    model = _large(settings)
    try:
        parts = _runtime(model).parts
        assert parts.bank is not None and parts.device.budget_bytes <= budget
        assert parts.bank.nbytes == parts.host_bytes == parts.store.expert_bytes
        _answers(model)
        peak = torch.cuda.max_memory_allocated() - before
    finally:
        model.close()
    # embeddings are a tensor of their own
    weights = model.weight_bytes + model.spec.vocab * model.spec.hidden * 4
    most = weights + budget + 64_000_000
    assert peak <= most, f"{peak / 1e6:.0f} MB, budget and weights {most / 1e6:.0f}"
    return f"peak {peak / 1e6:.0f} MB: weights {weights / 1e6:.0f}, budget {budget / 1e6:.0f}"
