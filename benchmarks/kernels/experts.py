"""The expert kernel compared with a loop of torch products and the limits of the machine.

    python -m benchmarks.kernels.experts [--json FILE] [--kinds bf16 ...] [--shapes 1024x384 ...]

One MoE layer of 64 experts, top-8, random weights. One token: GB/s of the weights it reads, every
call another eight experts out of at least 512 MB. 64 tokens per expert: GFLOP/s. One run, rounds
interleaved, medians; the limits (torch's sum and fp32 product) are measured in the same rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.expert_mlp import RecordTable, combine, run_experts
from coterie.kernels.cpu.expert_record import dense_parts, pack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.weights.formats.gguf_blocks import BLOCK_SIZES
from coterie.weights.kinds import BLOCK_KINDS, KINDS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Int4Weight, Int8Weight, Weight

EXPERTS, TOP_K, TOKENS = 64, 8, 512
FOOTPRINT_BYTES = 512 << 20
# where the fp16 factors of a block are
_FACTORS = {"q5_0": (0, 1), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208, 1)}


def weight(kind: str, rows: int, width: int) -> Weight:
    unit = width**-0.5
    if kind == "int8":
        q = torch.randint(-127, 128, (rows, width), dtype=torch.int8)
        return Int8Weight(q, torch.full((rows, width // 32), unit / 70).half())
    if kind == "int4":
        scale = torch.full((rows, width // 32), unit / 4.6).half()
        q = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8)
        return Int4Weight(q, scale, -7.5 * scale)
    if kind in BLOCK_KINDS:
        elements, nbytes = BLOCK_SIZES[kind.upper()]
        blocks = torch.randint(0, 256, (rows, width // elements, nbytes), dtype=torch.uint8)
        at, count = _FACTORS[kind]
        factors = torch.full((rows, width // elements, count), unit / 200).half()
        blocks[..., at : at + 2 * count] = factors.view(torch.uint8)
        return GgufBlocks(kind.upper(), blocks.flatten(1))
    dense = torch.randn(rows, width) * unit
    return DenseWeight(dense.bfloat16() if kind == "bf16" else dense)


@dataclass
class Case:
    name: str
    call: Callable[[], object]
    unit: str
    work: float  # bytes that must move, or operations
    taken: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.taken)


class Layer:
    """One kind at one shape, with so many copies of the experts that they do not fit into a
    cache."""

    def __init__(self, kind: str, hidden: int, inner: int) -> None:
        self.kind, self.hidden, self.inner = kind, hidden, inner
        self.layout = ExpertLayout(hidden, inner, True, (kind,) * 3)
        nbytes = self.layout.nbytes
        self.part_bytes = sum(place.nbytes for place in self.layout.parts())
        copies = max(1, -(-FOOTPRINT_BYTES // (nbytes * EXPERTS)))
        record = torch.empty(nbytes, dtype=torch.uint8)
        places = self.layout.parts()
        pack_record(self.layout, {p.name: weight(kind, p.rows, p.columns) for p in places}, record)
        self.tables = []
        for _ in range(copies):
            table = RecordTable(EXPERTS)
            for expert, slot in enumerate(record.repeat(EXPERTS, 1)):
                table.set(expert, slot)
            self.tables.append(table)
        self._turn = itertools.count()

    def decode(self) -> Tensor:
        """One token through the next eight experts."""
        turn = next(self._turn)
        per_table = EXPERTS // TOP_K
        table = self.tables[turn // per_table % len(self.tables)]
        ids = torch.arange(TOP_K, dtype=torch.int32)[None] * per_table + turn % per_table
        return self._run(table, torch.ones(1, self.hidden), ids)

    def prefill(self) -> Tensor:
        """64 rows for every expert."""
        tokens = torch.arange(TOKENS, dtype=torch.int32)[:, None]
        ids = (tokens * 5 + torch.arange(TOP_K, dtype=torch.int32) * 8) % EXPERTS
        return self._run(self.tables[0], torch.randn(TOKENS, self.hidden), ids)

    def _run(self, table: RecordTable, x: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty(ids.numel(), self.hidden)
        run_experts(self.layout, x, ids, table, out)
        return combine(out, torch.full(ids.shape, 1 / TOP_K))

    def cases(self) -> list[Case]:
        name = f"{self.kind} {self.hidden}x{self.inner}"
        flops = 6.0 * TOKENS * TOP_K * self.hidden * self.inner
        found = [
            Case(f"{name}, 1 token", self.decode, "GB", TOP_K * self.part_bytes),
            Case(f"{name}, 64 tokens/expert", self.prefill, "GFLOP", flops),
        ]
        library = native()
        # on a CPU without bf16 instructions torch takes minutes for a bf16 product
        if self.kind == "fp32" or (self.kind == "bf16" and library and "amx" in library.isa):
            found += TorchLoop(self).cases(name, flops)
        return found


class TorchLoop:
    """The same work as a loop of torch's products, one expert after another."""

    def __init__(self, layer: Layer) -> None:
        self.dtype = torch.float32 if layer.kind == "fp32" else torch.bfloat16
        [(_, record)] = layer.tables[0].pick([0])
        parts = dense_parts(layer.layout, record, self.dtype)
        copies = FOOTPRINT_BYTES // layer.part_bytes
        self.experts = [{k: v.clone() for k, v in parts.items()} for _ in range(copies)]
        self.layer, self._turn = layer, itertools.count()

    def cases(self, name: str, flops: float) -> list[Case]:
        work = TOP_K * self.layer.part_bytes
        return [
            Case(f"  torch loop {name}, 1 token", lambda: self.run(TOP_K, 1), "GB", work),
            Case(f"  torch loop {name}, 64", lambda: self.run(EXPERTS, 64), "GFLOP", flops),
        ]

    def run(self, experts: int, rows: int) -> None:
        x = torch.ones(rows, self.layer.hidden, dtype=self.dtype)
        for _ in range(experts):
            parts = self.experts[next(self._turn) % len(self.experts)]
            gate = functional.silu(functional.linear(x, parts["gate"]))
            functional.linear(gate * functional.linear(x, parts["up"]), parts["down"])


