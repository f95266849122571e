"""Traces and live runs of a carved model: expert runtimes are exchanged, the backbone stays loaded.

dispatch_sweep.py runs it; sweep_tables.py makes the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe.sweep_tables import Case, Result
from coterie.core.moe import MoeSettings, MoeUsage
from coterie.models.base import CausalLM, load_model
from coterie.models.build.moe import MoeRequirements
from coterie.models.carve.calibrate import calibration, held_out
from coterie.models.plan_inputs import NoExperts, SingleSequenceRun
from coterie.models.text.tokenizer import load_tokenizer
from coterie.moe.dispatch.base import ExpertCosts
from coterie.moe.planner.auto import known_costs
from coterie.moe.planner.measure import ComputeTarget, ensure_measured
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertNames, ExpertStore
from coterie.moe.store.checkpoint import open_store
from coterie.weights.checkpoint import open_checkpoint

# tokens before a live run is timed: slots fill, threads start
WARM = 8


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Swap:
    """A proxy for a model's experts: passes every call to the current runtime."""

    def __init__(self, wanted: MoeRequirements) -> None:
        self.wanted = wanted
        self.current: ExpertRuntime | NoExperts = NoExperts(wanted.geometry())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)

    def store(self) -> ExpertStore:
        """A new store: a runtime closes its store."""
        wanted = self.wanted
        return open_store(
            wanted.checkpoint,
            wanted.geometry(),
            ExpertNames(wanted.moe.parts),
            wanted.dtype,
            hidden=wanted.hidden,
            intermediate=wanted.moe.intermediate,
            gated=wanted.moe.gated,
        )


@dataclass(frozen=True, slots=True)
class Live:
    """The values that all live runs share."""

    heatmap: Heatmap
    costs: ExpertCosts | None
    host: str
    texts: Sequence[Sequence[int]]
    decode: int


class Bench:
    """One loaded backbone with exchangeable expert runtimes."""

    def __init__(self, model: Path, dtype: str, prompt: int) -> None:
        self.prompt = prompt
        self.swap: Swap | None = None
        self.model = self._load(model, dtype)
        tokenizer = load_tokenizer(model)
        self.texts = [row.tolist() for rows in held_out(tokenizer).values() for row in rows]
        self.known = calibration(tokenizer, None, 8).tolist()

    def _load(self, path: Path, dtype: str) -> CausalLM:
        def place(wanted: MoeRequirements) -> Any:
            self.swap = Swap(wanted)
            return self.swap

        return load_model(open_checkpoint(path), dtype=dtype, experts=place)

    def open(
        self,
        settings: MoeSettings,
        heatmap: Heatmap | None = None,
        costs: ExpertCosts | None = None,
    ) -> ExpertRuntime:
        assert self.swap is not None
        runtime = open_experts(self.swap.store(), settings, heatmap=heatmap, costs=costs)
        self.swap.current = runtime
        return runtime

    def costs(self) -> ExpertCosts | None:
        """Measured once per machine, as `coterie plan` does."""
        assert self.swap is not None
        store = self.swap.store()
        try:
            ensure_measured(store, ComputeTarget("cpu", torch.get_num_threads()), say=say)
            return known_costs(store, "cpu")
        finally:
            store.close()

    def read(self, ids: Sequence[int], decode: int) -> tuple[float, MoeUsage]:
        """Decode seconds and decode usage of one text: a prompt, then its continuation."""
        solo = SingleSequenceRun(self.model, len(ids))
        solo.step(ids[: self.prompt], "prefill")
        self._between()
        seconds, total = 0.0, MoeUsage()
        for token in ids[self.prompt : self.prompt + decode]:
            seconds += solo.step([token], "decode")
            total += self._between()
        return seconds, total

    def _between(self) -> MoeUsage:
        taken = self.model.take_usage()
        assert taken is not None and self.swap is not None
        self.swap.update()
        return taken[0]

    def trace(self, texts: Iterable[Sequence[int]], decode: int, kept: Path | None) -> Trace:
        """The experts that the routers chose, and those that the layer before would have
        predicted."""
        assert self.swap is not None
        store = self.swap.store()
        geometry, fingerprint = store.geometry, store.fingerprint
        store.close()
        if kept is not None and kept.exists():
            return Trace.load(kept, geometry, fingerprint=fingerprint)
        say("recording a trace")
        runtime = self.open(MoeSettings(strategy="cpu_only", predict="off"))
        trace = runtime.trace = Trace(geometry)
        try:
            for ids in texts:
                self.read(ids, decode)
        finally:
            runtime.close()
        if kept is not None:
            trace.save(kept, fingerprint=fingerprint)
        return trace

    def measure(self, case: Case, live: Live) -> Result:
        settings = MoeSettings(
            strategy=case.strategy,
            cache_capacity=case.slots,
            host_budget=live.host,
            predict=case.predict,
            warmup="none",
        )
        runtime = self.open(settings, live.heatmap, live.costs)
        try:
            self.read(self.known[-1], WARM)
            seconds, usage = 0.0, MoeUsage()
            for ids in live.texts:
                spent, used = self.read(ids, live.decode)
                seconds, usage = seconds + spent, usage + used
        finally:
            runtime.close()
        asked = max(1, usage.demands)
        return Result(
            usage.device_hits / asked,
            usage.prefetch_hits / asked,
            usage.host_runs / asked,
            len(live.texts) * live.decode / seconds,
        )
