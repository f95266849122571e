"""The kernels of GGUF's blocks compile for sm_90 (Hopper), without spilled registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.weights.kinds import BLOCK_KINDS
from coterie.weights.kinds import KINDS as MATRIX_KINDS
from tests.helpers.kernels.hopper import compiled, some_every_time, usage

pytest.importorskip("triton")

BF16, WORDS = "*bf16", "*i32"
TYPES = {"x": BF16, "gain": BF16, "bias": BF16, "y": BF16, "out": BF16, "hidden": BF16}
TYPES |= {"weight": WORDS, "scales": WORDS, "index": "*i64", "eps": "fp32", "rows": "i32"}
TYPES |= {"count": "i32", "panels": "*u8"}
ONE: dict[str, Any] = {"WIDTH": 2048, "PADDED": 2048, "ROWS": 8, "PDL": True}
# module, kernel, constants
KERNELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "norm": ("gemv", "_norm_product", {**ONE, "COUNT": 2560, "BIAS": True}),
    "add": ("gemv", "_product_add", {**ONE, "COUNT": 2048, "ADD": True}),
    "gate_up": ("gemv", "_norm_gate_up", {**ONE, "INNER": 8192, "ROWS": 4}),
    "tiles": (
        "quant_linear", "_tile_product",
        {"COUNT": 8192, "WIDTH": 2048, "BLOCK": 64, "COLUMNS": 128, "X_ROWS": 16},
    ),
    "narrow": (
        "quant_linear", "_tile_product",
        {"COUNT": 2048, "WIDTH": 2048, "BLOCK": 16, "COLUMNS": 256, "X_ROWS": 16},
    ),
    "widen": (
        "quant_linear", "_widen_rows",
        {"WIDTH": 2048, "BLOCK": 16, "COLUMNS": 256, "INDEXED": False},
    ),
    "rows": (
        "quant_linear", "_widen_rows",
        {"WIDTH": 2048, "BLOCK": 1, "COLUMNS": 256, "INDEXED": True},
    ),
}  # fmt: skip
KERNELS["panels"] = ("panels", "_widen_panels", {"WIDTH": 2048, "COLUMNS": 256})
CASES = [f"{name} {kind}" for name in KERNELS for kind in BLOCK_KINDS]


@pytest.mark.parametrize("case", some_every_time(CASES, ("add q6_k", "tiles q5_0")))
def test_compiles_for_hopper(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from coterie.kernels.triton import gemv, panels, quant_linear
    from coterie.kernels.triton.unpack import KINDS

    name, kind = case.split()
    where, kernel, constants = KERNELS[name]
    module = {"gemv": gemv, "quant_linear": quant_linear, "panels": panels}[where]
    numbers = {**constants, "KIND": KINDS.index(kind)}
    if where == "panels":
        numbers |= {"EACH": MATRIX_KINDS[kind].columns, "BYTES": MATRIX_KINDS[kind].block_bytes}
    options: dict[str, Any] = {"launch_pdl": True} if where == "gemv" else {"num_stages": 3}
    built = compiled(getattr(module, kernel), TYPES, numbers, 4, **options)
    _, stack = usage(built.asm["cubin"], tmp_path)
    # a thread of the tiles of 64 rows may lack a few registers
    assert stack <= (64 if name == "tiles" else 0)
