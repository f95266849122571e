"""The native CPU kernels compared with the limits of the machine.

    python -m benchmarks.kernels.cpu [--json FILE]

One run, rounds interleaved, medians. Limits measured in the same run: read bandwidth (torch's sum
over 256 MB) and fp32 arithmetic (torch's matrix product). The model is SmolLM2-135M's shape with
random weights: 30 layers, hidden 576, intermediate 1536, 9 heads, 3 KV heads, vocabulary 49,152.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coterie.kernels.batch import AttentionBatch
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.layers import NativeDecoder, PackedLinear, paged_attention
from coterie.kernels.decoder import DecoderLayer, DecoderShape
from coterie.weights.quantize import DenseWeight, Int4Weight, Int8Weight, Weight

SHAPE = DecoderShape(9, 3, 64, 576, 1536, 1e-5, 64**-0.5)
LAYERS, VOCAB, BLOCK = 30, 49152, 16
KINDS = ("fp32", "bf16", "int8", "int4")
LINEAR_PARAMETERS = LAYERS * (960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536)


def weight(kind: str, rows: int, width: int) -> Weight:
    unit = width**-0.5
    if kind == "int8":
        q = torch.randint(-127, 128, (rows, width), dtype=torch.int8)
        return Int8Weight(q, torch.full((rows, width // 32), unit / 70).half())
    if kind == "int4":
        scale = torch.full((rows, width // 32), unit / 4.6).half()
        q = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8)
        return Int4Weight(q, scale, -7.5 * scale)
    dense = torch.randn(rows, width) * unit
    return DenseWeight(dense.bfloat16() if kind == "bf16" else dense)


def batch_of(spec: Sequence[tuple[int, int]]) -> AttentionBatch:
    """Sequences of (tokens cached, new rows) in consecutive blocks."""
    needed = [-(-(before + rows) // BLOCK) for before, rows in spec]
    tables = torch.zeros(len(spec), max(needed), dtype=torch.int32)
    positions, slots, starts, taken = [], [], [0], 0
    for index, (before, rows) in enumerate(spec):
        tables[index, : needed[index]] = torch.arange(taken, taken + needed[index])
        taken += needed[index]
        here = torch.arange(before, before + rows)
        positions.append(here)
        slots.append(tables[index, here // BLOCK].long() * BLOCK + here % BLOCK)
        starts.append(starts[-1] + rows)
    contexts = torch.tensor([before + rows for before, rows in spec], dtype=torch.int32)
    rows_at = torch.tensor(starts, dtype=torch.int32)
    return AttentionBatch(torch.cat(positions), torch.cat(slots), rows_at, contexts, tables, BLOCK)


class Model:
    """The decoder and LM head at one precision."""

    def __init__(self, kind: str) -> None:
        hidden, inter, q, kv = SHAPE.hidden, SHAPE.intermediate, SHAPE.q_size, SHAPE.kv_size
        ones = torch.ones(hidden)

        def product(width: int, *rows: int) -> PackedLinear:
            return PackedLinear([weight(kind, count, width) for count in rows])

        layers = [
            DecoderLayer(
                ones,
                product(hidden, q, kv, kv),
                None,
                None,
                None,
                product(q, hidden),
                ones,
                product(hidden, inter, inter),
                product(inter, hidden),
            )
            for _ in range(LAYERS)
        ]
        self.head = product(hidden, VOCAB)
        self.nbytes: int = self.head.nbytes + sum(
            part.nbytes
            for layer in layers
            for part in (layer.qkv, layer.o, layer.gate_up, layer.down)
            if part is not None
        )
        angles = torch.outer(torch.arange(8192.0), 1e5 ** (-torch.arange(0, 64, 2) / 64))
        self.decoder = NativeDecoder(SHAPE, layers, angles.cos(), angles.sin())
        self.kv_dtype = torch.float32 if kind == "fp32" else torch.bfloat16

    def step(self, spec: Sequence[tuple[int, int]]) -> Callable[[], object]:
        """One forward pass over `spec`; logits for the last row of every sequence."""
        batch = batch_of(spec)
        blocks = int(batch.block_tables.max()) + 1
        shape = (2, blocks, SHAPE.num_kv_heads, BLOCK, SHAPE.head_dim)
        kv = [torch.zeros(shape, dtype=self.kv_dtype) for _ in range(LAYERS)]
        hidden = torch.randn(len(batch.positions), SHAPE.hidden)
        last = batch.query_starts[1:].long() - 1
        return lambda: self.head(self.decoder.forward(hidden, kv, batch)[last])


@dataclass
class Case:
    name: str
    call: Callable[[], object]
    unit: str  # of work
    work: float  # bytes that must move, or operations
    tokens: int  # 0: not a step of the model
    taken: list[float]


def cases(kind: str) -> list[Case]:
    model = Model(kind)
    flops = 2 * LINEAR_PARAMETERS

    def attention_flops(rows: int) -> float:
        return LAYERS * SHAPE.num_heads * SHAPE.head_dim * 2 * rows * rows

    found = [Case(f"{kind} decode, 1 stream", model.step([(64, 1)]), "GB", model.nbytes, 1, [])]
    for rows in (8, 32):
        work = rows * (flops + 2 * VOCAB * SHAPE.hidden)
        step = model.step([(64, 1)] * rows)
        found.append(Case(f"{kind} decode, {rows} streams", step, "GFLOP", work, rows, []))
    for rows in (128, 1024):
        prefill = rows * flops + attention_flops(rows)
        step = model.step([(0, rows)])
        found.append(Case(f"{kind} prefill {rows}", step, "GFLOP", prefill, rows, []))
    return found


def attention_case(dtype: torch.dtype) -> Case:
    batch = batch_of([(4095, 1)] * 8)
    kv = [torch.randn(2, 8 * 256, 3, BLOCK, 64).to(dtype) for _ in range(4)]  # beyond the caches
    q = torch.randn(8, 9, 64)
    turn = iter(range(1 << 30))
    name = f"attention 8 x 4096, {str(dtype).removeprefix('torch.')}"
    return Case(
        name,
        lambda: paged_attention(q, kv[next(turn) % 4], batch, 0.125),
        "GB",
        kv[0].nbytes,
        0,
        [],
    )


def limits() -> dict[str, Case]:
    stream = torch.ones(1 << 26)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return {
        "GB": Case("limit: read", stream.sum, "GB", stream.nbytes, 0, []),
        "GFLOP": Case("limit: torch fp32 matmul", lambda: a @ b, "GFLOP", 2 * 1024**3, 0, []),
    }


def run(group: Sequence[Case], rounds: int) -> None:
    for turn in range(rounds + 1):
        for case in group:
            start = time.perf_counter()
            case.call()
            if turn:  # the first round warms up
                case.taken.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    arguments = parser.parse_args()
    library = native()
    if library is None:
        raise SystemExit("the native kernels are not available here")
    print(f"{library.isa}, {torch.get_num_threads()} threads")
    print(f"{'case':34} {'ms':>9} {'tok/s':>9} {'rate':>14} {'of limit':>9}")
    records = []
    for group in (
        *(cases(kind) for kind in arguments.kinds),
        [attention_case(torch.float32), attention_case(torch.bfloat16)],
    ):
        bounds = limits()
        run([*bounds.values(), *group], rounds=5)
        best = {unit: case.work / min(case.taken) for unit, case in bounds.items()}
        for case in (*bounds.values(), *group):
            seconds = statistics.median(case.taken)
            rate, share = case.work / seconds, case.work / seconds / best[case.unit]
            tokens = f"{case.tokens / seconds:9.1f}" if case.tokens else " " * 9
            print(
                f"{case.name:34} {seconds * 1e3:9.2f} {tokens} "
                f"{rate / 1e9:8.1f} {case.unit + '/s':>5} {share:9.0%}",
                flush=True,
            )
            records.append({"case": case.name, "seconds": seconds, "share_of_limit": share})
    if arguments.json:
        arguments.json.write_text(json.dumps({"isa": library.isa, "results": records}, indent=1))


if __name__ == "__main__":
    main()
