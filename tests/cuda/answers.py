"""Answers of tiny models of every architecture on the device: equal to transformers in fp32,
captured and eager, alone and in batches; and how much they depend on the batch in less precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from coterie.core.adapters import AdapterSettings
from coterie.core.config import CAPTURES
from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM, load_model
from coterie.weights.checkpoint import open_checkpoint
from tests.cuda.suite import Check, NotHere
from tests.helpers.models.paged_model import prompt_logits
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.greedy_engine import (
    NEW_TOKENS,
    Outcome,
    expected,
    random_prompts,
    run,
)

# name -> architecture and config keys. Experts 48 wide are not what the device's kernels support:
# those run in torch. The sizes of "odd" are no powers of two.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama odd": ("llama", {"hidden_size": 96, "intermediate_size": 224, "head_dim": 24}),
    "mistral": ("mistral", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 64}),
    "qwen3_moe in torch": ("qwen3_moe", {}),
    "qwen3_moe odd": (
        "qwen3_moe",
        {
            "hidden_size": 96,
            "moe_intermediate_size": 96,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("mixtral", {"intermediate_size": 64}),
    "olmoe": ("olmoe", {"intermediate_size": 64}),
    "deepseek_v2": ("deepseek_v2", {"moe_intermediate_size": 64}),
    "deepseek_v2 in torch": ("deepseek_v2", {}),
    "deepseek_v2 low-rank queries": (
        "deepseek_v2",
        {"moe_intermediate_size": 96, "q_lora_rank": 24, "kv_lora_rank": 24, "v_head_dim": 12},
    ),
    # a gate that only torch computes: captured layer by layer
    "deepseek_v2 groups": (
        "deepseek_v2",
        {
            "moe_intermediate_size": 64,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "dwr": ("dwr", {}),
}
# how the prompts run: waves of requests that are sent together, and the lane's settings
BATCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (20, {"max_sequences": 1, "prefix_cache": False}),
    "2": (10, {"max_sequences": 2, "prefix_cache": False}),
    "8": (2, {"max_sequences": 8, "prefix_cache": False}),
    "20": (1, {"max_sequences": 20, "prefix_cache": False}),
    # prompts in pieces beside running streams
    "odd chunks": (1, {"max_step_tokens": 13, "max_sequences": 5, "block_size": 32}),
    # room for about three of eight sequences: the rest is preempted and computed again
    "under pressure": (1, {"num_blocks": 30, "max_sequences": 8, "prefix_cache": False}),
}
COUNTS = {"8": 16, "under pressure": 8}
# how steps run; only captured steps are served in every kind of batch
MODES: dict[str, tuple[str, ...]] = {
    "captured": tuple(BATCHES),
    "in order": ("alone", "8"),
    "eager": ("alone", "20"),
}
TEMPERATURE = 0.8
# models that are loaded once for every value of `--capture-graphs`
CAPTURED = ("llama", "qwen3_moe")


def checks(device: str, prompts: int) -> Iterator[Check]:
    """All of a model before the next one, so that one at a time is loaded."""
    for name in MODELS:
        for check in _checks_of(name, device, prompts):
            yield replace(check, run=partial(_in_known_state, check.run))


def _checks_of(name: str, device: str, prompts: int) -> Iterator[Check]:
    for mode, batches in MODES.items():
        for batch in batches if device == "cuda" or mode != "eager" else BATCHES:
            call = partial(_equals_transformers, device, prompts, name, mode, batch)
            yield Check(name, f"greedy/{name}/{mode}/{batch}", call)
    yield Check(name, f"launch/{name}", partial(_same_bits_in_order, device, prompts, name))
    for dtype in ("fp32", "bf16", "int8", "int4"):
        call = partial(_batch_dependence, device, prompts, name, dtype)
        yield Check(name, f"batch/{name}/{dtype}", call)
    call = partial(_sampled_alone_and_together, device, prompts, name)
    yield Check(name, f"sampled/{name}", call)
    if name in CAPTURED:
        yield Check(name, f"capture/{name}", partial(_captures, device, name))
        yield Check(name, f"pieces/{name}", partial(_pieces, device, prompts, name))


def _in_known_state(run_check: Callable[[], str]) -> str:
    """A model in which a step failed is not used again."""
    try:
        return run_check()
    except Exception as problem:
        if not isinstance(problem, NotHere):
            _loaded.clear()
        raise


@cache
def _checkpoint(name: str) -> Path:
    kind, changes = MODELS[name]
    return tiny_checkpoint(kind, **changes)


@cache
def _prompts(name: str, count: int) -> list[list[int]]:
    if MODELS[name][0] == "dwr":
        draw = torch.Generator().manual_seed(2)
        lengths = [1 + 37 * index % 90 for index in range(count)]
        return [torch.randint(4, 384, (n,), generator=draw).tolist() for n in lengths]
    return random_prompts(_checkpoint(name), count)


# the last model, and its captured steps
_loaded: dict[tuple[str, str, str], tuple[CausalLM, Any]] = {}


def _model(device: str, name: str, dtype: str = "fp32", mode: str = "captured") -> CausalLM:
    """Every engine has caches of its own, for which steps are captured again."""
    key = (device, name, dtype)
    if key not in _loaded:
        for old, _ in _loaded.values():
            old.close()
        _loaded.clear()
        settings = MoeSettings(strategy="persistent", warmup="none", predict="off")
        checkpoint = open_checkpoint(_checkpoint(name))
        model = load_model(checkpoint, dtype=dtype, device=device, dispatch=settings)
        _loaded[key] = model, model.graphs
    model, graphs = _loaded[key]
    model.graphs = None if mode == "eager" else graphs
    _start_early(model, mode != "in order")
    return model


def _start_early(model: CausalLM, early: bool) -> bool:
    """Whether kernels may start before the one before them has ended; False: no such switch."""
    fused = getattr(model, "device_decoder", None)
    if fused is None:
        return False
    fused.dependent = early
    return True


def _equals_transformers(device: str, count: int, name: str, mode: str, batch: str) -> str:
    model = _model(device, name, mode=mode)
    if device == "cpu" and mode != "eager":
        raise NotHere("nothing is captured without CUDA")
    if mode == "in order" and not _start_early(model, False):
        raise NotHere("this model has no kernels that start early")
    if mode == "captured" and model.graphs is None:
        raise NotHere("steps of this model are not captured")
    waves, lane = BATCHES[batch]
    prompts = _prompts(name, count)[: COUNTS.get(batch, count)]
    got = run(model, _checkpoint(name), prompts, waves=min(waves, len(prompts)), **lane)
    if batch == "under pressure" and len(prompts) == COUNTS[batch]:
        assert got.stats["preemptions"] > 0
    want = _expected(name, prompts, got)
    wrong = [at for at, (a, b) in enumerate(zip(got.tokens, want, strict=True)) if a != b]
    assert not wrong, f"{len(wrong)} of {len(want)} answers differ, the first is number {wrong[0]}"
    return f"{len(want)} answers"


def _expected(name: str, prompts: list[list[int]], got: Outcome) -> list[list[int]]:
    if MODELS[name][0] != "dwr":
        return expected(_checkpoint(name), prompts, got)
    from tests.helpers.models.dwr_reference import load_static

    oracle, found = load_static(_checkpoint(name)), []
    for ids, tokens in zip(prompts, got.tokens, strict=True):
        with torch.no_grad():
            best = oracle(torch.tensor([[*ids, *tokens]]))[0].argmax(-1)
        found.append(best[len(ids) - 1 : -1].tolist())
    return found


def _captures(device: str, name: str) -> str:
    """Steps captured at start, when they come, or never: the same answers; and their memory."""
    if device == "cpu":
        raise NotHere("nothing is captured without CUDA")
    from coterie import LLM

    prompts: list[str | list[int]] = [*_prompts(name, 4)]
    moe = {"strategy": "persistent"} if "moe" in name else {}
    answers, told = [], []
    for mode in CAPTURES:
        with LLM(
            str(_checkpoint(name)), dtype="fp32", device=device, kv_bytes=50_000_000,
            max_sequences=4, adapters=AdapterSettings(device_bytes=0), moe=moe,
            capture_graphs=mode,
        ) as llm:  # fmt: skip
            ready = llm.graph_stats()
            done = llm.generate(prompts, max_tokens=8, temperature=0.0, ignore_eos=True)
            ended = llm.graph_stats()
        answers.append([answer.token_ids for answer in done])
        if mode == "off":
            assert ready == ended == {}
            continue
        assert (ready["graphs"] >= 3) == (mode == "start") and ended["graphs"] > 0
        assert 0 < ended["graph_bytes"] <= ended["graph_reserved_bytes"]
        told.append(f"{mode} {ended['graphs']:.0f} graphs, {ended['graph_bytes'] / 1e6:.0f} MB")
    assert answers[0] == answers[1] == answers[2], "answers differ"
    return "; ".join(told)


def _pieces(device: str, count: int, name: str) -> str:
    """Prompts beside running streams, captured between two layers' attention and launched kernel by
    kernel: the same answers in fp32; and how many in bf16."""
    told = []
    for dtype in ("fp32", "bf16"):
        model, prompts = _model(device, name, dtype), _prompts(name, count)
        pieces, found = model.piece_graphs, []
        if pieces is None:
            raise NotHere("steps of this model are not captured in pieces")
        lane = {"max_step_tokens": 48, "max_sequences": 20, "prefix_cache": False}
        try:
            for given in (pieces, None):
                model.piece_graphs = given
                found.append(run(model, _checkpoint(name), prompts, waves=2, **lane).tokens)
        finally:
            model.piece_graphs = pieces
        differ = sum(a != b for a, b in zip(*found, strict=True))
        assert any(pieces._captured.values()), "nothing was captured"
        assert dtype != "fp32" or not differ, f"{differ} of {count} answers differ"
        told.append(f"{dtype}: {differ} of {count} answers differ")
    return "; ".join(told)


def _same_bits_in_order(device: str, count: int, name: str) -> str:
    """Decode steps, with kernels that start early and without, give the same bits."""
    if device == "cpu":
        raise NotHere("needs CUDA")
    model = _model(device, name)
    if not _start_early(model, True):
        raise NotHere("this model has no kernels that start early")
    ids = _prompts(name, count)[0] + list(range(4, 60))
    found = []
    for early in (True, False):
        _start_early(model, early)
        found.append(prompt_logits(model, ids, 1))
        # an engine takes the counts of each step; left here, the next engine would get them
        (model.launched_usage() or model.take_usage)()
    _start_early(model, True)
    differ = int((found[0] != found[1]).any(1).sum())
    assert bool(found[0].isfinite().all()), "logits are not finite"
    assert not differ, f"{differ} of {len(ids)} rows differ"
    return f"{len(ids)} rows"


def _batch_dependence(device: str, count: int, name: str, dtype: str) -> str:
    """How many greedy answers differ between alone and together, and after how many tokens. In fp32
    none may; in 16 bits and less a single row and many take other kernels (docs/exactness.md)."""
    model, path, prompts = _model(device, name, dtype), _checkpoint(name), _prompts(name, count)
    lane = {"max_sequences": 1, "prefix_cache": False}
    alone = run(model, path, prompts, waves=len(prompts), **lane).tokens
    together = run(model, path, prompts, max_sequences=20, prefix_cache=False).tokens
    differ = sum(a != b for a, b in zip(alone, together, strict=True))
    assert all(len(tokens) == NEW_TOKENS for tokens in alone + together)
    assert dtype != "fp32" or not differ, f"{differ} of {count} differ"
    same = [
        sum(a == b for a, b in zip(*pair, strict=True))
        for pair in zip(alone, together, strict=True)
    ]
    share = sum(same) / (NEW_TOKENS * count)
    return f"{differ} of {count} answers differ alone and together, {share:.0%} of tokens are equal"


def _sampled_alone_and_together(device: str, count: int, name: str) -> str:
    """In fp32 a seed gives the same tokens alone and in a batch."""
    model, path, prompts = _model(device, name), _checkpoint(name), _prompts(name, count)
    found = []
    for waves, lane in (BATCHES["alone"], BATCHES["20"]):
        most = min(waves, len(prompts))
        got = run(model, path, prompts, waves=most, temperature=TEMPERATURE, **lane)
        found.append(got.tokens)
    alone, together = found
    differ = sum(a != b for a, b in zip(alone, together, strict=True))
    # a draw can fall on the edge between two tokens, where a rounding decides
    assert differ <= count // 10, f"{differ} of {count} differ"
    return f"{differ} of {count} answers differ"
