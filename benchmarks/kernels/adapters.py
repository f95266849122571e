"""Steps of the native decoder with and without adapters, compared with the limits of the machine.

    python -m benchmarks.kernels.adapters [--kind int4] [--rank 16] [--rounds 9] [--json FILE]

SmolLM2-135M's shape with random weights and the LM head, adapters on all seven matrices of every
layer. Rounds are interleaved; the fastest of each case counts, because other load only adds time.
The cost of adapters is compared with the time in which torch reads their bytes, and their FLOPs
with torch's matrix product, both measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.kernels.cpu import BLOCK, KINDS, LAYERS, SHAPE, Model, batch_of
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.layers import set_threads
from coterie.kernels.patch import PARTS, Patch, PatchStack, Segment

SIZES = dict(
    zip(
        PARTS,
        (
            (SHAPE.hidden, SHAPE.q_size),
            (SHAPE.hidden, SHAPE.kv_size),
            (SHAPE.hidden, SHAPE.kv_size),
            (SHAPE.q_size, SHAPE.hidden),
            (SHAPE.hidden, SHAPE.intermediate),
            (SHAPE.hidden, SHAPE.intermediate),
            (SHAPE.intermediate, SHAPE.hidden),
        ),
        strict=True,
    )
)


def stack_of(rank: int, dtype: torch.dtype, scales: bool = False) -> PatchStack:
    """A random stack. With `scales` every matrix has an out_scale, as DoRA has."""

    def patch(width: int, height: int) -> Patch:
        a, b = (0.01 * torch.randn(rank, size) for size in (width, height))
        return Patch(a.to(dtype), b.to(dtype), out_scale=torch.ones(height) if scales else None)

    sites = ((layer, part) for layer in range(LAYERS) for part in PARTS)
    return PatchStack("random", 0, {site: patch(*SIZES[site[1]]) for site in sites})


@dataclass
class Case:
    name: str
    rows: int
    call: Callable[[], object]
    base: Case | None = None
    nbytes: int = 0  # of the patches that the step reads
    flops: float = 0.0
    taken: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return min(self.taken)


class Bench:
    def __init__(self, kind: str, rank: int) -> None:
        self.model, self.rank = Model(kind), rank
        self.stacks = {
            dtype: [stack_of(rank, dtype) for _ in range(16)]
            for dtype in (torch.bfloat16, torch.float32)
        }

    def group(self, spec: Sequence[tuple[int, int]], stacks: int, name: str) -> list[Case]:
        """Base, then `stacks` different stacks over equal shares of the rows, bf16 and fp32."""
        batch = batch_of(spec)
        rows = len(batch.positions)
        blocks = int(batch.block_tables.max()) + 1
        shape = (2, blocks, SHAPE.num_kv_heads, BLOCK, SHAPE.head_dim)
        kv = [torch.zeros(shape, dtype=self.model.kv_dtype) for _ in range(LAYERS)]
        hidden, last = torch.randn(rows, SHAPE.hidden), batch.query_starts[1:].long() - 1

        def step(patches: tuple[Segment, ...]) -> Callable[[], object]:
            mine = replace(batch, patches=patches)
            return lambda: self.model.head(self.model.decoder.forward(hidden, kv, mine)[last])

        base = Case(f"{name}, base", rows, step(()))
        found, share = [base], rows // stacks
        kinds = {"bf16": self.stacks[torch.bfloat16], "fp32": self.stacks[torch.float32]}
        kinds["dora"] = [stack_of(self.rank, torch.float32, scales=True) for _ in range(stacks)]
        for label, used in kinds.items():
            where = tuple(
                Segment(i * share, (i + 1) * share, one) for i, one in enumerate(used[:stacks])
            )
            nbytes = sum(p.nbytes for one in used[:stacks] for p in one.patches.values())
            flops = 2.0 * rows * self.rank * LAYERS * sum(map(sum, SIZES.values()))
            title = f"{name}, {stacks} x {label}"
            found.append(Case(title, rows, step(where), base, nbytes, flops))
        return found


def run(cases: Sequence[Case], rounds: int, clock: Callable[[], float]) -> None:
    for turn in range(rounds + 1):
        for case in cases:
            start = clock()
            case.call()
            if turn:  # the first round warms up
                case.taken.append(clock() - start)


def report(cases: Sequence[Case], read: float, product: float) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for case in cases:
        line = f"{case.name:32} {case.seconds * 1e3:9.2f} {case.rows / case.seconds:9.1f}"
        record: dict[str, object] = {"case": case.name, "seconds": case.seconds}
        if case.base is not None:
            cost, kept = case.seconds - case.base.seconds, case.base.seconds / case.seconds
            bound = max(case.nbytes / read, case.flops / product)
            line += f" {kept:7.1%} {cost * 1e3:9.2f} {bound * 1e3:9.2f} {cost / bound:7.2f}x"
            record |= {"of_base": kept, "cost_seconds": cost, "bound_seconds": bound}
        print(line, flush=True)
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="int4", choices=KINDS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by its CPU time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.cpu_time:
        arguments.threads = 1
    set_threads(arguments.threads)
    library = native()
    if library is None:
        raise SystemExit("the native kernels are not available here")
    torch.manual_seed(0)
    bench = Bench(arguments.kind, arguments.rank)
    cases = [
        *bench.group([(64, 1)] * 32, 16, "decode 32"),
        *bench.group([(64, 1)] * 32, 1, "decode 32"),
        *bench.group([(64, 1)], 1, "decode 1"),
        *bench.group([(0, 128)], 1, "prefill 128"),
    ]
    stream, square = torch.ones(1 << 26), torch.randn(1024, 1024)
    limits = [Case("read", 0, stream.sum), Case("product", 0, lambda: square @ square)]
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    run([*limits, *cases], arguments.rounds, clock)
    read = stream.nbytes / limits[0].seconds
    product = 2 * 1024**3 / limits[1].seconds
    print(
        f"{library.isa}, {arguments.threads} threads, {arguments.kind}, rank {arguments.rank}: ",
        end="",
    )
    print(f"torch reads {read / 1e9:.1f} GB/s and multiplies {product / 1e9:.1f} GFLOP/s")
    print(f"{'case':32} {'ms':>9} {'rows/s':>9} {'of base':>7} {'cost ms':>9} {'bound ms':>9}")
    records = report(cases, read, product)
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
