"""Experts of many rows in Triton against their torch twin, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, relative

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(600)

HIDDEN, INNER, EXPERTS, TOP_K, ROWS = 96, 64, 5, 3, 7
# fp16 stands for every 16-bit type: the interpreter has no bf16
TOLERANCE = {"float32": 1e-5, "float16": 4e-3}
ROADS = ("tiles", "groups")
CASES = [f"{road}/{kind}/float32" for road in ROADS for kind in ("fp32", "int8", "int4")]
CASES += [f"{road}/int4/float16" for road in ("tiles", "gluon 1", "gluon 2")]
# tensor descriptors over slots with a gap behind each, and over widened experts
CASES += [f"spans{road}/fp32/float32" for road in ("", " flip", " flat", " balanced")]
CASES += ["spans/int4/float16", "spans without slots/fp32/float32"]
# the interpreter is slow: `make test` runs the others
MORE = [f"{road}/int4/float32" for road in ROADS] + ["tiles/int4/float16", "groups/int8/float32"]
MORE += ["spans without slots/fp32/float32", "spans flat/fp32/float32", "tiles/int8/float32"]
MORE += ["spans flip/fp32/float32", "gluon 1/int4/float16"]
TWINS = [case for case in CASES if case not in MORE]
# sorted with the same scratch one after the other
SORTS = ["sort/order", "sort/again", "sort/balanced", "sort/few", "sort/none"]
CASES = [*TWINS, *SORTS]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, CASES)


@pytest.mark.parametrize("case", TWINS)
def test_experts_match_twin(errors: dict[str, float], case: str) -> None:
    assert errors[case] < TOLERANCE[case.rsplit("/", 1)[1]]


@pytest.mark.full
def test_more_experts_match_twin() -> None:
    found = interpreted(__file__, MORE)
    assert all(found[case] < TOLERANCE[case.rsplit("/", 1)[1]] for case in MORE)


@pytest.mark.parametrize("case", SORTS)
def test_sort(errors: dict[str, float], case: str) -> None:
    assert errors[case] == 0.0


# what cases replace in the module that chooses kernels
REPLACED = ("choose_sizes", "_block", "_FEW_SORTED", "Int4Sizes", "int4_gate_up", "int4_down")


def random_pool(kind: str, generator: Any) -> tuple[Any, int]:
    """Experts in shuffled slots, with a gap behind each that is not a whole row of any matrix."""
    from coterie.kernels.device_record import UNIT_BYTES, DeviceRecord
    from coterie.kernels.triton.expert_gemv import ExpertPool

    record = DeviceRecord(kind, HIDDEN, INNER)
    slot = record.nbytes + 3 * UNIT_BYTES
    base = torch.zeros((EXPERTS + 1) * slot, dtype=torch.uint8)
    order = torch.randperm(EXPERTS + 1, generator=generator)[:EXPERTS]
    for index in order.tolist():
        own = base[index * slot :]
        matrices, scales = own[: record.gate_up_scales_at], own[record.gate_up_scales_at :]
        scales = scales[: record.nbytes - record.gate_up_scales_at].view(torch.float16)
        if kind == "fp32":
            matrices.view(torch.float32).normal_(0, 0.1, generator=generator)
            continue
        matrices.random_(0, 256, generator=generator)
        drawn = torch.rand(len(scales), generator=generator)
        scales.copy_(drawn * 0.002 + 0.001 if kind == "int8" else drawn * 0.02 + 0.01)
        if kind == "int4":
            # the minimum: about eight steps below zero
            scales[1::2] = -8 * scales[::2] + scales[1::2] * 0.5
    return ExpertPool(base, order * (slot // UNIT_BYTES), record), slot


def random_rows(dtype: Any, generator: Any) -> tuple[Any, Any]:
    from coterie.kernels.triton.expert_gemv import RoutedRows

    x = torch.randn((ROWS, HIDDEN), generator=generator).to(dtype)
    routed = RoutedRows.empty(ROWS, TOP_K, "cpu")
    # uneven, so that one expert has more than a tile and one has none
    drawn = torch.rand((ROWS, EXPERTS), generator=generator)
    drawn[:, 0] += 1
    drawn[:, 3] -= 1
    routed.ids.copy_(drawn.topk(TOP_K).indices)
    routed.weights.copy_(torch.rand((ROWS, TOP_K), generator=generator))
    return x, routed


def experts_error(name: str, generator: Any) -> float:
    from coterie.kernels.triton import expert_groups
    from coterie.kernels.triton.expert_gemv import experts_torch

    many: Any = expert_groups
    road, kind, dtype_name = name.split("/")
    dtype = getattr(torch, dtype_name)
    pool, slot = random_pool(kind, generator)
    x, routed = random_rows(dtype, generator)
    hidden = torch.randn((ROWS, HIDDEN), generator=generator).to(dtype)
    want = hidden.float() + experts_torch(x, routed.ids, routed.weights, pool)
    tiles = many.TileSizes(4, many.TileSize(32, 64, 1, 4), many.TileSize(64, 32, 1, 4))
    size = many.GroupSize(64, 64, 1, 4)
    sizes: Any = tiles if road == "tiles" else many.GroupSizes(4, size, size)
    if road.startswith("gluon"):
        span = int(road[-1])
        size = many.Int4Size(64, 4, span)
        sizes = use_interpreted_int4(many, dtype)(8, size, size)
    if road.startswith("spans"):
        ways = {way: way in road for way in ("flip", "flat", "balanced")}
        sizes = many.SpanSizes(4, 2, size, size, **ways)
    many.choose_sizes = lambda *_: sizes
    # another layer of the model has larger experts
    largest = replace(pool.record, intermediate=2 * INNER)
    scratch = many.ExpertScratch.empty(ROWS, TOP_K, EXPERTS, largest, dtype, "cpu")
    scratch.values.fill_(float("nan"))
    scratch.acts.fill_(float("nan"))
    if road.startswith("spans") and kind == "fp32" and "without" not in road:
        many.sort_pairs(routed, EXPERTS, sizes, scratch)
        many.span_products(x, pool, slot, scratch, sizes)
        many.combine(scratch.values, routed, EXPERTS, hidden, scratch.pair_rows)
        return relative(hidden, want)
    gain = torch.randn(HIDDEN, generator=generator).to(dtype)
    norm = many.RowNorm(gain, 1e-6, torch.empty_like(hidden))
    many.run_experts_many(x, routed, pool, hidden, scratch, norm=norm)
    wide = hidden.float()
    normed = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * gain.float()
    return max(relative(hidden, want), relative(norm.out, normed))


def use_interpreted_int4(many: Any, dtype: Any) -> Any:
    """The Gluon kernels as the interpreter runs them; their class of sizes."""
    from coterie.kernels.triton import expert_int4
    from tests.helpers.kernels.gluon_interpreter import interpreted

    found = interpreted(expert_int4, dtype)
    many.Int4Sizes, many.int4_gate_up = found.Int4Sizes, found.int4_gate_up
    many.int4_down = found.int4_down
    return found.Int4Sizes


def sort_errors(generator: Any) -> dict[str, float]:
    """Several blocks of pairs; some pairs have no expert."""
    from coterie.kernels.device_record import DeviceRecord
    from coterie.kernels.triton import expert_groups
    from coterie.kernels.triton.expert_gemv import RoutedRows

    many: Any = expert_groups
    rows, tile, tail = 45, 6, 2
    many._block = lambda _: 16
    size = many.FP32_GROUPS.down
    sizes = many.SpanSizes(tile, tail, size, size, flat=True)
    many.choose_sizes = lambda *_: sizes
    record = DeviceRecord("fp32", 32, 32)
    scratch = many.ExpertScratch.empty(rows, TOP_K, EXPERTS, record, torch.float32, "cpu")
    found = {}
    for name in SORTS:
        routed = RoutedRows.empty(rows, TOP_K, "cpu")
        last = 0 if name == "sort/none" else EXPERTS
        ids = routed.ids.view(-1)
        ids.copy_(torch.randint(-1, last, ids.shape, generator=generator))
        many._FEW_SORTED = 1 << 20 if name == "sort/few" else 0
        balanced = name in ("sort/balanced", "sort/few")
        if balanced:
            # a long tile, and a short one
            for expert, kept in ((0, tile - 1), (2, tile + 1)):
                ids[(ids == expert).nonzero().flatten()[kept:]] = -1
        many.sort_pairs(routed, EXPERTS, replace(sizes, balanced=balanced), scratch)
        wrong, row = 0, 0
        lists: list[list[list[int]]] = [[], []]
        for expert in range(EXPERTS):
            own = (ids == expert).nonzero().flatten()
            end = row + len(own)
            wrong += scratch.spans[expert].tolist() != [row, len(own)]
            wrong += scratch.row_pairs[row:end].tolist() != own.tolist()
            wrong += scratch.pair_rows[own].tolist() != list(range(row, end))
            for tiles, step in zip(lists, (tile + tail, tile), strict=True):
                tiles += [[expert, at, min(at + step, end)] for at in range(row, end, step)]
            row = end
        if balanced:
            counts = torch.bincount(ids[ids >= 0], minlength=EXPERTS).tolist()
            lists[0].sort(
                key=lambda one: (counts[one[0]] <= tile + tail) + (counts[one[0]] <= tile)
            )
        for number, tiles in enumerate(lists):
            wrong += int(scratch.tile_counts[number]) != len(tiles)
            wrong += scratch.tiles[number, : len(tiles)].tolist() != tiles
        wrong += int((scratch.pair_rows[(ids < 0).nonzero().flatten()] != -1).sum())
        wrong += int(scratch.totals.abs().sum())
        found[name] = float(wrong)
    return found


def measure(cases: list[str]) -> dict[str, float]:
    """Relative errors, and what is wrong in sorted pairs."""
    from coterie.kernels.triton import expert_groups as many

    generator = torch.Generator().manual_seed(7)
    # what cases replace is put back
    with patch.multiple(many, **{name: getattr(many, name) for name in REPLACED}):
        found = {case: experts_error(case, generator) for case in cases if case not in SORTS}
        return found | (sort_errors(generator) if SORTS[0] in cases else {})
