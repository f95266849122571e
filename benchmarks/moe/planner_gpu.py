"""The planner against runs on one CUDA device: `benchmarks.moe.planner_check --gpu`.

Qwen3-30B-A3B's shape with random weights, 12 configurations: experts in bf16 and int4, some of them
on the device or all, decoding one stream and prompts of 8,192 tokens. A slice of 6 layers is
measured, as `coterie plan` does it; what is predicted and run has 12, with all experts on the
device 24 (fewer would be bound by the host). Predictions are on disk before the first run. Runs go
through the engine, as those of `benchmarks.moe.gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.gpu_runs import (
    SAMPLED,
    Sizes,
    decode_case,
    free_memory,
    prefill_case,
    read_bandwidth,
    tokenizer_of,
)
from benchmarks.moe.gpu_beyond import BeyondModel
from benchmarks.random_models import SHAPES, make_model, tiny
from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM
from coterie.models.plan_device import MOST_LAYERS, PROMPTS, measure_device_path
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.device_path import DevicePath
from coterie.moe.planner.machine import Machine, MachineIdentity, RecordProfile, TransferCost
from coterie.moe.planner.plan import MemoryDivision, PlanCase, PlannedModel, PlanRow, forecast_row
from coterie.moe.planner.workload import Workload, workload_from_heatmap
from coterie.moe.runtime.budget import ExpertSizes, TierNeeds
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.runtime import ExpertRuntime
from coterie.moe.store.base import ExpertGeometry

SHAPE = "Qwen3-30B-A3B"
KINDS = ("bf16", "int4")
# percent of the experts on the device
DECODES, PREFILLS = ("10", "25", "60", "100"), ("25", "100")
LAYERS = 12
ALLOWED = 0.2


@dataclass(frozen=True)
class GpuConfig:
    """`what`: decode or prefill."""

    kind: str
    share: str
    what: str

    @property
    def is_whole(self) -> bool:
        return self.share == "100"

    def __str__(self) -> str:
        return f"{self.kind}-{self.share}-{self.what}"

    def settings(self) -> MoeSettings:
        if self.is_whole:
            return MoeSettings("persistent", device_budget="100%", warmup="none", predict="off")
        return BeyondModel(self.kind, self.share).settings("adaptive", 0)


@dataclass(frozen=True)
class GpuBench:
    """What all runs have in common."""

    device: str
    layers: int
    sizes: Sizes
    # tokens of the prompt that is measured
    prompt: int

    @staticmethod
    def of(smoke: bool, layers: int) -> GpuBench:
        if smoke:
            return GpuBench("cpu", 2, Sizes("cpu", 16, 8, 1, 1, 64), 64)
        return GpuBench("cuda", layers, Sizes("cuda", 128, 64, 2), 8192)

    def config(self, layers: int) -> dict[str, Any]:
        shape = SHAPES[SHAPE]
        found = tiny(shape) if self.device == "cpu" else dict(shape)
        return {**found, "num_hidden_layers": layers}

    def layers_of(self, config: GpuConfig) -> int:
        return self.layers * 2 if config.is_whole else self.layers

    def open(self, kind: str, layers: int, settings: MoeSettings) -> CausalLM:
        return make_model(
            self.config(layers), self.device, dtype="bf16", experts=kind, dispatch=settings
        )


def configs() -> list[GpuConfig]:
    return [
        GpuConfig(kind, share, what)
        for kind in KINDS
        for share in DECODES
        for what in ("decode", *(["prefill"] if share in PREFILLS else []))
    ]


# -- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredKind:
    path: DevicePath
    # [layers that were measured, experts]: how often gates chose each
    counts: Any
    backbone_bytes: int


def measure_kind(bench: GpuBench, kind: str) -> MeasuredKind:
    """A slice, as `coterie plan` measures it; and what its gates chose."""
    layers = MOST_LAYERS if bench.device == "cuda" else bench.layers
    seen: list[Heatmap] = []
    weights: list[int] = []

    def opened(settings: MoeSettings) -> CausalLM:
        model = bench.open(kind, layers, settings)
        if not seen:
            runtime = cast(ExpertRuntime, model.experts)
            seen.append(Heatmap(runtime.geometry))
            runtime.heatmap = seen[0]
            weights.append(model.weight_bytes - model._embed.nbytes)
        return model

    prompts = PROMPTS if bench.device == "cuda" else (16, 64)
    path = measure_device_path(opened, read_bandwidth(bench.device), prompts)
    return MeasuredKind(path, seen[0].counts, weights[0])


def workload(bench: GpuBench, config: GpuConfig, counts: Any) -> Workload:
    """Drawn from what the gates of the measured layers chose. Strategies know nothing at start."""
    count, experts = bench.layers_of(config), counts.shape[1]
    top_k = bench.config(count)["num_experts_per_tok"]
    geometry = ExpertGeometry(tuple(range(count)), experts, top_k)
    tiled = np.tile(counts, (-(-count // len(counts)), 1))[:count]
    tokens = bench.prompt if config.what == "prefill" else bench.sizes.prompt
    load = workload_from_heatmap(Heatmap(geometry, tiled), "choices of a slice", tokens)
    return replace(load, heatmap=Heatmap(geometry))


def machine_of(bench: GpuBench, kind: str, path: DevicePath) -> Machine:
    """Only the device's path is used: no configuration walks layer by layer."""
    rate = read_bandwidth(bench.device)
    each = path.record_bytes / path.copy_bytes_s
    run = CostCurve((1,), (path.record_bytes / rate,))
    move = TransferCost(each, each)
    profile = RecordProfile(path.record_bytes, move, move, run, run)
    identity = MachineIdentity("cpu", os.cpu_count() or 1, bench.device + " device", "", "")
    return Machine(
        identity, time.time(), rate, rate, 0.0, profiles={kind: profile}, device_paths={kind: path}
    )


