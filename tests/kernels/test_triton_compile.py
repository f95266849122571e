"""Every Triton kernel compiles for sm_90 (Hopper) on a machine without a GPU.

The interpreter takes what the compiler refuses: types, branches, shared memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.kernels.hopper import compiled, some_every_time, usage

pytest.importorskip("triton")

B, F, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
ATTEND: dict[str, Any] = {
    "HEADS": 16,
    "GROUP": 2,
    "HEAD_DIM": 128,
    "DIM": 128,
    "BLOCK_SIZE": 16,
}
STRIDES = dict.fromkeys(("table_stride", "half_stride", "block_stride", "head_stride"), "i32")
PATCHED = {"sites": "i32", "room": "i32"}
ATTEND_ARGS = {
    "out": B,
    "partial": F,
    "stats": F,
    "q": B,
    "kv": B,
    "scale": "fp32",
    "query_starts": I32,
    "context_lens": I32,
    "block_tables": I32,
    "tiles": I32,
    "num_sequences": "i32",
    **STRIDES,
}
DECODE = {**ATTEND, "QUERIES": 1, "ROWS": 16, "TILE": 64, "SPLITS": 8, "DECODE": True}
PREFILL = {**ATTEND, "QUERIES": 32, "ROWS": 64, "TILE": 64, "SPLITS": 1, "DECODE": False}
HEADS_ARGS = {
    "qkv": B,
    "bias": B,
    "q_norm": B,
    "k_norm": B,
    "cos": F,
    "sin": F,
    "positions": I64,
    "slots": I64,
    "q": B,
    "kv": B,
    "table": I64,
    "terms": F,
    "eps": "fp32",
    "q_site": "i32",
    **STRIDES,
    **PATCHED,
}
NORM_ARGS = {
    **dict.fromkeys(("hidden", "delta", "source", "weight", "summed", "normed"), B),
    "terms": F,
    "table": I64,
    "shrunk": F,
    "eps": "fp32",
    "before": "i32",
    "behind": "i32",
    **PATCHED,
}
SILU_ARGS = {
    "gate_up": B,
    "table": I64,
    "terms": F,
    "out": B,
    "shrunk": F,
    "gate_site": "i32",
    **PATCHED,
}
# behind o, with its terms made on the way; and behind down, whose terms come in pieces
AFTER_O = {"SOURCE": 2048, "SOURCE_PADDED": 2048, "SPLITS": 1, "PARTS": 2, "ADD": True}
AFTER_DOWN = {"SOURCE": 0, "SOURCE_PADDED": 1, "SPLITS": 32, "PARTS": 3, "ADD": True}
NARROW = {"RANKS": 16, "KIND": 0, "SHARES": 2, "ALIGN": 8}
DEEP = {"RANKS": 16, "KIND": 1, "SHARES": 1, "ALIGN": 16}
WIDE = {"RANKS": 8, "KIND": 2, "SHARES": 1, "ALIGN": 8}
ROWS = {"RANKS": 16, "KIND": 0}
PADDED = {"WIDTH": 2048, "PADDED": 2048}
HEADS = {"HEADS": 16, "KV_HEADS": 8, "HEAD_DIM": 128, "HALF": 64, "BLOCK_SIZE": 16}
FETCHING = {"PATCH": True, "FETCHED": 7, "KIND": 2}
PLAIN = {"BIAS": True, "NORM": True, "PATCH": False, "FETCHED": 0, **ROWS}
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any], int]] = {
    "decode": ("_attend", ATTEND_ARGS, DECODE, 4),
    "prefill": ("_attend", {**ATTEND_ARGS, "partial": B, "stats": B}, PREFILL, 4),
    "tiles": (
        "_prompt_tiles",
        {"query_starts": I32, "context_lens": I32, "tiles": I32, "num_sequences": "i32"},
        {"QUERIES": 32, "EACH": 512},
        4,
    ),
    "combine": (
        "_combine",
        {"out": B, "partial": F, "stats": F},
        {"HEAD_DIM": 128, "DIM": 128, "SPLITS": 8},
        1,
    ),
    "norm": (
        "_add_norm",
        {"hidden": B, "delta": B, "weight": B, "normed": B, "eps": "fp32"},
        {"WIDTH": 576, "PADDED": 1024, "ADD": True},
        4,
    ),
    "heads": ("_place_heads", HEADS_ARGS, {**HEADS, **PLAIN}, 1),
    "heads patched": ("_place_heads", HEADS_ARGS, {**HEADS, **PLAIN, **FETCHING}, 1),
    "norm patched": ("_norm_rows", NORM_ARGS, {**PADDED, **AFTER_O, **NARROW}, 16),
    "norm patched deep": ("_norm_rows", NORM_ARGS, {**PADDED, **AFTER_O, **DEEP}, 8),
    "norm patched wide": ("_norm_rows", NORM_ARGS, {**PADDED, **AFTER_DOWN, **WIDE}, 16),
    "silu patched": (
        "_silu_rows",
        SILU_ARGS,
        {"WIDTH": 3072, "CHUNK": 128, "CHUNKS": 24, "ALIGN": 8, **ROWS},
        1,
    ),
    "silu": ("_silu_mul", {"gate_up": B, "out": B}, {"WIDTH": 3072, "CHUNK": 1024}, 4),
}
EVERY_TIME = ("silu patched",)


@pytest.mark.parametrize("case", some_every_time(CASES, EVERY_TIME))
def test_compiles_for_hopper(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from coterie.kernels.triton import attention as triton_attention
    from coterie.kernels.triton import layers as triton_layers
    from coterie.kernels.triton import patches as triton_patches

    name, types, constants, num_warps = CASES[case]
    modules = (triton_attention, triton_layers, triton_patches)
    kernel = next(vars(module)[name] for module in modules if name in vars(module))
    built = compiled(kernel, types, constants, num_warps, aligned=None, num_stages=2)
    assert len(built.asm["cubin"]) > 0


@pytest.mark.full
def test_decoding_rows_request_several_tiles(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop over the whole context keeps stages - 1 tiles of keys and values on their way: they
    have a place each in shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from coterie.kernels.triton.whole_attention import _attend_whole

    tile, stages = 16, 3
    types = {
        **dict.fromkeys(("qkv", "q_norm", "k_norm", "kv", "out"), B),
        **dict.fromkeys(("cos", "sin"), F),
        **dict.fromkeys(("positions", "slots"), I64),
        **dict.fromkeys(("eps", "scale"), "fp32"),
        "block_tables": I32,
        "width": "i32",
        **STRIDES,
    }
    constants = {
        **HEADS, "DIM": 128, "ROWS": 16, "GROUP": 2, "TILE": tile, "LARGE": False, "NORM": True,
        "PDL": False,
    }  # fmt: skip
    built = compiled(_attend_whole, types, constants, 1, ["half_stride"], num_stages=stages)
    both = 2 * tile * 128 * 2
    assert (stages - 1) * both <= built.metadata.shared < stages * both
    # nothing is spilled
    assert usage(built.asm["cubin"], tmp_path)[1] == 0
