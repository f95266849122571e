"""Measures the sizes of the GPU's programs for given shapes, for `coterie tune`.

Each part of a kernel's sizes is tried in turn with the best of the parts before. A launch is timed
inside a captured graph, on as many copies of the weights as the device's cache cannot hold, as in
a model. Sizes that do not compile, do not fit or compute something else than the default are passed
over.
Import this module only where triton is installed.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from coterie.kernels.device_blocks import FORMS
from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord
from coterie.kernels.expert_gate import GateRule
from coterie.kernels.size_table import (
    DeviceShape,
    ExpertPoolShape,
    MatrixShape,
    expert_shape,
    matrix_shape,
)
from coterie.kernels.triton import expert_gemv, gemv
from coterie.kernels.triton.expert_gemv import ExpertPool, PairSizes, RoutedRows
from coterie.kernels.triton.expert_groups import (
    ExpertScratch,
    GroupSize,
    GroupSizes,
    ManySizes,
    SpanSizes,
    choose_sizes,
    many_shape,
    run_experts_many,
)
from coterie.kernels.triton.expert_int4 import Int4Size, Int4Sizes
from coterie.kernels.triton.expert_tiles import TileSize
from coterie.kernels.triton.sizes import default_gemv_size, default_pair_sizes, launches_early
from coterie.kernels.triton.unpack import KINDS

# 32-bit registers of a thread that may hold requested weights
_LEAST_REGISTERS, _MOST_REGISTERS = 2, 160
_BITS = {"fp32": 32, "bf16": 16, "dense": 16, "int8": 8, "int4": 4}
_BITS |= {kind: form.bits for kind, form in FORMS.items()}
# numbers of rows in a step for which experts in batches and prompts are measured
_ROWS = (16, 64, 128, 256, 512, 1024, 2048, 8192)
# other sizes must be faster than the default by this much: less is noise
_GAIN = 0.02
# of bf16 sums in another order
_TOLERANCE = 0.02
# weights of one measurement: more than any device's cache
_COPIED_BYTES = 512 << 20
_MOST_COPIES = 64
_COMPILERS = min(16, os.cpu_count() or 1)

Launch = Callable[[Any, int], None]
# launches of one candidate -> seconds of one
Timer = Callable[[Sequence[Callable[[], None]]], float]
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class TunePart:
    """Some fields of a kernel's sizes: which values to try, given the best of the others."""

    options: Callable[[Any], Iterable[Any]]
    # (sizes, number of the copy of the weights)
    launch: Launch
    # what is written, or added to
    out: Tensor


@dataclass(frozen=True, slots=True)
class TuneCase:
    """One entry of a table. `open` makes what is launched, and the number of copies."""

    shape: str
    default: Any
    open: Callable[[], tuple[list[TunePart], int]]


def tune(
    cases: Sequence[TuneCase], progress: Progress, time: Timer | None = None
) -> Iterator[tuple[TuneCase, Any, float]]:
    """Each case with its best sizes, and the time of its kernels over that with the default."""
    timer = time or graph_seconds
    for done, case in enumerate(cases):
        progress(done, len(cases))
        yield (case, *best_sizes(case, timer))
    progress(len(cases), len(cases))


def best_sizes(case: TuneCase, time: Timer) -> tuple[Any, float]:
    parts, copies = case.open()
    best, before, after = case.default, 0.0, 0.0
    for part in parts:
        options = list(dict.fromkeys(part.options(best)))
        _compile(part.launch, [best, *options])
        want = _result(part, best)
        usual = _seconds(part.launch, best, copies, time)
        fastest, least = best, usual * (1 - _GAIN)
        for sizes in options:
            taken = _seconds(part.launch, sizes, copies, time)
            if taken < least and _is_same(_result(part, sizes), want):
                fastest, least = sizes, taken
        if not math.isinf(usual):
            before += usual
            after += usual if fastest == best else least
        best = fastest
    return best, after / before if before else 1.0


def _compile(launch: Launch, options: Sequence[Any]) -> None:
    """Launch each once, several at a time: compiling takes most of the time."""
    with ThreadPoolExecutor(_COMPILERS) as pool:
        for started in [pool.submit(launch, sizes, 0) for sizes in options]:
            # what fails here fails again when it is measured
            started.exception()


def _result(part: TunePart, sizes: Any) -> Tensor | None:
    """What the kernel computes from the first copy; None if it cannot run."""
    part.out.zero_()
    try:
        part.launch(sizes, 0)
        return part.out.float().clone()
    except Exception:
        return None


