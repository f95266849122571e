"""The kernels of latent attention compile for sm_90 (Hopper) without spills, on a machine without a
GPU, at DeepSeek-V2-Lite's shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kernels.hopper import compiled, instructions, some_every_time, usage

pytest.importorskip("triton")

B, F, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
STRIDES = ("wide_row", "wide_head", "turned_row", "turned_head", "q_stride", "low_stride")
TYPES = {
    **dict.fromkeys(("q", "low", "gain", "key_up", "value_up", "kv", "kept", "wide", "turned"), B),
    **dict.fromkeys(("cos", "sin", "partial", "stats"), F),
    **dict.fromkeys(("positions", "slots"), I64),
    **dict.fromkeys(("query_starts", "context_lens", "block_tables"), I32),
    **dict.fromkeys(("num_sequences", "table_stride", *STRIDES), "i32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    "out": B,
}
SPLIT = {"FEW": 16, "MOST": 32, "LONG": 2048}
SHAPE = {"HEADS": 16, "RANK": 512, "WIDE_RANK": 512}
ATTEND = {**SHAPE, **SPLIT, "ROPE": 64, "WIDE_ROPE": 64, "BLOCK_SIZE": 16, "GROUP": 16}
DECODE = {**ATTEND, "QUERIES": 1, "TILE": 64, "SPLITS": 16, "DECODE": True, "PDL": True}
PROMPT = {**ATTEND, "QUERIES": 4, "TILE": 32, "SPLITS": 1, "DECODE": False, "PDL": False}
PLACE = {
    **SHAPE, "NOPE": 128, "ROPE": 64, "WIDE_HEADS": 16, "WIDE_NOPE": 128, "WIDE_HALF": 32,
    "ROWS": 64, "TILES": 8, "UPS": 128, "KEEP": False, "PDL": True,
}  # fmt: skip
MERGE = {
    **SHAPE, **SPLIT, "VALUE": 128, "ROWS": 16, "TILES": 8, "TILE": 64, "SPLITS": 16, "MERGED": 8,
    "UP": True, "PDL": True,
}  # fmt: skip
# kernel, constants, warps, an instruction that it must have, the most registers of a thread
CASES: dict[str, tuple[str, dict[str, Any], int, str, int]] = {
    "place": ("_place_latent", PLACE, 4, "LDG.E.128", 64),
    "decode": ("_attend_latent", DECODE, 8, "HMMA", 168),
    "merge": ("_merge_latent", MERGE, 4, "LDG.E.128", 96),
    "prompt": ("_attend_latent", PROMPT, 8, "HGMMA", 255),
}


@pytest.mark.parametrize("case", some_every_time(CASES, ["place"]))
def test_compiles_for_hopper(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from coterie.kernels.triton import latent_attention

    name, constants, num_warps, needed, registers = CASES[case]
    kernel = vars(latent_attention)[name]
    built = compiled(kernel, TYPES, constants, num_warps, STRIDES, num_stages=2)
    used, stack = usage(built.asm["cubin"], tmp_path)
    assert used <= registers and stack == 0
    assert any(each.startswith(needed) for each in instructions(built.asm["cubin"], tmp_path))
