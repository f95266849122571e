"""The structures of csrc/types.h and the signatures of the native entry points, for ctypes.

The order and widths of fields must match the C side; only this module knows them in Python.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

from coterie.weights.kinds import KINDS as MATRIX_KINDS
from coterie.weights.kinds import SPLIT_TYPES

# the number of each kind of matrix
KINDS = {name: number for number, name in enumerate(MATRIX_KINDS)}

# blocks of a file that become panels of another kind: the numbers of enum Source
SPLIT_SOURCES = {name: 64 + number for number, name in enumerate(SPLIT_TYPES)}


class Part(Structure):
    _fields_: ClassVar = [("kind", c_int32), ("rows", c_int32), ("data", c_void_p)]


class Matrix(Structure):
    _fields_: ClassVar = [
        ("num_parts", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("panels", c_int32),
        ("parts", POINTER(Part)),
    ]


class Shape(Structure):
    _fields_: ClassVar = [
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    ]


class Layer(Structure):
    _fields_: ClassVar = [
        ("input_norm", c_void_p),
        ("qkv", POINTER(Matrix)),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("o", POINTER(Matrix)),
        ("post_norm", c_void_p),
        ("gate_up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
        ("whole_norm", c_int32),
        ("moe", c_void_p),  # MoePart, or null
    ]


class Batch(Structure):
    _fields_: ClassVar = [
        ("rows", c_int64),
        ("sequences", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("max_blocks", c_int64),
        ("block_size", c_int64),
    ]


class Cache(Structure):
    _fields_: ClassVar = [("data", c_void_p), ("num_blocks", c_int64), ("is_bf16", c_int32)]


class Patch(Structure):
    _fields_: ClassVar = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("in_scale", c_void_p),
        ("out_scale", c_void_p),
        ("shift", c_void_p),
        ("rank", c_int32),
        ("is_bf16", c_int32),
        ("present", c_int32),
    ]


class Segment(Structure):
    _fields_: ClassVar = [
        ("first", c_int64),
        ("last", c_int64),
        ("patches", c_void_p),  # Patch[layers][7]
        ("most_ranks", c_int64),
    ]


class Piece(Structure):
    _fields_: ClassVar = [
        ("patch", c_void_p),
        ("first", c_int64),
        ("rows", c_int64),
        ("column", c_int64),
        ("width", c_int64),
        ("inner", c_int64),
    ]


class DecoderCall(Structure):
    _fields_: ClassVar = [
        ("shape", Shape),
        ("layers", POINTER(Layer)),
        ("caches", POINTER(Cache)),
        ("num_layers", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("batch", Batch),
        ("hidden", c_void_p),
        ("threads", c_int64),
        ("routed", c_void_p),
        ("segments", POINTER(Segment)),
        ("num_segments", c_int64),
        ("first_layer", c_int64),
    ]


class ExpertPart(Structure):
    _fields_: ClassVar = [
        ("kind", c_int32),
        ("rows", c_int32),
        ("offset", c_int64),
        ("bias", c_int64),
    ]


class ExpertShape(Structure):
    _fields_: ClassVar = [
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_inner", c_int32),
        ("inner", ExpertPart * 2),
        ("outer", ExpertPart),
    ]


class Route(Structure):
    _fields_: ClassVar = [
        ("product", POINTER(Matrix)),
        ("bias", c_void_p),
        ("penalty", c_void_p),
        ("top_k", c_int32),
        ("normalise", c_int32),
        ("equal", c_int32),
        ("scale", c_float),
    ]


class MoePart(Structure):
    _fields_: ClassVar = [
        ("norm", c_void_p),
        ("route", Route),
        ("shape", ExpertShape),
        ("records", POINTER(c_void_p)),
    ]


class ExpertCall(Structure):
    _fields_: ClassVar = [
        ("shape", ExpertShape),
        ("x", c_void_p),
        ("tokens", c_int64),
        ("ids", c_void_p),
        ("top_k", c_int64),
        ("records", POINTER(c_void_p)),
        ("num_experts", c_int64),
        ("out", c_void_p),
        ("threads", c_int64),
    ]


class ShareLayer(Structure):
    _fields_: ClassVar = [
        ("records", POINTER(c_void_p)),
        ("down_at", c_int64),
        ("gate_up_scales_at", c_int64),
        ("down_scales_at", c_int64),
        ("kind", c_int32),
        ("experts", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
    ]


class ShareSetup(Structure):
    _fields_: ClassVar = [
        ("layers", POINTER(ShareLayer)),
        ("num_layers", c_int64),
        ("max_rows", c_int64),
        ("max_pairs", c_int64),
        ("threads", c_int64),
        ("spaces", c_int64),
        ("space_rows", c_int64),
        ("space_pairs", c_int64),
        ("rung", c_void_p),
        ("answered", c_void_p),
        ("job", c_void_p),
        ("pairs", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("hint", c_void_p),
    ]


# what entry points that allocate return
_STATUS = c_int32
_NO_MEMORY = 1
NOT_FINITE = 2
NOT_HELD = 3


def declare(library: ctypes.CDLL) -> None:
    """Gives every entry point its argument and result types."""
    signatures = {
        "ct_isa": (c_char_p, []),
        "ct_weight_offset": (c_int32, []),
        "ct_packed_bytes": (c_int64, [c_int32, c_int64, c_int64]),
        "ct_pack": (_STATUS, [c_int32, c_int64, c_int64, *[c_void_p] * 4, c_int64]),
        "ct_quantise": (
            _STATUS,
            [c_int32, c_int64, c_void_p, c_int32, *[c_void_p] * 3, c_int64],
        ),
        "ct_linear": (_STATUS, [POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64]),
        "ct_row_norms": (_STATUS, [POINTER(Matrix), c_void_p, c_int64]),
        "ct_rows": (_STATUS, [POINTER(Matrix), c_void_p, c_int64, c_void_p, c_int64]),
        "ct_attention": (
            _STATUS,
            [POINTER(Shape), POINTER(Batch), POINTER(Cache), c_void_p, c_void_p, c_int64],
        ),
        "ct_rms_norm": (None, [c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p]),
        "ct_decoder": (_STATUS, [POINTER(DecoderCall)]),
        "ct_patches": (
            _STATUS,
            [POINTER(Piece), c_int64, c_void_p, c_int64, c_void_p, *[c_int64] * 2],
        ),
        "ct_experts": (_STATUS, [POINTER(ExpertCall)]),
        "ct_route": (_STATUS, [POINTER(Route), c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
        "ct_share_open": (c_void_p, [POINTER(ShareSetup)]),
        "ct_share_wake": (None, [c_void_p]),
        "ct_share_pause": (None, [c_void_p, c_int32]),
        "ct_share_read": (None, [c_void_p, c_void_p]),
        "ct_share_close": (None, [c_void_p]),
        "ct_combine": (_STATUS, [c_void_p, c_void_p, *[c_int64] * 3, c_void_p, c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        if result is _STATUS:
            function.errcheck = _checked


def _checked(status: int, function: Any, arguments: Any) -> int:
    if status == _NO_MEMORY:
        raise MemoryError(f"the system refused memory to a native kernel ({function.__name__})")
    return status
