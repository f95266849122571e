"""The kernels of decoding rows with adapters compile for sm_90 (Hopper) without a GPU: no register
is spilled, patches are loaded 16 bytes at a time, and ranks are summed inside a thread; those of
few ranks copy weights to shared memory themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kernels.hopper import compiled, instructions, some_every_time

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(600)

B, F, I64 = "*bf16", "*fp32", "*i64"
NAMES = ("x", "raw", "weight", "scales", "bias", "y", "hidden", "gain", "summed", "normed", "acts")
TYPES = {
    **dict.fromkeys((*NAMES, "out"), B),
    **dict.fromkeys(("planes", "pieces", "terms", "made"), F),
    "table": I64,
    "eps": "fp32",
    **dict.fromkeys(("count", "sites", "room", "site", "before", "behind"), "i32"),
}
# Qwen3-0.6B
TILE = {"ROWS": 32, "COLUMNS": 32, "DEPTH": 128, "STAGES": 6, "RANKS": 16}
EARLY = {"FETCH": True, "PDL": True}
QKV = {
    "FIRST": 2048,
    "OTHER": 1024,
    "PARTS": 3,
    "WIDTH": 1024,
    "SHARE": 1024,
    "SPLITS": 1,
    "CHUNK": 16,
    "CHUNKS": 1,
    "BIAS": False,
    "EXPAND": True,
    "SHRINK": False,
}
DOWN = {
    "FIRST": 1024,
    "OTHER": 1024,
    "PARTS": 1,
    "WIDTH": 3072,
    "SHARE": 768,
    "SPLITS": 4,
    "CHUNK": 1024,
    "CHUNKS": 3,
    "BIAS": False,
    "EXPAND": False,
    "SHRINK": True,
}
GATE_UP = {"INNER": 3072, "WIDTH": 1024, "PATCH": True}
NORM = {
    "WIDTH": 1024,
    "PADDED": 1024,
    "PLANES": 4,
    "PIECES": 3,
    "PARTS": 3,
    "NORM": True,
    "PATCH": True,
    "RANKS": 16,
    "ALIGN": 8,
    "PDL": True,
}
ONE = {"WIDTH": 1024, "PADDED": 1024, "KIND": 0, "RANKS": 16, "PDL": True}
# name -> module, kernel, constants, warps, what it must and must not use
Case = tuple[str, str, dict[str, Any], int, tuple[str, ...], tuple[str, ...]]
SPILLS = ("LDL", "STL")
WIDE_LOADS = ("LDG.E.128",)
CASES: dict[str, Case] = {}
for kind, name in enumerate(("narrow", "deep", "wide")):
    tile = {**TILE, **EARLY, "KIND": kind}
    inside = (*SPILLS, "SHFL") if name == "narrow" else SPILLS
    CASES |= {
        f"qkv {name}": ("rows", "_product_rows", {**QKV, **tile}, 4, WIDE_LOADS, inside),
        f"down {name}": ("rows", "_product_rows", {**DOWN, **tile}, 4, WIDE_LOADS, SPILLS),
        f"norm {name}": ("rows", "_norm_rows", {**NORM, "KIND": kind}, 8, (), SPILLS),
        f"gate_up {name}": (
            "rows", "_gate_up_rows", {**GATE_UP, **tile, "RANKS": 8 if kind == 2 else 16},
            8 if kind == 2 else 4, WIDE_LOADS, SPILLS
        ),
    }  # fmt: skip
CASES |= {
    "one qkv": (
        "one", "_norm_product",
        {**ONE, "FIRST": 2048, "OTHER": 1024, "PARTS": 3, "PIECES": 256, "ROWS": 16, "BIAS": False},
        4, WIDE_LOADS, SPILLS,
    ),
    "one add": (
        "one", "_product_add", {**ONE, "COUNT": 1024, "PIECES": 8, "PARTS": 2, "ROWS": 4},
        4, WIDE_LOADS, SPILLS,
    ),
    "one gate_up": (
        "one", "_norm_gate_up", {**ONE, "INNER": 3072, "PIECES": 256, "ROWS": 16},
        4, WIDE_LOADS, SPILLS,
    ),
}  # fmt: skip
FEW = {"ROWS": 32, "COLUMNS": 32, "DEPTH": 64, "GROUP": 16, "PDL": True}
COPIES = (*WIDE_LOADS, "LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16")
NORM_SIZES = ("WIDTH", "PADDED", "PLANES", "PIECES", "PARTS", "PDL")
CASES |= {
    "few norm": (
        "few", "_narrow_norm", {**{name: NORM[name] for name in NORM_SIZES}, "WARPS": 8}, 8,
        WIDE_LOADS, SPILLS,
    ),
    "few qkv": (
        "few", "_narrow_product", {**QKV, **FEW, "WARPS": 4}, 4, COPIES, (*SPILLS, "SHFL"),
    ),
    "few down": (
        "few", "_narrow_product", {**DOWN, **FEW, "WARPS": 4}, 4, COPIES, SPILLS,
    ),
    "few gate_up": (
        "few", "_narrow_gate_up", {"INNER": 3072, "WIDTH": 1024, "EXPAND": True, **FEW}, 4,
        COPIES, (*SPILLS, "SHFL"),
    ),
}  # fmt: skip
EVERY_TIME = ("one add", "few qkv")


@pytest.mark.parametrize("case", some_every_time(CASES, EVERY_TIME))
def test_compiles_for_hopper(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from coterie.kernels.triton import narrow_rows, patched_gemv, row_products

    where, name, constants, warps, needed, unwanted = CASES[case]
    module = {"rows": row_products, "one": patched_gemv, "few": narrow_rows}[where]
    built = compiled(getattr(module, name), TYPES, constants, warps, ["room"], num_stages=2)
    used = instructions(built.asm["cubin"], tmp_path)
    assert all(any(each.startswith(name) for each in used) for name in needed), sorted(used)
    assert not any(each.startswith(name) for each in used for name in unwanted), sorted(used)
