"""Checks the native kernels of this machine and measures them, with torch alone (no pytest).

    python -m tests.helpers.kernels.selfcheck [--no-speed]

Prints the instruction set chosen, errors against the torch twins, bitwise batch invariance, and
rates by number of threads. Exit status 1 when a check fails. Under a minute.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from coterie.kernels.cpu import layers as cpu
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.expert_mlp import run_experts, run_experts_torch
from coterie.kernels.decoder import DecoderShape
from coterie.kernels.expert_layout import ExpertLayout
from coterie.kernels.patch import Segment
from coterie.kernels.reference import layers as reference
from coterie.weights.quantize import dense
from tests.helpers.kernels.expert_inputs import choices, records_of
from tests.helpers.kernels.kernel_inputs import (
    ALL_KINDS,
    KINDS,
    cache_for,
    decoder_layers,
    fitting,
    one_row,
    paged_batch,
    rope_tables,
    weight,
)
from tests.helpers.kernels.patch_inputs import random_stack

SHAPE = DecoderShape(9, 3, 64, 576, 1536, 1e-5, 64**-0.5)
ODD = DecoderShape(6, 2, 80, 96, 160, 1e-6, 80**-0.5)


class Checks:
    failed = 0

    def expect(self, name: str, value: float, limit: float) -> None:
        ok = value <= limit
        self.failed += not ok
        print(f"  {'ok  ' if ok else 'FAIL'} {name}: {value:.2e} (limit {limit:.0e})", flush=True)


def check_linear(checks: Checks, kind: str, rounded: bool) -> None:
    for rows, least in ((576, 576), (50, 96), (100, 1536)):
        width = fitting(kind, least)
        stored = weight(kind, rows, width)
        product = cpu.PackedLinear([stored])
        x = torch.randn(70, width)
        want = x.double() @ dense(stored).double().T
        got = product(x)
        limit = 5e-3 if rounded else 3e-6 if kind in ("fp32", "bf16") else 1e-4
        error = ((got - want).abs().max() / want.abs().max()).item()
        checks.expect(f"{kind} {rows}x{width} error", error, limit)
        pieces = [(0, 1), (3, 1), (5, 2), (9, 3), (20, 7), (1, 8), (30, 13), (2, 65)]
        differ = sum(not torch.equal(product(x[a : a + n]), got[a : a + n]) for a, n in pieces)
        checks.expect(f"{kind} {rows}x{width} batches that change bits", differ, 0)


def check_attention(checks: Checks, tiles: bool) -> None:
    for heads, kv_heads, dim in ((9, 3, 64), (8, 1, 128), (4, 4, 80), (6, 2, 16)):
        for dtype in (torch.float32, torch.bfloat16):
            batch = paged_batch([(700, 1), (0, 37), (520, 3), (63, 1), (512, 20)])
            kv = cache_for(batch, kv_heads, dim, dtype)
            q = torch.randn(len(batch.positions), heads, dim)
            got = cpu.paged_attention(q, kv, batch, dim**-0.5)
            error = (got - reference.paged_attention(q, kv, batch, dim**-0.5)).abs().max().item()
            rounded = tiles and dtype == torch.bfloat16
            limit = 2e-2 if rounded else 5e-6
            checks.expect(f"attention {heads}/{kv_heads}x{dim} {dtype} error", error, limit)
            alone = [
                cpu.paged_attention(q[row : row + 1], kv, one_row(batch, seq, row), dim**-0.5)[0]
                for seq, row in ((3, 41), (4, 42), (4, 50), (4, 61))
            ]
            rows = got[[41, 42, 50, 61]]
            differ = sum(not torch.equal(a, b) for a, b in zip(alone, rows, strict=True))
            checks.expect(f"attention {heads}/{kv_heads}x{dim} rows that change bits", differ, 0)


def check_decoder(checks: Checks, kind: str, rounded: bool) -> None:
    for shape, extras in ((SHAPE, False), (ODD, True)):
        stacks = decoder_layers(shape, [kind] * 2, ("cpu", "reference"), extras)
        tables = rope_tables(1000, shape.head_dim)
        batch = paged_batch([(700, 1), (0, 37), (90, 5)])
        cache = cache_for(batch, shape.num_kv_heads, shape.head_dim, torch.float32)
        hidden = torch.randn(len(batch.positions), shape.hidden)
        native_kv, torch_kv = ([cache.clone() for _ in range(2)] for _ in range(2))
        got = cpu.NativeDecoder(shape, stacks["cpu"], *tables).forward(hidden, native_kv, batch)
        want = reference.decoder(shape, stacks["reference"], *tables, hidden, torch_kv, batch)
        limit = 2e-2 if rounded else 3e-4 if kind.startswith("int") else 1e-5
        error = ((got - want).abs().max() / want.abs().max()).item()
        checks.expect(f"decoder {kind} dim {shape.head_dim} error", error, limit)


def check_experts(checks: Checks, kind: str, rounded: bool) -> None:
    for gated in (True, False):
        layout = ExpertLayout(256, 512, gated, (kind,) * (3 if gated else 2))
        records = records_of(layout, 4)
        x, ids = torch.randn(90, 256), choices(90, 5, 2)
        got, want, alone = (torch.zeros(180, 256) for _ in range(3))
        run_experts(layout, x, ids, records, got)
        run_experts_torch(layout, x, ids, records, want)
        limit = 1e-2 if rounded else 3e-6 if kind in ("fp32", "bf16") else 3e-4
        name = f"experts {kind} {'gated' if gated else 'biased'}"
        error = ((got - want).abs().max() / want.abs().max()).item()
        checks.expect(f"{name} error", error, limit)
        for record in records:
            for row in range(0, 90, 9):
                rows, pairs = slice(row, row + 9), slice(row * 2, row * 2 + 18)
                run_experts(layout, x[rows], ids[rows], [record], alone[pairs])
        differ = int((alone != got).any(1).sum())
        checks.expect(f"{name} pairs that change bits", differ, 0)


def check_patches(checks: Checks, kind: str, rounded: bool) -> None:
    stacks = decoder_layers(ODD, [kind] * 2, ("cpu", "reference"), extras=True)
    tables = rope_tables(1000, ODD.head_dim)
    batch = paged_batch([(40, 1)] * 3 + [(0, 21), (90, 1)])
    cache = cache_for(batch, ODD.num_kv_heads, ODD.head_dim, torch.float32)
    hidden = torch.randn(len(batch.positions), ODD.hidden)
    one, two = (random_stack(ODD, [0, 1], *of) for of in ((13, torch.bfloat16), (4, torch.float32)))
    patches = (Segment(0, 2, one), Segment(3, 24, two), Segment(24, 25, one))
    decoder = cpu.NativeDecoder(ODD, stacks["cpu"], *tables)
    step, kv = replace(batch, patches=patches), [cache.clone() for _ in range(2)]
    got = decoder.forward(hidden, kv, step)
    torch_kv = [cache.clone() for _ in range(2)]
    want = reference.decoder(ODD, stacks["reference"], *tables, hidden, torch_kv, step)
    limit = 2e-2 if rounded else 5e-4 if kind.startswith("int") else 2e-5
    error = ((got - want).abs().max() / want.abs().max()).item()
    checks.expect(f"patches {kind} error", error, limit)
    differ = 0
    for sequence, row, stack in ((0, 0, one), (1, 1, one), (3, 23, two), (4, 24, one)):
        alone = replace(one_row(batch, sequence, row), patches=(Segment(0, 1, stack),))
        differ += not torch.equal(decoder.forward(hidden[row : row + 1], kv, alone)[0], got[row])
    checks.expect(f"patches {kind} rows that change bits", differ, 0)


def timed(call: Callable[[], object], seconds: float = 0.25) -> float:
    """Median seconds of one call."""
    call()
    taken: list[float] = []
    while sum(taken) < seconds or len(taken) < 3:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure() -> None:
    stream = torch.ones(1 << 26)
    most = torch.get_num_threads()
    for threads in sorted({1, 2, most // 2 or 1, most}):
        cpu.set_threads(threads)
        read = stream.nbytes / timed(stream.sum) / 1e9
        print(f"{threads} threads; torch reads {read:.1f} GB/s")
        for kind in ALL_KINDS:
            head = cpu.PackedLinear([weight(kind, 49152, 768)])
            wide = cpu.PackedLinear([weight(kind, 3072, 768)])
            row, rows = torch.randn(1, 768), torch.randn(256, 768)
            bandwidth = head.nbytes / timed(partial(head, row)) / 1e9
            rate = 2 * 256 * 3072 * 768 / timed(partial(wide, rows)) / 1e9
            print(f"  {kind}: 1 row {bandwidth:6.1f} GB/s   256 rows {rate:7.1f} GOP/s", flush=True)
        batch = paged_batch([(4095, 1)] * 8)
        kv = cache_for(batch, 3, 64, torch.bfloat16)
        q = torch.randn(8, 9, 64)
        cost = timed(partial(cpu.paged_attention, q, kv, batch, 0.125))
        print(f"  attention 8 x 4096, bf16: {kv.nbytes / cost / 1e9:.1f} GB/s", flush=True)
        batch = paged_batch([(0, 1024)])
        kv = cache_for(batch, 3, 64, torch.bfloat16)
        q = torch.randn(1024, 9, 64)
        cost = timed(partial(cpu.paged_attention, q, kv, batch, 0.125))
        print(f"  attention of 1,024 new rows, bf16: {cost * 1e3:.2f} ms", flush=True)
    cpu.set_threads(most)


def main() -> int:
    library = native()
    if library is None:
        print("native kernels are not available")
        return 1
    print(f"isa {library.isa}, {torch.get_num_threads()} threads, {library.path}")
    torch.manual_seed(0)
    checks = Checks()
    for kind in ALL_KINDS:
        rounded = kind == "bf16" and "amx" in library.isa
        check_linear(checks, kind, rounded)
        check_experts(checks, kind, rounded)
        if kind in KINDS:
            check_decoder(checks, kind, rounded)
            check_patches(checks, kind, rounded)
    check_attention(checks, "amx" in library.isa)
    print(f"{checks.failed} checks failed", flush=True)
    if "--no-speed" not in sys.argv:
        measure()
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
