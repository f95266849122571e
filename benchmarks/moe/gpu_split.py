"""Whether link and CPU together are faster than the better of the two alone.

    python3 -m benchmarks.moe.gpu_split [--models int4-resident-25,bf16-resident-25] [--json FILE]

Qwen3-30B-A3B's shape with random weights, one stream. One model decodes in turns: with the split
that the runtime chooses, with all missing experts read over the link, and with all of them computed
by the CPU. What is read ahead stays as it is: where no expert has a slot, guessed experts cross the
link before they are asked for, also in the turns of the CPU alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.gpu_runs import SAMPLED, Streams, free_memory, make_engine, tokenizer_of
from benchmarks.moe.gpu_beyond import BeyondModel
from benchmarks.random_models import SHAPES, make_model, make_prompts, weight_bytes
from coterie.moe.runtime.cpu_share import CpuShare, ShareRates
from coterie.moe.runtime.runtime import ExpertRuntime

SHAPE = "Qwen3-30B-A3B"
MODELS = "int4-resident-0,int4-resident-25,int4-resident-50,bf16-resident-25"
# a rate with which one of the two gets everything
ALL = 1e15
ALONE = {"link": ShareRates(ALL, 1.0), "CPU": ShareRates(1.0, ALL)}
WAYS = ("split", *ALONE)
# steps of a turn that do not count, and those that do; turns of each way
SETTLE, COUNTED, TURNS = 16, 48, 5


def hold(share: CpuShare, way: str) -> None:
    """From the next step on the misses are divided like this."""
    if way in ALONE:
        share.rates = ALONE[way]
        share.follow = lambda: None  # type: ignore[method-assign]
    else:
        share.rates = share.measured
        vars(share).pop("follow", None)
    share._send()


def measure(name: str) -> dict[str, Any]:
    """Milliseconds of a step in each turn, by way."""
    beyond, config = BeyondModel.parse(name), SHAPES[SHAPE]
    assert beyond is not None, name
    model = make_model(
        config, "cuda", dtype="bf16", experts=beyond.kind,
        dispatch=beyond.settings("adaptive", weight_bytes(config)),
    )  # fmt: skip
    try:
        runtime = cast(ExpertRuntime, model.experts)
        runtime.wait_loaded()
        pool = runtime.device_pool()
        share = pool.share if pool is not None else None
        assert share is not None, "the CPU gets nothing on this machine"
        turns: dict[str, list[float]] = {way: [] for way in WAYS}
        length = (SETTLE + COUNTED) * len(WAYS)
        engine = make_engine(model, tokenizer_of(model.spec.vocab), 1, 256 + length)
        # slots settle before anything counts
        for turn in range(-1, TURNS):
            streams = Streams(engine)
            prompt = make_prompts(model.spec.vocab, [128], seed=turn + 7)[0]
            streams.send(prompt, length + 32, SAMPLED)
            while len(streams.all[0].tokens) < 16:
                streams.step()
            for way in WAYS if turn % 2 else WAYS[::-1]:
                hold(share, way)
                _steps(streams, SETTLE)
                seconds = _steps(streams, COUNTED)
                if turn >= 0:
                    turns[way].append(1e3 * seconds / COUNTED)
            hold(share, "split")
            streams.drain()
        return {"model": name, "ms": turns, "cpu_part": share.part}
    finally:
        model.close()
        free_memory()


def _steps(streams: Streams, count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        streams.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=MODELS, help="KIND-resident-PERCENT, by comma")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_split needs a GPU: on a CPU nothing crosses a link", file=sys.stderr)
        return 2
    rows, slower = [], False
    print("model              split ms   link ms    CPU ms   split / better   by turn")
    for name in options.models.split(","):
        row = measure(name)
        split, link, cpu = (statistics.median(row["ms"][way]) for way in WAYS)
        each = zip(*(row["ms"][way] for way in WAYS), strict=True)
        by_turn = [own / min(others) for own, *others in each]
        row |= {"of_better": split / min(link, cpu), "of_better_by_turn": by_turn}
        slower |= statistics.median(by_turn) > 1
        rows.append(row)
        told = " ".join(f"{ratio:.2f}" for ratio in by_turn)
        figures = f"{split:8.2f}  {link:8.2f}  {cpu:8.2f}   {row['of_better']:14.2f}"
        print(f"{name:18} {figures}   {told}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
