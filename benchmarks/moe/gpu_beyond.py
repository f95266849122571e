"""Cases of `benchmarks.moe.gpu` in which not all experts are on the device: KIND-resident-SHARE-*.

All experts are in pinned RAM, SHARE percent of them in slots, or as many as fit a device of 16GB
beside weights, KV and what a step needs. Draws are seeded. Routing is uniform,
which is the worst case for a cache, or skewed (`--routing zipf`). The limit is the bytes that have
to cross the link at this share of hits, over the bandwidth of pinned copies in the same run; in
decode over what copies and plain reads of the CPU reach at the same time: both read the same RAM.
Before every round of a case both are measured, because other tenants of a machine change them from
one minute to the next. The limit is that of the best of these; `share_by_round` is the middle one
of the rounds' shares of the limit just before each.
`limit_apart` is the limit if each had RAM for itself, with the rate of the CPU's own kernels.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, cast

import torch

from benchmarks.gpu_runs import (
    SAMPLED,
    Case,
    Sizes,
    decode_case,
    prefill_case,
    read_bandwidth,
    timed,
    tokenizer_of,
)
from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM
from coterie.moe.runtime.runtime import ExpertRuntime

SHARES = ("0", "5", "10", "25", "50")
# a device of this size, for which transformers with accelerate was measured
SMALL, SMALL_BYTES = "16GB", 16 * 10**9
# of a step of 8,192 rows, beside weights, KV and experts
STEP_BYTES = 1_200_000_000
KINDS = ("bf16", "int4")
STREAMS = (1, 8)
PROMPT = 8192
# how long copies and reads run beside each other, and bytes that are copied again and again
JOINT_S, JOINT_BYTES = 0.4, 1 << 26
# of a decoding case: each takes about a second
ROUNDS = 7
# tok/s, wanted
GOALS = {
    "bf16-resident-25-decode-1": 34,
    "int4-resident-25-decode-1": 95,
    "int4-resident-50-decode-1": 130,
    "bf16-resident-25-prefill-8192": 9_000,
    "int4-resident-25-prefill-8192": 20_000,
}
# of the limit, wanted
SHARE_GOALS = {
    "int4-resident-0-decode-1": 0.80,
    f"bf16-resident-{SMALL}-decode-1": 0.85,
    f"bf16-resident-{SMALL}-prefill-8192": 0.90,
}
# tok/s of others at the same share, measured on the same machine with the same shape
RIVALS: dict[str, dict[str, float]] = {
    "resident-25-decode-1": {"FreeToken bf16": 39.8, "llama.cpp Q4_0": 38.6},
    "resident-50-decode-1": {"FreeToken bf16": 57.2, "llama.cpp Q4_0": 54.6},
    "resident-0-decode-1": {"FreeToken bf16": 16.9, "llama.cpp Q4_0": 35.3},
    "resident-25-prefill-8192": {"FreeToken bf16": 7_495.0, "llama.cpp Q4_0": 6_716.0},
    f"resident-{SMALL}-decode-1": {"accelerate bf16": 0.16},
    f"resident-{SMALL}-prefill-8192": {"accelerate bf16": 292.0},
}


@dataclass(frozen=True)
class BeyondModel:
    """What the name of such a model says: `bf16-resident-25`, or `bf16-resident-25-lru` where
    strategies are compared."""

    kind: str
    # percent, or SMALL
    share: str
    strategy: str = ""

    @staticmethod
    def parse(name: str) -> BeyondModel | None:
        kind, beside, rest = name.partition("-resident-")
        share, _, strategy = rest.partition("-")
        return BeyondModel(kind, share, strategy) if beside else None

    def settings(self, strategy: str, weight_bytes: int, predict: str = "auto") -> MoeSettings:
        """`strategy`: unless the name has one; `weight_bytes`: all but the experts."""
        strategy = self.strategy or strategy
        if self.share == SMALL:
            budget = str(SMALL_BYTES - STEP_BYTES - weight_bytes)
        else:
            budget = f"{self.share}%"
            strategy = strategy if int(self.share) else "cpu_only"
        return MoeSettings(strategy=strategy, device_budget=budget, warmup="none", predict=predict)

    def __str__(self) -> str:
        return f"{self.kind}-resident-{self.share}" + (f"-{self.strategy}" if self.strategy else "")


@cache
def link_bandwidth(device: str) -> float:
    """Bytes per second of copies from pinned RAM to the device."""
    if device == "cpu":
        return 1e10
    source = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return len(source) / timed(lambda: target.copy_(source, non_blocking=True), device)


class JointBandwidth:
    """Copies to the device and the CPU's reads at the same time, with as many threads as read
    most."""

    def __init__(self, device: str) -> None:
        self._device = device
        # bytes per second of copies and of reads, of every try
        self.tries: list[tuple[float, float]] = []
        if device == "cpu":
            return
        self._source = torch.ones(JOINT_BYTES, dtype=torch.uint8, pin_memory=True)
        self._target = torch.empty_like(self._source, device=device)
        self._memory = torch.ones(1 << 29)
        cores = len(os.sched_getaffinity(0))
        threads = [max(1, cores - fewer) for fewer in range(3)]
        self.tries += [self._both(each) for each in threads]
        self._threads = max(zip(map(sum, self.tries), threads, strict=True))[1]

    def measure(self) -> None:
        if self._device == "cpu":
            self.tries.append((1e10, 1e10))
        else:
            self.tries.append(self._both(self._threads))

    def _both(self, threads: int) -> tuple[float, float]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return self._both_now()
        finally:
            torch.set_num_threads(before)

    def _both_now(self) -> tuple[float, float]:
        read, ended = 0, threading.Event()
        self._memory.sum()

        def read_memory() -> None:
            nonlocal read
            while not ended.is_set():
                self._memory.sum()
                read += self._memory.nbytes

        torch.cuda.synchronize()
        begin, copied = time.perf_counter(), 0
        reader = threading.Thread(target=read_memory)
        reader.start()
        while time.perf_counter() - begin < JOINT_S:
            for _ in range(4):
                self._target.copy_(self._source, non_blocking=True)
                copied += JOINT_BYTES
            torch.cuda.synchronize()
        copy_s = time.perf_counter() - begin
        ended.set()
        reader.join()
        return copied / copy_s, read / (time.perf_counter() - begin)


def beyond_cases(sizes: Sizes, real: bool, strategies: Sequence[str] = ()) -> Iterator[Case]:
    """`strategies`: one stream of each, instead of all cases."""
    few = replace(sizes, prompt=min(sizes.prompt, 128), output=min(sizes.output, 64))
    few = replace(few, rounds=ROUNDS if sizes.device == "cuda" else sizes.rounds)
    streams = STREAMS if sizes.device == "cuda" else (1, 3)
    prompt = PROMPT if sizes.device == "cuda" else 64
    for kind in KINDS:
        shares = (*SHARES, SMALL) if kind == "bf16" and sizes.device == "cuda" else SHARES
        for share, strategy in product(shares if strategies else (), strategies):
            model = BeyondModel(kind, share, strategy)
            yield _case(model, "decode-1", partial(_decode, few, 1), real)
        for share in shares if not strategies else ():
            model = BeyondModel(kind, share)
            for n in streams:
                yield _case(model, f"decode-{n}", partial(_decode, few, n), real)
            yield _case(
                model, f"prefill-{prompt}", partial(_prefill, replace(few, rounds=2), prompt), real
            )


def _case(
    model: BeyondModel, what: str, run: Callable[[CausalLM], dict[str, Any]], real: bool
) -> Case:
    name, figure = f"{model}-{what}", "decode_tok_s" if what.startswith("decode") else "tok_s"
    rivals = RIVALS.get(f"resident-{model.share}-{what}", {}) if real else {}
    goals = (GOALS.get(name), SHARE_GOALS.get(name)) if real else (None, None)
    return Case(name, str(model), run, rivals, goals[0], "", figure, goals[1])


def _runtime(model: CausalLM) -> ExpertRuntime:
    return cast(ExpertRuntime, model.experts)


def _counted(run: Callable[[], dict[str, Any]], model: CausalLM) -> dict[str, Any]:
    """With hit rate, and bytes over the link for each demand that was not a hit."""
    runtime = _runtime(model)
    before = runtime.telemetry.total().as_dict()
    peak = torch.cuda.is_available()
    if peak:
        torch.cuda.reset_peak_memory_stats()
    found = run()
    after = runtime.telemetry.total().as_dict()
    counts = {name: after[name] - before[name] for name in after}
    hits, misses = counts["device_hits"], counts["device_misses"] + counts["host_runs"]
    found |= {
        "hit_rate": hits / max(1, hits + misses),
        "moved_GB": counts["moved_bytes"] / 1e9,
        "swaps": runtime.swaps,
        "note": f"{runtime.parts.strategy}, {runtime.parts.device.num_slots} slots",
    }
    if peak:
        found["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def _decode(sizes: Sizes, streams: int, model: CausalLM) -> dict[str, Any]:
    tokenizer, joint = tokenizer_of(model.spec.vocab), JointBandwidth(sizes.device)
    found = _counted(
        lambda: decode_case(model, tokenizer, sizes, streams, SAMPLED, joint.measure), model
    )
    runtime = _runtime(model)
    geometry, count = runtime.geometry, runtime.geometry.num_experts
    distinct = count * (1 - (1 - geometry.top_k / count) ** streams)
    all_bytes = len(geometry.layers) * distinct * runtime.parts.store.slot_bytes
    link, share = link_bandwidth(sizes.device), runtime.report()["cpu_share"]
    cpu = share.get("measured_cpu_rate", 0.0)
    crossing = all_bytes * (1 - found["hit_rate"])
    device_s = (model.weight_bytes + all_bytes) / read_bandwidth(sizes.device)

    def limit(rate: float) -> float:
        return streams / max(crossing / rate, device_s)

    rounds = found["rounds"]
    before = [sum(each) if cpu else link for each in joint.tries[-len(rounds) :]]
    copies, reads = max(joint.tries, key=sum) if cpu else (link, 0.0)
    return found | {
        "link_GB_s": link / 1e9,
        "crossing_GB": crossing / 1e9,
        "cpu_GB_s": cpu / 1e9,
        "joint_link_GB_s": copies / 1e9,
        "joint_cpu_GB_s": reads / 1e9,
        "cpu_part": share.get("part", 0.0),
        "cpu_job_us": 1e6 * share.get("busy_s", 0.0) / max(1, share.get("jobs", 0)),
        "cpu_wait_us": 1e6 * share.get("wait_s", 0.0) / max(1, share.get("jobs", 0)),
        "cpu_repeats": share.get("repeated", 0),
        "limit": limit(copies + reads),
        "limits": [limit(rate) for rate in before],
        "share": found["decode_tok_s"] / limit(copies + reads),
        "share_by_round": statistics.median(
            one / limit(rate) for one, rate in zip(rounds, before, strict=True)
        ),
        "limit_apart": limit(link + cpu),
    }


def _prefill(sizes: Sizes, prompt: int, model: CausalLM) -> dict[str, Any]:
    tokenizer = tokenizer_of(model.spec.vocab)
    found = _counted(lambda: prefill_case(model, tokenizer, sizes, prompt), model)
    link = link_bandwidth(sizes.device)
    parts = _runtime(model).parts
    missing = parts.store.geometry.total - parts.device.num_slots
    crossing = missing * parts.store.slot_bytes
    limit = prompt * link / max(1.0, crossing)
    return found | {
        "link_GB_s": link / 1e9,
        "crossing_GB": crossing / 1e9,
        "limit": limit,
        "share": found["tok_s"] / limit,
    }