def _is_same(got: Tensor | None, want: Tensor | None) -> bool:
    """Except for rounding; with nothing to compare with, everything is."""
    if got is None or want is None:
        return got is not None
    return bool((got - want).norm() <= _TOLERANCE * want.norm())


def _seconds(launch: Launch, sizes: Any, copies: int, time: Timer) -> float:
    try:
        return time([partial(launch, sizes, copy) for copy in range(copies)])
    except Exception:  # too many registers, too much shared memory, a tile that is not supported
        return math.inf


def graph_seconds(launches: Sequence[Callable[[], None]], repeats: int = 7) -> float:
    """The median time of one launch, all captured one after the other."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeats + 1):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000 / len(launches))
    return statistics.median(times[1:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def tune_cases(shapes: Iterable[DeviceShape], device: str) -> list[TuneCase]:
    """Every entry that models with these shapes need, each once."""
    found: dict[str, TuneCase] = {}
    for shape in shapes:
        own = (
            _matrix_cases(shape, device)
            if isinstance(shape, MatrixShape)
            else _expert_cases(shape, device)
        )
        for case in own:
            found.setdefault(case.shape, case)
    return list(found.values())


# -- products of one row --------------------------------------------------------------------------


def _matrix_cases(shape: MatrixShape, device: str) -> list[TuneCase]:
    if shape.kind == "int4":  # its tiles are those of the tensor cores
        return []
    kind = KINDS.index(shape.kind)
    default = default_gemv_size(kind, shape.count, shape.width)
    name = matrix_shape(shape.kind, shape.count, shape.width)
    return [TuneCase(name, default, partial(_open_matrix, shape, kind, device))]


def _open_matrix(shape: MatrixShape, kind: int, device: str) -> tuple[list[TunePart], int]:
    count, width = shape.count, shape.width
    form = FORMS.get(shape.kind)
    row_bytes = width * _BITS[shape.kind] // 8 if form is None else form.row_bytes(width)
    nbytes = count * row_bytes
    copies = _copies(nbytes)
    typed = (torch.bfloat16, torch.int8, torch.int32)[min(kind, 2)]
    weights = _random(copies * nbytes, device).view(typed).view(copies, count, -1)
    scales: Tensor | None = None
    if kind and form is None:
        pair = (torch.float16, torch.int32)[kind - 1]
        groups = copies * count * (width // 32)
        scales = _random(groups * pair.itemsize, device).view(pair).view(copies, count, -1)
    x = torch.randn((1, width), device=device).bfloat16()
    gain = torch.ones(width, device=device).bfloat16()
    out = torch.zeros((1, count), device=device).bfloat16()
    early = launches_early(torch.device(device))

    def launch(size: gemv.GemvSize, copy: int) -> None:
        own = None if scales is None else scales[copy]
        matrix = gemv.DeviceMatrix(weights[copy], own, count, width, kind)
        if shape.kernel == "add":
            gemv.product_add(x, matrix, out, size, early)
        elif shape.kernel == "gate_up":
            gemv.norm_gate_up(x, gain, 1e-6, matrix, out[:, : count // 2], size, early)
        else:
            gemv.norm_product(x, gain, 1e-6, matrix, out, size, None, early)

    halves = 2 if shape.kernel == "gate_up" else 1

    def options(_: Any) -> Iterator[gemv.GemvSize]:
        for rows, warps in product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)):
            if rows * halves <= count and _fits(halves * rows * width, shape.kind, warps):
                yield gemv.GemvSize(rows, warps)

    return [TunePart(options, launch, out)], copies


# -- experts --------------------------------------------------------------------------------------


def _expert_cases(shape: ExpertPoolShape, device: str) -> list[TuneCase]:
    record = DeviceRecord(shape.kind, shape.hidden, shape.intermediate)
    name = expert_shape("pairs", shape.kind, shape.hidden, shape.intermediate)
    pairs = TuneCase(name, default_pair_sizes(record), partial(_open_pairs, shape, device))
    many: dict[str, TuneCase] = {}
    for rows in _ROWS:
        sizes = choose_sizes(rows, shape.top_k, shape.experts, shape.kind, torch.bfloat16)
        name = many_shape(sizes, record)
        # the most rows that take these sizes
        many[name] = TuneCase(name, sizes, partial(_open_many, shape, sizes, rows, device))
    return [*([] if shape.kind == "int4" else [pairs]), *many.values()]


def _open_pairs(shape: ExpertPoolShape, device: str) -> tuple[list[TunePart], int]:
    copies = 8
    x, routed, pool, hidden = _experts(shape, 1, device, copies)
    acts = torch.zeros((shape.top_k, shape.intermediate), device=device).bfloat16()
    gain = torch.ones(shape.hidden, device=device).bfloat16()
    inner = torch.randn(acts.shape, device=device).bfloat16()
    early = launches_early(torch.device(device))

    def gate_up(sizes: PairSizes, copy: int) -> None:
        expert_gemv.pair_gate_up(x, routed[copy], pool, acts, sizes, gain, early)

    def down(sizes: PairSizes, copy: int) -> None:
        expert_gemv.pair_down(inner, routed[copy], pool, hidden, sizes, dependent=early)

    def gate_up_options(best: PairSizes) -> Iterator[PairSizes]:
        for rows, warps in product((2, 4, 8, 16, 32), (4, 8)):
            if _fits(2 * rows * shape.hidden, shape.kind, warps):
                yield replace(best, gate_up_rows=rows, gate_up_warps=warps)

    def down_options(best: PairSizes) -> Iterator[PairSizes]:
        for rows, warps, chunk in product((2, 4, 8, 16), (4, 8), (128, 256, 512)):
            if _fits(rows * shape.top_k * chunk, shape.kind, warps):
                yield replace(best, down_rows=rows, down_warps=warps, down_chunk=chunk)

    first = TunePart(gate_up_options, gate_up, acts)
    return [first, TunePart(down_options, down, hidden)], copies


def _open_many(
    shape: ExpertPoolShape, chosen: ManySizes, rows: int, device: str
) -> tuple[list[TunePart], int]:
    copies = 4
    x, routed, pool, hidden = _experts(shape, rows, device, copies)
    kept = (rows, shape.top_k, shape.experts, pool.record, torch.bfloat16, device)
    scratch = ExpertScratch.empty(*kept)
    early = launches_early(torch.device(device))
    slot = pool.record.nbytes if early else None

    def launch(sizes: ManySizes, copy: int) -> None:
        run_experts_many(x, routed[copy], pool, hidden, scratch, slot, early, sizes=sizes)

    def options(field: str, best: Any) -> Iterator[ManySizes]:
        for size in _many_options(chosen):
            yield replace(best, **{field: size})

    fields = ("gate_up", "down")
    return [TunePart(partial(options, field), launch, hidden) for field in fields], copies


def _many_options(chosen: ManySizes) -> Iterator[TileSize | Int4Size | GroupSize]:
    if isinstance(chosen, GroupSizes | SpanSizes):
        for block, stages, warps in product((64, 128, 256), (2, 3, 4), (4, 8)):
            yield GroupSize(block, 64, stages, warps)
    elif isinstance(chosen, Int4Sizes):
        for rows, warps, span in product((64, 128), (4, 8), (1, 2, 3)):
            if rows >= 16 * warps:
                yield Int4Size(rows, warps, span)
    else:
        for block, columns, stages, warps in product((32, 64, 128), (64, 128), (2, 3, 4), (4, 8)):
            yield TileSize(block, columns, stages, warps)


def _experts(
    shape: ExpertPoolShape, rows: int, device: str, copies: int
) -> tuple[Tensor, list[RoutedRows], ExpertPool, Tensor]:
    """Rows, `copies` different choices of experts for them, the experts, and room for the sum."""
    record = DeviceRecord(shape.kind, shape.hidden, shape.intermediate)
    places = torch.arange(shape.experts, device=device) * (record.nbytes // UNIT_BYTES)
    pool = ExpertPool(_random(shape.experts * record.nbytes, device), places, record)
    x = torch.randn((rows, shape.hidden), device=device).bfloat16()
    rule = GateRule(shape.top_k, normalise=True)
    choices = []
    for _ in range(copies):
        routed = RoutedRows.empty(rows, shape.top_k, device)
        routed.norms.fill_(1.0)
        expert_gemv.choose(
            torch.randn((rows, shape.experts), device=device), rule, None, places, routed
        )
        choices.append(routed)
    return x, choices, pool, torch.zeros_like(x)


def _random(nbytes: int, device: str) -> Tensor:
    """Bytes of which no number is infinite: their power and time are those of weights."""
    return torch.randint(0, 60, (nbytes,), dtype=torch.uint8, device=device)


def _copies(nbytes: int) -> int:
    return max(2, min(_MOST_COPIES, _COPIED_BYTES // nbytes))


def _fits(elements: int, kind: str, warps: int) -> bool:
    """Whether so many weights are a sensible load of the registers of a program."""
    padded: int = triton.next_power_of_2(elements)
    each = padded * _BITS[kind] // 32 / (32 * warps)
    return _LEAST_REGISTERS <= each <= _MOST_REGISTERS
