"""CUDA refuses memory: less is taken, it is told, and answers stay the same.

load: all experts are wanted on a device that has room for two thirds of them. step: the memory goes
while it serves, and a long prompt comes. torch's allocator is what refuses, with the error that it
raises when a device is full: other checks use the device meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from benchmarks.random_models import SHAPES
from coterie.core.moe import MoeSettings
from coterie.moe.runtime.runtime import ExpertRuntime
from tests.cuda.bank import LARGE
from tests.cuda.suite import Check, NotHere

CONFIG: dict[str, Any] = SHAPES["Qwen3-30B-A3B"] | LARGE
PROMPT, OUTPUT = 8192, 8
# what torch and Triton take beside weights and slots; less than what a step of PROMPT rows needs
SPARE, LITTLE = 256 << 20, 160 << 20


def checks(device: str) -> Iterator[Check]:
    for name, run in (("load", _load), ("step", _step)):
        yield Check("shortage", f"shortage/{name}", partial(run, device))


@contextmanager
def _no_more_than(nbytes: int) -> Iterator[None]:
    """This process may have so many bytes of the device more than it has."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _answers(engine: Any, lengths: list[int]) -> list[list[int]]:
    from benchmarks.gpu_runs import GREEDY, drive
    from benchmarks.random_models import make_prompts

    vocab = CONFIG["vocab_size"]
    return [
        one.tokens for one in drive(engine, make_prompts(vocab, lengths, 7), OUTPUT, GREEDY).streams
    ]


def _load(device: str) -> str:
    from benchmarks.gpu_runs import make_engine, tokenizer_of
    from benchmarks.random_models import make_model

    if device != "cuda":
        raise NotHere("needs CUDA")
    total = LARGE["num_hidden_layers"] * LARGE["num_experts"]
    settings = MoeSettings(
        strategy="persistent", cache_capacity=total, warmup="none", predict="off"
    )

    def run() -> tuple[list[list[int]], dict[str, Any], int]:
        model = make_model(CONFIG, "cuda", dtype="fp32", experts="fp32", dispatch=settings)
        try:
            runtime = cast(ExpertRuntime, model.experts)
            engine = make_engine(model, tokenizer_of(model.spec.vocab), 3, 256)
            found = _answers(engine, [9, 40, 64])
            needed = model.weight_bytes + runtime.parts.store.expert_bytes * 2 // 3
            return found, runtime.report(), needed
        finally:
            model.close()

    want, _, needed = run()
    gc.collect()
    with _no_more_than(needed + SPARE):
        got, report, _ = run()
    assert report["shortages"] >= 1, "nothing was refused"
    assert report["asked"] == "persistent" and report["strategy"].startswith("layer_grouped:2")
    assert got == want, "answers differ"
    return f"{report['strategy']} behind {report['shortages']} refusals; {len(want)} answers"


def _step(device: str) -> str:
    from benchmarks.gpu_runs import make_engine, tokenizer_of
    from benchmarks.random_models import make_model

    if device != "cuda":
        raise NotHere("needs CUDA")
    quarter = LARGE["num_hidden_layers"] * LARGE["num_experts"] // 4
    settings = MoeSettings(
        strategy="adaptive", cache_capacity=quarter, warmup="none", predict="off"
    )
    model = make_model(CONFIG, "cuda", dtype="fp32", experts="fp32", dispatch=settings)
    try:
        engine = make_engine(model, tokenizer_of(model.spec.vocab), 3, PROMPT + 64, PROMPT)
        want = _answers(engine, [PROMPT, 40, 64])
        short = make_engine(model, tokenizer_of(model.spec.vocab), 3, PROMPT + 64, PROMPT)
        _answers(short, [40, 64])
        with _no_more_than(LITTLE):
            got = _answers(short, [PROMPT, 40, 64])
        smaller = int(short.stats()["smaller_steps"])
    finally:
        model.close()
    assert smaller >= 1, "nothing was refused"
    assert got == want, "answers differ"
    return f"{smaller} steps became smaller; {len(want)} answers"