def limits() -> list[Case]:
    stream = torch.ones(1 << 26)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return [
        Case("limit: read", stream.sum, "GB", stream.nbytes),
        Case("limit: torch fp32 product", lambda: a @ b, "GFLOP", 2 * 1024**3),
    ]


def measure(group: list[Case], rounds: int, at_most_s: float = 2.0) -> None:
    """Run rounds over all cases. A case that is too slow to repeat keeps the times it has."""
    for turn in range(rounds + 1):
        for case in group:
            if sum(case.taken) > at_most_s:
                continue
            repeats = 8 if case.unit == "GB" else 1
            start = time.perf_counter()
            for _ in range(repeats):
                case.call()
            if turn:  # the first round warms up
                case.taken.append((time.perf_counter() - start) / repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--shapes", nargs="+", default=["1024x384", "2048x768"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    library = native()
    if library is None:
        raise SystemExit("the native kernels are not available here")
    print(f"{library.isa}, {torch.get_num_threads()} threads")
    print(f"{'case':42} {'ms':>9} {'rate':>14} {'of limit':>9}")
    records = []
    for shape, kind in itertools.product(arguments.shapes, arguments.kinds):
        hidden, inner = map(int, shape.split("x"))
        if kind in BLOCK_KINDS and (hidden % 256 or inner % 256):
            continue  # rows of whole blocks only
        bounds, group = limits(), Layer(kind, hidden, inner).cases()
        measure([*bounds, *group], arguments.rounds)
        best = {case.unit: case.work / min(case.taken) for case in bounds}
        for case in (*bounds, *group):
            rate = case.work / case.seconds
            share = rate / best[case.unit]
            print(
                f"{case.name:42} {case.seconds * 1e3:9.3f} {rate / 1e9:8.1f} "
                f"{case.unit + '/s':>7} {share:9.0%}",
                flush=True,
            )
            records.append(
                {"case": case.name.strip(), "seconds": case.seconds, "share_of_limit": share}
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"isa": library.isa, "results": records}, indent=1))


if __name__ == "__main__":
    main()
