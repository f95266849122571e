"""What a slow request waited for, with a quarter of the experts on the device: at least 95% of its
time is explained, by tier.

bank: the rest is in RAM and read over the link. share: the CPU computes a part of it. prompt: a
long prompt, for which experts are copied ahead. disk: the rest is on disk. For bank and share what
is told of the device is compared with the same model whose experts are all there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.random_models import SHAPES
from coterie.core.events import SPENT_FIELDS, Event, Failed, Finished, Timings
from coterie.core.moe import MoeSettings
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits
from coterie.models.base import CausalLM
from coterie.moe.runtime.runtime import ExpertRuntime
from tests.cuda.bank import LARGE
from tests.cuda.share import native_library
from tests.cuda.suite import Check, NotHere

LEAST = 0.95
# of a request's time: how far the device's part may be from that with all experts on it
APART = 0.25
STREAMS, OUTPUT = 4, 48
CONFIG = SHAPES["Qwen3-30B-A3B"] | LARGE
# length of prompts, whether the CPU takes a part, whether the rest is on disk
CASES: dict[str, tuple[int, bool, bool]] = {
    "bank": (20, False, False),
    "share": (20, True, False),
    "prompt": (2048, False, False),
    "disk": (20, False, True),
}


def checks(device: str) -> Iterator[Check]:
    for name, case in CASES.items():
        yield Check(f"slow {name}", f"slow/{name}", partial(_explained, device, name, *case))


def _explained(device: str, name: str, prompt: int, share: bool, disk: bool) -> str:
    if device != "cuda" and not disk:
        raise NotHere("needs CUDA")
    if share:
        native_library(device)
    with tempfile.TemporaryDirectory(prefix="coterie-slow-") as folder:
        model = _model(device, Path(folder) if disk else None)
        try:
            told = _ended(model, prompt if device == "cuda" else min(prompt, 20))
            runtime = cast(ExpertRuntime, model.experts)
            assert (runtime.parts.bank is None) == disk
            jobs = runtime.report()["cpu_share"].get("jobs", 0)
        finally:
            model.close()
    assert not share or jobs > 0, "the CPU got nothing"
    worst = min(timings.explained for timings in told)
    parts = dict.fromkeys(SPENT_FIELDS, 0.0)
    for timings in told:
        for field in SPENT_FIELDS:
            parts[field] += getattr(timings.spent, field)
    total = sum(timings.total_s for timings in told)
    seen = ", ".join(f"{field.removesuffix('_s')} {s / total:.0%}" for field, s in parts.items())
    assert worst >= LEAST, f"only {worst:.1%} explained: {seen}"
    slow = parts["disk_s" if disk else "link_s"]
    assert slow > 0, f"the slow tier is not told: {seen}"
    mean = 1e3 * total / len(told) / OUTPUT
    facts = f"{len(told)} requests, at least {worst:.1%} explained, {mean:.1f} ms a token: {seen}"
    if prompt > 20 or disk:
        return facts
    return f"{facts}; {_beside_resident(told[STREAMS])}"


def _beside_resident(slow: Timings) -> str:
    """The one that ran alone, beside the same request where no expert is missing."""
    from benchmarks.random_models import make_model

    model = make_model(CONFIG, "cuda", dtype="bf16", experts="bf16")
    try:
        fast = _ended(model, 20)[STREAMS]
    finally:
        model.close()
    assert slow.spent is not None and fast.spent is not None
    told, own = slow.spent.device_s, fast.spent.device_s
    facts = f"alone {1e3 * slow.total_s:.1f} ms, device {1e3 * told:.1f}, resident {1e3 * own:.1f}"
    assert abs(told - own) <= APART * slow.total_s, facts
    return facts


def _model(device: str, folder: Path | None) -> CausalLM:
    from benchmarks.random_models import make_model

    config = CONFIG
    quarter = LARGE["num_hidden_layers"] * LARGE["num_experts"] // 4
    settings = MoeSettings(
        strategy="adaptive", cache_capacity=quarter, warmup="none", predict="off",
        host_budget="" if folder is None else "25%",
    )  # fmt: skip
    if folder is None:
        return make_model(config, device, dtype="bf16", experts="bf16", dispatch=settings)
    from benchmarks.moe.gpu_disk import open_model, write_store
    from coterie.moe.store.base import ExpertGeometry

    layers = tuple(range(config["num_hidden_layers"]))
    geometry = ExpertGeometry(layers, config["num_experts"], config["num_experts_per_tok"])
    sizes = config["hidden_size"], config["moe_intermediate_size"]
    write_store(folder, geometry, *sizes, "bf16")
    return open_model(config, folder, device, settings, 2.0)[0]


def _ended(model: CausalLM, prompt: int) -> list[Timings]:
    """Of requests that run together, one that runs alone, and one beside another's prompt."""
    from benchmarks.gpu_runs import make_engine, tokenizer_of
    from benchmarks.random_models import make_prompts

    vocab = model.spec.vocab
    engine = make_engine(model, tokenizer_of(vocab), STREAMS, prompt + OUTPUT)
    engine.capture(lambda done, total: None)
    prompts = make_prompts(vocab, [prompt] * STREAMS, seed=5)
    # compiles what is not captured
    for number in (STREAMS, 1, 2):
        _run(engine, prompts[:number], f"first-{number}")
    together = _run(engine, prompts, "together")
    alone = _run(engine, prompts[:1], "alone")
    beside = _run(engine, prompts[:2], "beside", apart=4)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return [*together, *alone, *beside]


def _run(engine: Any, prompts: list[list[int]], name: str, apart: int = 0) -> list[Timings]:
    """`apart`: so many steps between two requests."""
    events: list[Event] = []
    limits = Limits(max_tokens=OUTPUT, ignore_eos=True)
    from benchmarks.gpu_runs import GREEDY

    for number, prompt in enumerate(prompts):
        request = Assignment(
            f"{name}-{number}", "m", tuple(prompt), GREEDY, limits, (), "", "", None,
            time.monotonic(),
        )  # fmt: skip
        assert isinstance(engine.add(request), Admitted)
        for _ in range(apart):
            events += engine.step()
    while engine.has_work():
        events += engine.step()
    failed = [event for event in events if isinstance(event, Failed)]
    assert not failed, failed[:1]
    ends = [event.timings for event in events if isinstance(event, Finished)]
    assert len(ends) == len(prompts)
    return ends
