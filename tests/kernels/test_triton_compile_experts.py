"""Experts of many rows compile for sm_90 (Hopper) without a GPU: no register is spilled, and the
loads and products are the wide ones that their speed depends on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kernels.hopper import compiled, instructions, some_every_time

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(600)

# Qwen3-30B-A3B
EXPERT = {"INNER": 768, "WIDTH": 2048}
I32, I64, BF16 = "*i32", "*i64", "*bf16"
POOLS = {
    0: (BF16, BF16, {"UNIT": 8, "SCALE_UNIT": 8, "KIND": 0}),
    1: ("*i8", "*fp16", {"UNIT": 16, "SCALE_UNIT": 8, "KIND": 1}),
    2: (I32, I32, {"UNIT": 4, "SCALE_UNIT": 4, "KIND": 2}),
}
GUESS = {"GUESSED": True, "TILES": 48, "ALL": 64}
PAIRS = {"row_pairs": I32, "spans": I32, "places": I64, "out": BF16}


def descriptor(*block: int) -> str:
    return f"tensordesc<bf16[{','.join(map(str, block))}]>"


def group(name: str) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    """A product of sorted rows that reads experts by pointers."""
    from coterie.kernels.triton import expert_groups

    sizes = expert_groups.GROUPS
    size = sizes.gate_up if name == "_group_gate_up" else sizes.down
    types = {**dict.fromkeys(("x", "acts", "pool", "out"), BF16), "places": I64}
    types |= dict.fromkeys(("row_pairs", "tiles", "tile_count"), I32) | {"pairs": "i32"}
    constants = {"UNIT": 8, "DOWN_AT": 3_145_728, "TOP_K": 8, "TILE": sizes.tile, **EXPERT}
    constants |= {"BLOCK": size.block, "COLUMNS": size.columns, "PROGRAMS": 132}
    return name, types, constants, {"num_warps": size.warps, "num_stages": size.stages}


def span(name: str, chosen: str) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    """A product of tiles with tails."""
    from coterie.kernels.triton import expert_groups

    sizes = getattr(expert_groups, chosen)
    gate_up = name == "span_gate_up"
    size = sizes.gate_up if gate_up else sizes.down
    tail = sizes.tail if gate_up or not sizes.flat else 0
    matrices = (2 - sizes.flip,) if gate_up else ()
    types = {**dict.fromkeys(("x", "out"), BF16), "places": I64, "pairs": "i32"}
    types |= dict.fromkeys(("row_pairs", "tiles", "tile_count"), I32)
    types |= {
        "acts": descriptor(sizes.tile, size.columns),
        "acts_tail": descriptor(tail or sizes.tile, size.columns),
        "pool": descriptor(1, *matrices, size.block, size.columns),
    }
    constants = {"SLOT": 589_824, "TOP_K": 8, "TILE": sizes.tile, "TAIL": tail, **EXPERT}
    constants |= {"BLOCK": size.block, "COLUMNS": size.columns, "PROGRAMS": 132}
    constants |= {"FLIP": sizes.flip, "FLATTEN": sizes.flat}
    return name, types, constants, {"num_warps": size.warps, "num_stages": size.stages}


def tile(
    name: str, kind: int, widest: bool = False
) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    from coterie.kernels.triton import expert_groups

    own = expert_groups.WIDEST_TILES if widest else expert_groups.TILES
    size = own.gate_up if name == "_tile_gate_up" else own.down
    matrices, scales, constants = POOLS[kind]
    types = {"x": BF16, "acts": BF16, "pool": matrices, "pool_scales": scales, **PAIRS}
    places = {"DOWN_AT": 393_216, "SCALES_AT": 1 << 20, "TOP_K": 8, **EXPERT}
    sizes = {"COUNT": own.count, "BLOCK": size.block, "COLUMNS": size.columns, "PDL": True}
    options = {"num_warps": size.warps, "num_stages": size.stages, "launch_pdl": True}
    return name, types, {**constants, **places, **sizes}, options


def int4(
    name: str, count: int, span: int
) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    types = {"x": I32, "acts": I32, "pool": I32, **PAIRS}
    constants = {"UNIT": 4, "DOWN_AT": 393_216, "SCALES_AT": 589_824, "TOP_K": 8, **EXPERT}
    options = {"num_warps": 4, "launch_pdl": True}
    return (
        name,
        types,
        {**constants, "COUNT": count, "ROWS": 64, "SPAN": span, "WARPS": 4, "PDL": True},
        options,
    )


def rows(name: str, **sizes: Any) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    """int4 products of single rows."""
    from coterie.kernels.triton import int4_rows

    words = dict.fromkeys(("x", "gain", "acts", "weight", "scales", "pool"), I32)
    types = {**words, "chosen": I64, "norms": "*fp32", "weights": "*fp32", "out": BF16}
    types |= {"taken": I32, "ids": I32, "state": I32, "copied": "i64"}
    types |= {"hidden": BF16, "y": BF16, "bias": BF16, "eps": "fp32", "rows": "i32"}
    warps = {
        "_int4_pair_gate_up": int4_rows.GATE_UP_WARPS,
        "_int4_pair_down": int4_rows.DOWN_WARPS,
    }.get(name, int4_rows.PRODUCT_WARPS)
    places = {"UNIT": 4, "DOWN_AT": 393_216, "SCALES_AT": 589_824, "TOP_K": 8}
    flags = {"NORM": True, "BIAS": False, "ADD": True, "X_ROWS": 1, "PDL": True, "WARPS": warps}
    flags |= {"TAKEN": False, "GUESSED": False}
    options = {"num_warps": warps, "launch_pdl": True}
    return name, types, {**EXPERT, **places, **flags, **sizes}, options


def shared(name: str) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    """What a step and the CPU tell each other."""
    words = ["ids", "table", "taken", "state", "rung", "job", "pairs", "failed"]
    words.append("prefetched")
    floats = ("norms", "weights", "rows")
    types = {**dict.fromkeys(words, I32), **dict.fromkeys(floats, "*fp32"), "tiers": "*i8"}
    types |= dict.fromkeys(("x", "gain", "hidden"), BF16) | dict.fromkeys(("clock", "sums"), I64)
    types |= {"layer": "i32", "limit": "i64", "answer": I64}
    sizes = {"COUNT": 16, "TOP_K": 8, "STRIDE": 8, "PAIRS": 128, "WIDE": 2048, **EXPERT}
    return (
        name,
        types,
        {**sizes, "NORM": True, "WHOLE": False, **GUESS, "UNIT": 32, "PDL": True},
        {"num_warps": 4, "launch_pdl": True},
    )


def answer() -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    name, types, constants, options = shared("_await_cpu")
    sizes = {"COLUMNS": 1024, "PAUSE": 250, "SPACES": 32, "SPACE": 8 * 2048}
    return name, types, {**constants, **sizes}, {**options, "num_warps": 16}


def ahead() -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    """What is read ahead over the link."""
    words = ("pool", "buffer", "state", "before", "ids")
    types = {**dict.fromkeys(words, I32), **dict.fromkeys(("places", "sums", "told", "slots"), I64)}
    copies = {"UNIT": 4, "ROWS": 4096, "WORDS": 4096, "SCALES_AT": 589_824, "SCALES": 1024}
    sizes = {"PADDED": 1024, "CHOICES": 8, "MANY": 8, "SUMS": 4, "COUNTS": True}
    return "_prefetch", types, {**EXPERT, **copies, **sizes, **GUESS}, {"num_warps": 16}


def route(**more: Any) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    types = dict.fromkeys(("x", "gain", "gate", "penalty"), BF16)
    types |= {"places": I64, "chosen": I64, "tiers": "*i8", "eps": "fp32", "layer": "i32"}
    types |= dict.fromkeys(("logits", "weights", "norms"), "*fp32")
    types |= dict.fromkeys(("counts", "count", "ids", "state", "hint"), I32)
    types |= {f"next_{name}": types[name] for name in ("gain", "gate", "penalty", "logits")}
    types |= {"next_tiers": "*i8", "next_count": I32, "next_state": I32}
    sizes: dict[str, Any] = {
        "WIDE": 2048,
        "EXPERTS": 128,
        "PADDED": 128,
        "TOP_K": 8,
        "NORMALISE": True,
    }
    sizes |= {"SCALE": 1.0, "EQUAL": False, "PENALTY": False, "GUESSED": False, "NEXT": False}
    sizes |= {
        "NEXT_PENALTY": False,
        "HINTS": 0,
        "COPIED": 1,
        "HINT_WORDS": 16,
        "HINT_HEAD": 3,
        "PDL": True,
    }
    return "_route", types, {**EXPERT, **sizes, **more}, {"num_warps": 4, "launch_pdl": True}


def widen(kind: int) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    matrices, scales, constants = POOLS[kind]
    types = {"pool": matrices, "pool_scales": scales, "places": I64, "spans": I32, "out": BF16}
    types["out_places"] = I64
    places = {"AT": 0, "SCALES_AT": 1 << 20, "OUT_AT": 0, "SIZE": 4_718_592, "OUT_UNIT": 8}
    sizes = {"COUNT": 1536, "COLUMNS": 2048, "BLOCK": 16, "CHUNK": 256}
    return "_widen", types, {**constants, **places, **sizes}, {"num_warps": 4}


def sort(name: str) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    names = ["ids", "counts", "totals", "starts", "spans", "tiles", "tile_counts"]
    names += ["pair_rows", "row_pairs"]
    types = {**dict.fromkeys(names, I32), "pairs": "i32", "blocks": "i32", "list_size": "i32"}
    sizes = {"EXPERTS": 128, "PADDED": 128, "BLOCK": 256, "TILE": 128, "WIDE": 256, "CHUNK": 512}
    sizes |= {"LONG": 128, "FLAT": 128, "PDL": False}
    warps = 4 if name in ("_find_pairs", "_sort_few") else 8
    return name, types, sizes, {"num_warps": warps}


def arranged(kind: int) -> tuple[str, dict[str, str], dict[str, Any], dict[str, int]]:
    types = {"words": I32, "halves": "*i16", "out": I32, "out_halves": "*i16"}
    whole = ["up_at", "down_at", "inner_tiles", "hidden_tiles", "inner_panels", "inner_words"]
    whole += ["hidden_words", "up_out", "down_out", "gate_scales", "up_scales", "down_scales"]
    constants = {"KIND": kind, "BIAS": True, "WORDS": 128}
    return "_arrange", {**types, **dict.fromkeys(whole, "i32")}, constants, {"num_warps": 4}


# the instructions that a kernel must have, and those that it must not have
TMA = (("UTMALDG", "HGMMA", "STG.E.128"), ("LDL", "STL"))
SPANNED = ((*TMA[0], "LDGSTS.E.BYPASS.128"), TMA[1])
TILED = (("LDGSTS.E.BYPASS.128", "HGMMA"), ("LDL", "STL"))
# int4 words go from memory to the tensor cores in the registers of one thread
DIRECT = (("LDG.E.128", "HMMA.16816.F32.BF16"), ("LDL", "STL", "LDSM", "SHFL"))
BY_ROW = (("LDG.E.128", "LDG.E.64", "HMMA.16816.F32.BF16"), ("LDL", "STL", "LDSM"))
# what comes over the link is loaded in whole lines, and then exchanged inside the warp
BY_LINE = (("LDG.E.128", "SHFL.IDX", "HMMA.16816.F32.BF16"), ("LDL", "STL", "LDSM"))
WIDENED = (("LDG.E.128", "STG.E.128"), ("LDL", "STL"))
PLAIN: tuple[tuple[str, ...], tuple[str, ...]] = ((), ("LDL", "STL"))
CASES: dict[str, tuple[Any, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "spans gate_up": (lambda: span("span_gate_up", "SPANS"), SPANNED),
    "flat spans gate_up": (lambda: span("span_gate_up", "LARGE_SPANS"), SPANNED),
    "spans down": (lambda: span("span_down", "SPANS"), TMA),
    "flat spans down": (lambda: span("span_down", "LARGE_SPANS"), TMA),
    "few spans gate_up": (lambda: span("span_gate_up", "FEW_SPANS"), SPANNED),
    "few spans down": (lambda: span("span_down", "FEW_SPANS"), TMA),
    "groups gate_up": (lambda: group("_group_gate_up"), TILED),
    "groups down": (lambda: group("_group_down"), TILED),
    "tiles gate_up": (lambda: tile("_tile_gate_up", 0), TILED),
    "tiles down": (lambda: tile("_tile_down", 0), TILED),
    "tiles gate_up widest": (lambda: tile("_tile_gate_up", 0, True), TILED),
    "tiles down widest": (lambda: tile("_tile_down", 0, True), TILED),
    "tiles gate_up int8": (lambda: tile("_tile_gate_up", 1), PLAIN),
    "tiles gate_up int4": (lambda: tile("_tile_gate_up", 2), PLAIN),
    "tiles down int8": (lambda: tile("_tile_down", 1), PLAIN),
    "int4 gate_up": (lambda: int4("_int4_gate_up", 8, 2), DIRECT),
    "int4 down": (lambda: int4("_int4_down", 8, 3), DIRECT),
    "int4 gate_up wide": (lambda: int4("_int4_gate_up", 16, 2), DIRECT),
    "int4 down wide": (lambda: int4("_int4_down", 16, 2), DIRECT),
    "int4 gate_up widest": (lambda: int4("_int4_gate_up", 32, 1), DIRECT),
    "int4 down widest": (lambda: int4("_int4_down", 32, 1), DIRECT),
    "int4 rows gate_up": (lambda: rows("_int4_pair_gate_up"), BY_ROW),
    "int4 rows down": (lambda: rows("_int4_pair_down"), BY_ROW),
    "int4 rows gate_up of some": (lambda: rows("_int4_pair_gate_up", TAKEN=True), BY_LINE),
    "int4 rows down of some": (lambda: rows("_int4_pair_down", TAKEN=True), BY_LINE),
    "int4 rows gate_up of a guess": (
        lambda: rows("_int4_pair_gate_up", TAKEN=True, GUESSED=True),
        BY_LINE,
    ),
    # one thread asks whether to go on, and tells the others
    "prefetch": (
        ahead,
        ((*WIDENED[0], "ATOMG.E.OR", "LDS"), (*WIDENED[1], "LDG.E.STRONG")),
    ),
    "route": (route, PLAIN),
    "route and guess": (lambda: route(GUESSED=True, NEXT=True, HINTS=7), PLAIN),
    "route and hint": (lambda: route(NEXT=True, HINTS=8, COPIED=0), PLAIN),
    "ring": (lambda: shared("_ring"), (("MEMBAR.ALL.SYS",), ("LDL", "STL"))),
    "await": (answer, (("LDG.E.128.STRONG.SYS", "NANOSLEEP"), ("LDL", "STL"))),
    "int4 rows qkv": (lambda: rows("_int4_product", COUNT=5120, ADD=False), BY_ROW),
    "int4 rows o": (lambda: rows("_int4_product", COUNT=2048, WIDTH=4096, NORM=False), BY_ROW),
    "int4 rows o of 8": (
        lambda: rows("_int4_product", COUNT=2048, WIDTH=4096, NORM=False, X_ROWS=8),
        BY_ROW,
    ),
    "widen int4": (lambda: widen(2), WIDENED),
    "widen int8": (lambda: widen(1), WIDENED),
    "find pairs": (lambda: sort("_find_pairs"), PLAIN),
    "sort few": (lambda: sort("_sort_few"), PLAIN),
    "count pairs": (lambda: sort("_count_pairs"), PLAIN),
    "place experts": (lambda: sort("_place_experts"), PLAIN),
    "place pairs": (lambda: sort("_place_pairs"), PLAIN),
    "arrange bf16": (lambda: arranged(0), PLAIN),
    "arrange int8": (lambda: arranged(1), PLAIN),
    "arrange int4": (lambda: arranged(2), PLAIN),
}
EVERY_TIME = ("tiles down", "find pairs")


def used_by(
    made: tuple[str, dict[str, str], dict[str, Any], dict[str, Any]], folder: Path
) -> Counter[str]:
    name, types, constants, options = made
    built = compiled(kernel_of(name), types, constants, options.pop("num_warps"), **options)
    return instructions(built.asm["cubin"], folder)


@pytest.mark.parametrize("case", some_every_time(CASES, EVERY_TIME))
def test_compiles_for_hopper(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    make, (needed, unwanted) = CASES[case]
    used = used_by(make(), tmp_path)
    for name in needed:
        assert any(each.startswith(name) for each in used), (name, sorted(used))
    for name in unwanted:
        assert not any(each.startswith(name) for each in used), (name, sorted(used))


def test_an_answer_is_read_by_one_load_of_each_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # at first, and again while it is not there; more would wait for one another
    assert used_by(answer(), tmp_path)["LDG.E.128.STRONG.SYS"] == 2


def kernel_of(name: str) -> Any:
    from coterie.kernels.triton import (
        arrange,
        cpu_share,
        expert_gemv,
        expert_groups,
        expert_int4,
        expert_spans,
        expert_tiles,
        int4_rows,
        link_prefetch,
    )

    modules = (
        link_prefetch,
        expert_gemv,
        expert_groups,
        expert_int4,
        expert_spans,
        expert_tiles,
        int4_rows,
        arrange,
        cpu_share,
    )
    return next(vars(module)[name] for module in modules if name in vars(module))
