"""Whether the experts that a prompt used are in slots when its answer begins: hits of the first
tokens behind a long prompt, beside those of later ones.

    python3 -m benchmarks.moe.gpu_warm [--strategies adaptive,lru] [--share 25] [--json FILE]
    python3 -m benchmarks.moe.gpu_warm --smoke       # tiny, on the CPU

Qwen3-30B-A3B's shape with random weights, int4 experts, gates that prefer some of them about as
Zipf's law. Nothing has run before the first prompt: slots have what a strategy puts there without
counts. The second prompt finds what the first one and its answer left.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from benchmarks.gpu_runs import SAMPLED, Streams, free_memory, make_engine, tokenizer_of
from benchmarks.random_models import SHAPES, make_model, make_prompts, tiny
from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM
from coterie.moe.runtime.runtime import ExpertRuntime

SHAPE = "Qwen3-30B-A3B"
# tokens of the answer at which counts are taken
MARKS = (1, 16, 32, 64, 128, 256, 320)


def measure(strategy: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    config, device = SHAPES[SHAPE], "cpu" if options.smoke else "cuda"
    settings = MoeSettings(strategy=strategy, device_budget=f"{options.share}%", warmup="none")
    model = make_model(
        tiny(config) if options.smoke else config, device,
        experts="bf16" if options.smoke else "int4", dispatch=settings, skewed=True,
    )  # fmt: skip
    try:
        cast(ExpertRuntime, model.experts).wait_loaded()
        engine = make_engine(model, tokenizer_of(model.spec.vocab), 1, options.prompt + MARKS[-1])
        prompts = make_prompts(model.spec.vocab, [options.prompt] * 2, seed=11)
        rows: list[dict[str, Any]] = []
        for number, prompt in enumerate(prompts):
            streams = Streams(engine)
            streams.send(prompt, MARKS[-1], SAMPLED)
            rows += [
                {"strategy": strategy, "prompt": number + 1, **row}
                for row in _marks(model, streams)
            ]
        return rows
    finally:
        model.close()
        free_memory()


def _marks(model: CausalLM, streams: Streams) -> list[dict[str, Any]]:
    telemetry, stream = cast(ExpertRuntime, model.experts).telemetry, streams.all[0]
    seen: list[tuple[int, float, float, float]] = []
    for mark in MARKS:
        while len(stream.tokens) < mark and streams.engine.has_work():
            streams.step()
        total = telemetry.total()
        hits = total.device_hits + total.prefetch_hits
        missed = total.device_misses + total.host_runs
        seen.append((len(stream.tokens), time.perf_counter(), hits, missed))
    streams.drain()
    return [
        {
            "tokens": f"{first + 1} to {last}",
            "hit_rate": (hits - before) / max(1, hits - before + missed - early),
            "tok_s": (last - first) / (end - begin),
        }
        for (first, begin, before, early), (last, end, hits, missed) in pairwise(seen)
        if last > first
    ]


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", default="adaptive,hot_cached_static,lru", help="by comma")
    parser.add_argument("--share", type=int, default=25, help="percent of the experts in slots")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    if options.smoke:
        options.prompt = min(options.prompt, 48)
    rows: list[dict[str, Any]] = []
    print("strategy          prompt  tokens      hits    tok/s")
    for strategy in options.strategies.split(","):
        for row in measure(strategy, options):
            rows.append(row)
            head = f"{row['strategy']:17} {row['prompt']:6}  {row['tokens']:10}"
            print(f"{head} {row['hit_rate']:6.1%} {row['tok_s']:7.1f}", flush=True)
    if options.json is not None:
        facts = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(json.dumps({"options": facts, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