def predict(bench: GpuBench, config: GpuConfig, known: MeasuredKind) -> PlanRow:
    load = workload(bench, config, known.counts)
    geometry, size = load.geometry, known.path.record_bytes
    sizes = ExpertSizes(geometry.total, size, size * geometry.total)
    # of the layers that are run, and of the head
    head = int(known.path.rest_s * read_bandwidth(bench.device))
    measured = len(known.counts)
    layers = (known.backbone_bytes - head) * len(geometry.layers) // measured
    model = PlannedModel(geometry, sizes, max(0, layers) + head, kind=config.kind)
    case = PlanCase(model, machine_of(bench, config.kind, known.path), config.kind, load)
    room = 4 * sizes.total * size
    needs = TierNeeds(True, True, room, room, one_memory=False)
    row = forecast_row(case, MemoryDivision(config.settings(), needs), config.settings().strategy)
    assert row is not None
    return row


def figures(config: GpuConfig, row: PlanRow) -> dict[str, float]:
    if config.what == "decode":
        return {
            "predicted": row.decode_tokens_s,
            "limit": row.decode_limit_tokens_s,
            "predicted_hits": row.decode_hit_rate,
        }
    return {
        "predicted": row.prefill_tokens_s,
        "limit": row.prefill_limit_tokens_s,
        "predicted_hits": row.prefill_hit_rate,
    }


# -- runs -----------------------------------------------------------------------------------------


def run_model(bench: GpuBench, wanted: list[GpuConfig]) -> dict[GpuConfig, dict[str, float]]:
    """The configurations of one model."""
    first = wanted[0]
    model = bench.open(first.kind, bench.layers_of(first), first.settings())
    try:
        return {config: run_config(bench, config, model) for config in wanted}
    finally:
        model.close()
        del model
        free_memory()


def run_config(bench: GpuBench, config: GpuConfig, model: CausalLM) -> dict[str, float]:
    tokenizer = tokenizer_of(model.spec.vocab)
    runtime = cast(ExpertRuntime, model.experts)
    before = runtime.telemetry.total().as_dict()
    if config.what == "decode":
        rate = decode_case(model, tokenizer, bench.sizes, 1, SAMPLED)["decode_tok_s"]
    else:
        rate = prefill_case(model, tokenizer, bench.sizes, bench.prompt)["tok_s"]
    after = runtime.telemetry.total().as_dict()
    counts = {name: after[name] - before[name] for name in after}
    missed = counts["device_misses"] + counts["host_runs"]
    hits = counts["device_hits"] / max(1.0, counts["device_hits"] + missed)
    return {"measured": rate, "measured_hits": hits}


def check(options: argparse.Namespace, note: Callable[[str], None]) -> int:
    bench, began = GpuBench.of(options.smoke, options.layers), time.perf_counter()
    known = {}
    for kind in KINDS:
        known[kind] = measure_kind(bench, kind)
        free_memory()
        note(f"{kind} measured, {time.perf_counter() - began:.0f} s")
    rows: dict[GpuConfig, dict[str, Any]] = {
        config: figures(config, predict(bench, config, known[config.kind])) for config in configs()
    }
    saved = {
        "saved_at": time.time(),
        "layers": {str(config): bench.layers_of(config) for config in rows},
        "device_paths": {kind: asdict(each.path) for kind, each in known.items()},
        "predicted": {str(config): row for config, row in rows.items()},
    }
    save_first(options.save, saved)
    note(f"predictions of {len(rows)} configurations saved in {options.save}; now the runs")
    for config, row in rows.items():
        print(f"{config!s:20} predicted {row['predicted']:10,.1f} of {row['limit']:10,.1f}")
    for kind in KINDS:
        for share in DECODES:
            wanted = [each for each in rows if (each.kind, each.share) == (kind, share)]
            for config, found in run_model(bench, wanted).items():
                rows[config] |= found
                rows[config]["ratio"] = rows[config]["predicted"] / found["measured"]
                print(_line(config, rows[config]), flush=True)
    if options.json:
        compared = {str(config): row for config, row in rows.items()}
        options.json.write_text(json.dumps({**saved, "compared": compared}, indent=1))
    return conclude(rows, options.smoke, time.perf_counter() - began)


def save_first(path: Path, saved: dict[str, Any]) -> None:
    with path.open("w") as file:
        file.write(json.dumps(saved, indent=1))
        file.flush()
        os.fsync(file.fileno())


def _line(config: GpuConfig, row: dict[str, Any]) -> str:
    return (
        f"{config!s:20}{row['predicted']:12,.1f} / {row['measured']:12,.1f}{row['ratio']:7.2f}   "
        f"limit {row['limit']:12,.1f}   hits {100 * row['predicted_hits']:3.0f} / "
        f"{100 * row['measured_hits']:3.0f}%"
    )


def conclude(rows: dict[GpuConfig, dict[str, Any]], smoke: bool, seconds: float) -> int:
    far = [str(config) for config, row in rows.items() if abs(row["ratio"] - 1) > ALLOWED]
    print(f"\n{len(rows) - len(far)} of {len(rows)} within {ALLOWED:.0%}, {seconds:.0f} s")
    if smoke:
        print("a tiny model on the CPU: this shows that the program runs, and nothing else: ok")
        return 0
    print("FAILED: " + ", ".join(far) if far else "ok")
    return int(bool(far))
