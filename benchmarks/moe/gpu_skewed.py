"""Every strategy with skewed routing, experts beyond the device: hit rate, tok/s, bytes, Belady.

    python3 -m benchmarks.moe.gpu_skewed                                # 12 layers, 10% and 25%
    python3 -m benchmarks.moe.gpu_skewed --layers 48 --shares 5,50 --strategies adaptive,A,B
    python3 -m benchmarks.moe.gpu_skewed --smoke                        # tiny, on the CPU

Qwen3-30B-A3B's shape with random weights, one stream. zipf: gates prefer experts about as Zipf's
law with exponent 1; what they chose in one run is then repeated for every strategy. trace:FILE:
every decoded token uses the experts that a carved model chose for a token of real text
(`carved_trace`). To repeat choices, the gates are forbidden all others before each step. Model
and pinned bank are made once; strategies run one after another, each with the counts of other
traffic, a few tokens that do not count, and then the ones that do. Rows that decode as another
strategy does have its figures. Belady and the replayed hit rates are of the choices that adaptive's
run recorded; of strategies that did not run there is only the replay. The figure is the median of
four parts of a run. Adaptive and the best of the others run twice more, in turns, because machines
change their speed from minute to minute: of these the figure is the median of all parts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu_runs import SAMPLED, Streams, free_memory, make_engine, tokenizer_of
from benchmarks.moe.bank_replay import Choices, belady_rate, choices_of, replay_bank
from benchmarks.moe.carved_trace import CarvedTrace
from benchmarks.random_models import (
    SHAPES,
    RandomCheckpoint,
    RandomExperts,
    make_prompts,
    tiny,
)
from coterie.core.moe import MoeSettings
from coterie.models.base import CausalLM, load_model
from coterie.models.build.moe import MoeRequirements
from coterie.moe.dispatch.table import STRATEGIES, parse_strategy, resolve_strategy
from coterie.moe.runtime.bank_fill import BankFill
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.host_bank import HostBank, _HostPlacer
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.setup import PlacementContext, _parts_with, allocation_for
from coterie.moe.runtime.trace import Trace
from coterie.moe.store.base import ExpertGeometry
from coterie.weights.checkpoint import Checkpoint

SHAPE = "Qwen3-30B-A3B"
CARVED = Path(__file__).with_name("carved_128x8.npz")
PROMPT, PARTS = 16, 4
# tokens that do not count, and those that do; of a strategy that moves whole layers for each token
WARM, COUNTED = 128, 384
FEW = {"chunked": (4, 16)}
# adaptive may be below the best by this share
ALLOWED = 0.03
# how often both run again
AGAIN = 2


class KeptBank(HostBank):
    """A bank that outlives the runtimes that use it."""

    _is_full = False

    def begin_fill(self) -> BankFill:
        if not self._is_full:
            fill = super().begin_fill()
            fill.wait()
            fill.close()
            self._is_full = True
        # nothing is left to read
        return BankFill(_HostPlacer(self), (), 0)

    def close(self) -> None:
        """Runtimes close their bank; `free` closes this one."""

    def free(self) -> None:
        super().close()


class ExchangedExperts:
    """A model's experts: passes every call to the current runtime, and tells the routing when a
    step was launched."""

    def __init__(self, geometry: ExpertGeometry, on_device: bool) -> None:
        self.geometry, self.current = geometry, cast("ExpertRuntime | None", None)
        self._on_device = on_device
        self.after_step: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)

    def launched(self, copies: bool) -> None:
        assert self.current is not None
        self.current.launched(copies)
        if not torch.cuda.is_current_stream_capturing():
            self.after_step()

    def end_step(self) -> Any:
        assert self.current is not None
        found = self.current.end_step()
        if not self._on_device:
            self.after_step()
        return found

    def close(self) -> None:
        if self.current is not None:
            self.current.close(keep_store=True)
            self.current = None


class ForcedRouting:
    """Lets the gates of a model choose what a trace says, step by step. One table of all layers
    changes between steps, in the order of the stream that computes: captured steps read it."""

    def __init__(self, model: CausalLM, chosen: Choices) -> None:
        assert model._moe is not None
        layers, experts = model._moe._layers, model._moe.experts.geometry.num_experts
        self._steps = torch.full((len(chosen) + 1, len(layers), experts), -2.0)
        ids = torch.from_numpy(chosen.astype(np.int64))
        self._steps[:-1].scatter_(2, ids, 0.0)
        # prompts choose among what the first steps use
        self._steps[-1] = self._steps[:4].amax(dim=0)
        self._steps = self._steps.to(model.device)
        self._now = self._steps[-1].clone()
        for row, layer in enumerate(layers):
            layer.gate.exclude(())
            layer.gate._penalty = self._now[row]
            if layer.gate.route is not None:
                layer.gate.route.penalty = self._now[row].data_ptr()
        self._next = 0

    def begin(self) -> None:
        """The next step is a prompt."""
        self._next = 0
        self._set(-1)

    def after_step(self) -> None:
        self._set(self._next % (len(self._steps) - 1))
        self._next += 1

    @torch.inference_mode()
    def _set(self, step: int) -> None:
        self._now.copy_(self._steps[step])


@dataclass(frozen=True)
class Counted:
    """What one strategy did."""

    strategy: str
    runs: str
    slots: int
    tok_s: float
    hit_rate: float
    # of a token, over the link: read by kernels, and copied into slots
    read_mb: float
    copied_mb: float
    cpu_part: float
    seconds: float
    # tok/s of each part
    parts: tuple[float, ...]

    def with_parts(self, others: Counted) -> Counted:
        parts = (*self.parts, *others.parts)
        return replace(self, parts=parts, tok_s=statistics.median(parts))


class SkewedBench:
    """One model and one bank."""

    def __init__(self, options: argparse.Namespace, routing: str) -> None:
        self.device = "cpu" if options.smoke else "cuda"
        self._options, self._kind = options, options.kind
        config = tiny(SHAPES[SHAPE]) if options.smoke else dict(SHAPES[SHAPE])
        if not options.smoke:
            config["num_hidden_layers"] = min(options.layers, config["num_hidden_layers"])
        weights = cast(Checkpoint, RandomCheckpoint(config, self.device, routing == "zipf"))
        self.model = load_model(weights, dtype="bf16", device=self.device, experts=self._place)
        self._forced: ForcedRouting | None = None
        self.chosen: Choices | None = None
        self.heatmap: Heatmap | None = None
        if routing != "zipf":
            self._force(CarvedTrace.load(Path(routing.removeprefix("trace:"))))
        gc.collect()
        gc.freeze()

    def _place(self, wanted: MoeRequirements) -> Any:
        self._wanted, geometry = wanted, wanted.geometry()
        self.geometry = geometry
        self._experts = ExchangedExperts(geometry, self.device == "cuda")
        self._store = RandomExperts(geometry, wanted.hidden, wanted.moe.intermediate, self._kind)
        self._bank = None
        if self.device == "cuda":
            self._bank = KeptBank(cast(Any, self._store), torch.device(self.device))
        return self._experts

    def _force(self, trace: CarvedTrace) -> None:
        geometry = self.geometry
        if self._options.smoke:
            trace = _small(trace, geometry)
        trace = trace.with_layers(len(geometry.layers))
        self.heatmap = Heatmap(geometry, trace.counts.astype(np.float64))
        self._repeat(trace.chosen.astype(np.int64))

    def _repeat(self, chosen: Choices) -> None:
        self.chosen = chosen
        self._forced = ForcedRouting(self.model, chosen)
        self._experts.after_step = self._forced.after_step

    def choose(self) -> None:
        """Decode as the gates want: once for what is known at start, and once for the choices that
        every strategy gets."""
        _, other = self.run("cpu_only", "0", seed=9)
        counts = np.zeros((len(self.geometry.layers), self.geometry.num_experts))
        for row in range(len(counts)):
            counts[row] = np.bincount(other[:, row].ravel(), minlength=counts.shape[1])
        self.heatmap = Heatmap(self.geometry, counts)
        self._repeat(self.run("cpu_only", "0")[1])

    def _open(self, strategy: str, share: str) -> ExpertRuntime:
        settings = MoeSettings(
            strategy=strategy, device_budget=f"{share}%", warmup="none", predict="off"
        )
        device = torch.device(self.device)
        if self._bank is None:
            return open_experts(cast(Any, self._store), settings, heatmap=self.heatmap)
        site = PlacementContext(device, self._wanted.kv_bytes, self.heatmap)
        store = cast(Any, self._store)
        room = allocation_for(store, settings, site)
        runtime = ExpertRuntime(_parts_with(store, settings, site, room, self._bank))
        runtime.start()
        return runtime

    def run(self, strategy: str, share: str, seed: int = 0) -> tuple[Counted, Choices]:
        begin = time.perf_counter()
        warm, count = FEW.get(strategy, (self._options.warm, self._options.tokens))
        runtime = self._experts.current = self._open(strategy, share)
        runtime.trace = Trace(self.geometry)
        try:
            context = PROMPT + warm + count + 16
            tokenizer = tokenizer_of(self.model.spec.vocab)
            engine = make_engine(self.model, tokenizer, 1, context)
            if self.device == "cuda":
                engine.capture(lambda done, total: None)
            if self._forced is not None:
                self._forced.begin()
            streams = Streams(engine)
            prompt = make_prompts(self.model.spec.vocab, [PROMPT], seed=seed)[0]
            stream = streams.send(prompt, warm + count, SAMPLED)
            while len(stream.tokens) < warm:
                streams.step()
            before = runtime.telemetry.total().as_dict()
            at = [(time.perf_counter(), len(stream.tokens))]
            while streams.running:
                streams.step()
                if len(stream.tokens) - at[-1][1] >= count // PARTS:
                    at.append((time.perf_counter(), len(stream.tokens)))
            streams.drain()
            found = self._figures(runtime, before, at, strategy, time.perf_counter() - begin)
            return found, choices_of(runtime.trace, self.geometry.top_k)
        finally:
            self._experts.close()
            free_memory()

    def _figures(
        self, runtime: ExpertRuntime, before: dict[str, float], at: list[tuple[float, int]],
        strategy: str, seconds: float,
    ) -> Counted:  # fmt: skip
        after = runtime.telemetry.total().as_dict()
        counts = {name: after[name] - before[name] for name in after}
        rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(at)]
        tokens = max(1, at[-1][1] - at[0][1])
        hits, misses = counts["device_hits"], counts["device_misses"] + counts["host_runs"]
        # every copy is one hit of the bank beside those of the misses
        copies = max(0.0, counts["host_hits"] - misses) if self._bank is not None else 0.0
        copied = copies * self._store.slot_bytes
        if runtime._banked is not None and runtime._banked._victims is not None:
            # the step copies what it misses, and reads nothing else
            copied = counts["moved_bytes"]
        share = runtime.report()["cpu_share"]
        return Counted(
            strategy, runtime.parts.strategy, runtime.parts.device.num_slots,
            statistics.median(rates) if rates else 0.0, hits / max(1, hits + misses),
            max(0.0, counts["moved_bytes"] - copied) / tokens / 1e6, copied / tokens / 1e6,
            share.get("part", 0.0), seconds, tuple(rates),
        )  # fmt: skip

    def close(self) -> None:
        gc.unfreeze()
        self.model.close()
        if self._bank is not None:
            self._bank.free()
        self._store.close()
        free_memory()


def _small(trace: CarvedTrace, geometry: ExpertGeometry) -> CarvedTrace:
    """For a tiny model: the first experts that are chosen, by other names."""
    few, top_k = geometry.num_experts, geometry.top_k
    order = (trace.chosen[..., :1].astype(int) + np.arange(top_k) * (few // top_k)) % few
    return CarvedTrace(order.astype(np.uint8), trace.counts[:, :few])


def decodes_as(text: str, geometry: ExpertGeometry, slots: int) -> str:
    """The strategy that really decodes."""
    return str(parse_strategy(resolve_strategy(text, geometry, slots))[1])


def measure(options: argparse.Namespace, routing: str) -> list[dict[str, Any]]:
    bench, rows = SkewedBench(options, routing), []
    names = options.strategies.split(",") if options.strategies else list(STRATEGIES)
    try:
        if bench.chosen is None:
            bench.choose()
        for share in options.shares.split(","):
            rows += _of_share(bench, routing, share, names)
    finally:
        bench.close()
    return rows


def _of_share(
    bench: SkewedBench, routing: str, share: str, names: Sequence[str]
) -> list[dict[str, Any]]:
    geometry = bench.geometry
    slots = max(1, int(geometry.total * float(share) / 100))
    found: dict[str, Counted] = {}
    recorded: Choices | None = None
    for name in sorted(names, key=lambda name: name != "adaptive"):
        own = decodes_as(name, geometry, slots)
        if own not in found:
            found[own], chosen = bench.run(own, share)
            if own == "adaptive":
                recorded = chosen
                assert bench.chosen is not None
                wanted = bench.chosen[: len(chosen)]
                same = np.sort(wanted, axis=2) == np.sort(chosen[: len(wanted)], axis=2)
                print(f"# {routing}: {same.mean():.2%} of the choices are the wanted ones")
    others = sorted((each for each in found if each != "adaptive"), key=lambda n: found[n].tok_s)
    for _ in range(AGAIN if "adaptive" in found and others else 0):
        for own in (others[-1], "adaptive"):
            found[own] = found[own].with_parts(bench.run(own, share)[0])
    rows: list[dict[str, Any]] = []
    for name in names:
        own = decodes_as(name, geometry, slots)
        row = {"routing": _short(routing), "share": share, **vars(found[own])}
        rows.append(row | {"strategy": name, "runs": own})
    assert recorded is not None or "adaptive" not in found
    if recorded is not None:
        _replay(bench, rows, routing, share, slots, recorded)
    best = max(row["tok_s"] for row in rows if row["tok_s"])
    for row in rows:
        row["of_best"] = row["tok_s"] / best
    _print(rows)
    return rows


def _replay(
    bench: SkewedBench, rows: list[dict[str, Any]], routing: str, share: str, slots: int,
    chosen: Choices,
) -> None:  # fmt: skip
    """Belady for all, and the hit rates of what did not run."""
    warm, geometry = min(bench._options.warm, len(chosen) // 2), bench.geometry
    bound = belady_rate(geometry, chosen, slots, warm)
    ran = {row["strategy"] for row in rows}
    for row in rows:
        row["belady"] = bound
    for name in STRATEGIES:
        own = decodes_as(name, geometry, slots)
        few = chosen[: warm + 16] if own == "chunked" else chosen
        inside = own in ("lru", "active_only")
        counts = replay_bank(own, geometry, few, slots, warm, bench.heatmap, in_kernel=inside)
        for row in rows:
            if row["strategy"] == name:
                row["replayed"] = counts.hit_rate
        if name not in ran:
            each = {"routing": _short(routing), "share": share, "strategy": name, "runs": own}
            rows.append(each | {"tok_s": 0.0, "belady": bound, "replayed": counts.hit_rate})


def _short(routing: str) -> str:
    return "zipf" if routing == "zipf" else "trace"


def _is_behind(row: dict[str, Any]) -> bool:
    """An adaptive that another strategy beats by more than what is allowed."""
    return row["strategy"] == "adaptive" and row["of_best"] < 1 - ALLOWED


def _print(rows: Sequence[dict[str, Any]]) -> None:
    print("routing share strategy            tok/s of best   hits replay belady "
          "read MB copied MB  cpu  run s")  # fmt: skip
    for row in sorted(rows, key=lambda row: -row["tok_s"]):
        head = f"{row['routing']:7} {row['share']:>4}% {row['strategy']:17}"
        replayed = f"{row.get('replayed', 0):6.1%} {row.get('belady', 0):6.1%}"
        if not row["tok_s"]:
            print(f"{head} not run           {'':6} {replayed}")
            continue
        print(f"{head} {row['tok_s']:6.1f} {row['of_best']:7.1%} {row['hit_rate']:6.1%} {replayed} "
              f"{row['read_mb']:7.1f} {row['copied_mb']:9.1f} {row['cpu_part']:4.0%} "
              f"{row['seconds']:6.1f}" + ("" if row["runs"] == row["strategy"]
                                          else f"  decodes as {row['runs']}"))  # fmt: skip
    own = next((row for row in rows if row["strategy"] == "adaptive"), None)
    if own is not None and sum(row["tok_s"] > 0 for row in rows) > 1:
        verdict = "FAILED" if _is_behind(own) else "ok"
        gap = own["belady"] - own["hit_rate"]
        print(f"adaptive has {own['of_best']:.1%} of the best, {100 * gap:.1f} points fewer hits "
              f"than Belady: {verdict}", flush=True)  # fmt: skip


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--routing", default=f"zipf,trace:{CARVED}", help="by comma")
    parser.add_argument("--shares", default="10,25", help="percent of the experts in slots")
    parser.add_argument("--strategies", default="", help="by comma; default: all")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--kind", default="int4", help="precision of the experts")
    parser.add_argument("--warm", type=int, default=WARM, help="tokens that do not count")
    parser.add_argument("--tokens", type=int, default=COUNTED, help="tokens that count")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args()
    if options.smoke:
        options.warm, options.tokens, options.kind = 8, 24, "bf16"
    rows: list[dict[str, Any]] = []
    for routing in options.routing.split(","):
        begin = time.perf_counter()
        rows += measure(options, routing)
        print(f"# {routing}: {time.perf_counter() - begin:.0f} s in all", file=sys.stderr)
    if options.json is not None:
        facts = {key: value for key, value in vars(options).items() if key != "json"}
        # not where this checkout is
        facts["routing"] = options.routing.replace(f"{CARVED.parent}/", "")
        options.json.write_text(json.dumps({"options": facts, "rows": rows}, indent=1))
    return int(any(_is_behind(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
