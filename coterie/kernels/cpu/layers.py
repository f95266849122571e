"""The native CPU path: packed products, paged attention, and whole decoder stacks in one call.

Every result equals that of the torch version in `reference` up to rounding, and a row's bits do not
depend on the other rows of its batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.core.errors import ConfigError, InternalError
from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import NativeLibrary, native
from coterie.kernels.linear import Linear
from coterie.kernels.patch import PARTS
from coterie.weights.formats.gguf_blocks import NotFinite
from coterie.weights.quantize import (
    DenseWeight,
    Int4Weight,
    Int8Weight,
    Weight,
    dense,
)

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.decoder import DecoderLayer, DecoderShape
    from coterie.kernels.patch import Patch, PatchStack, Segment


def set_threads(count: int) -> None:
    """Set the threads of torch's operators and of native calls: they share one pool."""
    torch.set_num_threads(count)


def _library() -> NativeLibrary:
    library = native()
    if library is None:
        raise ConfigError("the native CPU kernels are not available on this machine")
    return library


class PackedLinear:
    """Rows of one or several weights, each packed at its own precision."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._call = _library().call
        self._packed: list[Tensor] = []
        parts = [self._pack(weight) for weight in weights]
        self.in_features = _same_width(weights)
        self.out_features = sum(part.rows for part in parts)
        self.nbytes = sum(packed.nbytes for packed in self._packed)
        self._parts = (abi.Part * len(parts))(*parts)
        panels = sum(-(-part.rows // 16) for part in parts)
        self.matrix = abi.Matrix(
            len(parts), self.out_features, self.in_features, panels, self._parts
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows = _floats(x.reshape(-1, self.in_features))
        out = torch.empty(rows.shape[0], self.out_features)
        threads = torch.get_num_threads()
        self._call.ct_linear(
            ctypes.byref(self.matrix), rows.data_ptr(), rows.shape[0], out.data_ptr(), threads
        )
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def whole_weight(self, first: int, rows: int) -> PackedLinear | None:
        """One of the weights as a product that shares its memory; None when these rows are not
        exactly one weight."""
        begin = 0
        for part, packed in zip(self._parts, self._packed, strict=True):
            if (begin, part.rows) == (first, rows):
                return self._of_part(part, packed)
            begin += part.rows
        return None

    def row_norms_squared(self) -> Tensor:
        """[out_features] fp64: |W_i|^2 of the values that the product uses."""
        out = torch.empty(self.out_features, dtype=torch.float64)
        threads = torch.get_num_threads()
        self._call.ct_row_norms(ctypes.byref(self.matrix), out.data_ptr(), threads)
        return out

    def rows(self, index: Tensor) -> Tensor:
        """fp32 [*index.shape, in_features]: rows of the one weight that this product has."""
        ids = index.to(torch.int64).contiguous()
        outside = bool(((ids < 0) | (ids >= self.out_features)).any())
        if outside or len(self._parts) != 1:
            raise InternalError("rows are those of one weight")
        out = torch.empty(*ids.shape, self.in_features)
        self._call.ct_rows(
            ctypes.byref(self.matrix),
            ids.data_ptr(),
            ids.numel(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def _of_part(self, part: abi.Part, packed: Tensor) -> PackedLinear:
        made = copy(self)
        made._packed, made._parts = [packed], (abi.Part * 1)(part)
        made.out_features, made.nbytes = part.rows, packed.nbytes
        panels = -(-part.rows // 16)
        made.matrix = abi.Matrix(1, part.rows, self.in_features, panels, made._parts)
        return made

    def _pack(self, weight: Weight) -> abi.Part:
        source = packing_source(weight)
        rows, width = weight.shape
        packed = torch.empty(
            self._call.ct_packed_bytes(source.kind, rows, width), dtype=torch.uint8
        )
        status = source.pack(self._call, rows, width, packed, torch.get_num_threads())
        if status == abi.NOT_HELD:
            return self._pack(DenseWeight(dense(weight)))
        if status == abi.NOT_FINITE:
            raise NotFinite
        self._packed.append(packed)
        return abi.Part(source.kind, rows, packed.data_ptr())


class PackingSource(NamedTuple):
    """What `ct_pack` makes panels of."""

    # the kind of the panels
    kind: int
    # a kind, or a type of blocks
    source: int
    # contiguous: values, scales, minima; or blocks
    tensors: tuple[Tensor, ...]

    def pack(self, call: ctypes.CDLL, rows: int, width: int, out: Tensor, threads: int) -> int:
        """The status of the call."""
        pointers = [part.data_ptr() for part in self.tensors] + [0] * (3 - len(self.tensors))
        status = call.ct_pack(self.source, rows, width, *pointers, out.data_ptr(), threads)
        return int(status)


def packing_source(weight: Weight) -> PackingSource:
    match weight:
        case Int8Weight(q, scale):
            return _as_parts("int8", q, scale.half())
        case Int4Weight(q, scale, minimum):
            return _as_parts("int4", q, scale.half(), minimum.half())
        case DenseWeight(tensor) if tensor.dtype == torch.bfloat16:
            return _as_parts("bf16", tensor)
        case DenseWeight(tensor):
            return _as_parts("fp32", tensor.float())
    kind = abi.KINDS[weight.kind]
    source = abi.SPLIT_SOURCES.get(weight.type, kind)
    return PackingSource(kind, source, (weight.data.contiguous(),))


def _as_parts(kind: str, *tensors: Tensor) -> PackingSource:
    number = abi.KINDS[kind]
    return PackingSource(number, number, tuple(part.contiguous() for part in tensors))


def _same_width(weights: Sequence[Weight]) -> int:
    widths = {weight.shape[1] for weight in weights}
    if len(widths) != 1:
        raise InternalError(f"rows of one product must have one width, not {sorted(widths)}")
    return int(widths.pop())


def _floats(tensor: Tensor) -> Tensor:
    return tensor.to(device="cpu", dtype=torch.float32).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, scale = _floats(x), _floats(weight)
    out = torch.empty_like(rows)
    width = rows.shape[-1]
    _library().call.ct_rms_norm(
        rows.data_ptr(), scale.data_ptr(), eps, rows.numel() // width, width, out.data_ptr()
    )
    return out


def paged_attention(q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """As reference.paged_attention; kv_layer is fp32 or bf16."""
    rows = _floats(q)
    shape = abi.Shape(q.shape[1], kv_layer.shape[2], q.shape[2], 0, 0, 0.0, scale)
    view = _BatchView(batch)
    out = torch.empty_like(rows)
    cache = _cache(kv_layer)
    _library().call.ct_attention(
        ctypes.byref(shape),
        ctypes.byref(view.struct),
        ctypes.byref(cache),
        rows.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out.to(q.dtype)


class _BatchView:
    """The C view of a batch; owns the converted tensors it points into."""

    def __init__(self, batch: AttentionBatch, patches: SegmentArray | None = None) -> None:
        # Segment[len(batch.patches)], or null
        self.segments = patches
        self._long = [t.to(torch.int64).contiguous() for t in (batch.positions, batch.slots)]
        self._int = [
            t.to(torch.int32).contiguous()
            for t in (batch.query_starts, batch.context_lens, batch.block_tables)
        ]
        self.struct = abi.Batch(
            len(batch.positions),
            len(batch.context_lens),
            *(t.data_ptr() for t in (*self._long, *self._int)),
            batch.block_tables.shape[1],
            batch.block_size,
        )


def _cache(kv_layer: Tensor) -> abi.Cache:
    plane, block = kv_layer.stride()[:2]
    known = kv_layer.dtype in (torch.float32, torch.bfloat16)
    if not kv_layer[0].is_contiguous() or plane % block or not known:
        raise InternalError("a plane of a KV cache must be contiguous and fp32 or bf16")
    # one plane for keys and values: the second starts at the same address as the first
    apart = plane // block if kv_layer.shape[0] == 2 else 0
    return abi.Cache(kv_layer.data_ptr(), apart, kv_layer.dtype == torch.bfloat16)


class NativeDecoder:
    """Runs a whole stack in one native call. cos and sin: [max_positions, head_dim/2]."""

    def __init__(
        self, shape: DecoderShape, layers: Sequence[DecoderLayer], cos: Tensor, sin: Tensor
    ) -> None:
        self._run = _library().call.ct_decoder
        self._shape = abi.Shape(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.hidden,
            shape.intermediate,
            shape.eps,
            shape.attention_scale,
        )
        self._kept: list[object] = [layers]  # what the C structures point into
        self._tables = _floats(cos), _floats(sin)
        whole = [layer.norms_whole(shape) for layer in layers]
        self._layers = (abi.Layer * len(layers))(*map(self._layer, layers, whole))
        self._parts: list[abi.MoePart | None] = [None] * len(layers)
        self._caches = (abi.Cache * len(layers))()
        self._placed: list[object] = [None] * len(layers)
        self._batch: tuple[AttentionBatch, _BatchView] | None = None
        self._sites = PatchSites(shape, len(layers))

    def attach(self, index: int, part: abi.MoePart | None) -> None:
        """Let layer `index` run these experts from now on (None: stop before its experts)."""
        self._parts[index] = part
        self._layers[index].moe = None if part is None else ctypes.addressof(part)

    def forward(
        self,
        hidden: Tensor,
        kv: Sequence[Tensor],
        batch: AttentionBatch,
        first: int = 0,
        last: int | None = None,
        overwrite: bool = False,
        routed: Tensor | None = None,
    ) -> Tensor:
        """hidden [T, D] after layers first..last (exclusive), before the final norm.

        `kv` has one cache for every layer of the stack. overwrite: `hidden` may hold the result.
        routed: int32 [last - first, T, K], what attached routers chose.
        """
        last = len(self._layers) if last is None else last
        out = _floats(hidden)
        if out is hidden and not overwrite:
            out = hidden.clone()
        view = self._view(batch)
        self._place_caches(kv, first, last)
        call = abi.DecoderCall(
            self._shape,
            ctypes.cast(ctypes.byref(self._layers[first]), ctypes.POINTER(abi.Layer)),
            ctypes.cast(ctypes.byref(self._caches[first]), ctypes.POINTER(abi.Cache)),
            last - first,
            self._tables[0].data_ptr(),
            self._tables[1].data_ptr(),
            view.struct,
            out.data_ptr(),
            torch.get_num_threads(),
            None if routed is None else routed.data_ptr(),
            view.segments,
            len(batch.patches),
            first,
        )
        self._run(ctypes.byref(call))
        return out

    def _layer(self, layer: DecoderLayer, whole_norm: bool) -> abi.Layer:
        return abi.Layer(
            self._vector(layer.input_norm),
            self._matrix(layer.qkv),
            self._vector(layer.q_norm),
            self._vector(layer.k_norm),
            self._vector(layer.qkv_bias),
            self._matrix(layer.o),
            self._vector(layer.post_norm),
            self._matrix(layer.gate_up),
            self._matrix(layer.down),
            whole_norm,
            None,
        )

    def _vector(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = _floats(tensor)
        self._kept.append(kept)
        return kept.data_ptr()

    @staticmethod
    def _matrix(linear: Linear | None) -> ctypes._Pointer[abi.Matrix] | None:
        if linear is None:
            return None
        if not isinstance(linear, PackedLinear):
            raise ConfigError("the native decoder needs packed products (backend 'cpu')")
        return ctypes.pointer(linear.matrix)

    def _view(self, batch: AttentionBatch) -> _BatchView:
        """Made once per batch: some models call `forward` for each layer."""
        if self._batch is None or self._batch[0] is not batch:
            segments = self._sites.segments(batch.patches) if batch.patches else None
            self._batch = batch, _BatchView(batch, segments)
        return self._batch[1]

    def _place_caches(self, kv: Sequence[Tensor], first: int, last: int) -> None:
        for index in range(first, last):
            # a new cache may have the address of a freed one of another shape
            layer = kv[index]
            key = layer.data_ptr(), layer.shape, layer.stride(0), layer.dtype
            if self._placed[index] != key:
                self._caches[index], self._placed[index] = _cache(layer), key


SegmentArray = ctypes.Array[abi.Segment]

_BACKEND = "cpu"
_TYPES = (torch.float32, torch.bfloat16)


class _Table(NamedTuple):
    patches: ctypes.Array[abi.Patch]  # [layers * len(PARTS)]
    address: int
    most_ranks: int


class PatchSites:
    """The matrices of one decoder that stacks can patch."""

    def __init__(self, shape: DecoderShape, num_layers: int) -> None:
        hidden, inner = shape.hidden, shape.intermediate
        q, kv = shape.q_size, shape.kv_size
        self._num_layers = num_layers
        # [in, out], as PARTS
        self._sizes = (
            (hidden, q),
            (hidden, kv),
            (hidden, kv),
            (q, hidden),
            (hidden, inner),
            (hidden, inner),
            (inner, hidden),
        )

    def segments(self, patches: Sequence[Segment]) -> SegmentArray:
        """The C view of a step's segments. Their stacks must outlive it."""
        rows = (abi.Segment * len(patches))()
        for row, (first, last, stack) in zip(rows, patches, strict=True):
            table = stack.tables.get(_BACKEND) or self._table(stack)
            row.first, row.last = first, last
            row.patches, row.most_ranks = table.address, table.most_ranks
        return rows

    def _table(self, stack: PatchStack) -> _Table:
        rows = (abi.Patch * (self._num_layers * len(PARTS)))()
        places = {part: (at, *self._sizes[at]) for at, part in enumerate(PARTS)}
        most = 0
        for (layer, part), patch in stack.patches.items():
            if part not in places:
                continue  # runs in Python
            if not 0 <= layer < self._num_layers:
                raise InternalError(f"a patch is for layer {layer} of {self._num_layers}")
            at, width, height = places[part]
            row = _row(patch, width, height)
            rows[layer * len(PARTS) + at] = row
            most = max(most, row.rank)
        table = _Table(rows, ctypes.addressof(rows), most)
        stack.tables[_BACKEND] = table
        return table


def _row(patch: Patch, width: int, height: int) -> abi.Patch:
    """The C view of a patch of a matrix [height, width]."""
    a = b = None
    rank, dtype = 0, None
    if patch.a is not None and patch.b is not None:
        rank, dtype = patch.a.shape[0], patch.a.dtype
        a, b = _pointer(patch.a, (rank, width)), _pointer(patch.b, (rank, height))
        if dtype != patch.b.dtype:
            raise InternalError(f"a patch has {dtype} before {patch.b.dtype}")
    vectors = (patch.in_scale, width), (patch.out_scale, height), (patch.shift, height)
    pointers = (None if tensor is None else _vector(tensor, size) for tensor, size in vectors)
    return abi.Patch(a, b, *pointers, rank, dtype == torch.bfloat16, 1)


def _vector(tensor: Tensor, size: int) -> int:
    if tensor.dtype != torch.float32:
        raise InternalError(f"scales and shifts of patches are fp32, not {tensor.dtype}")
    return _pointer(tensor, (size,))


def _pointer(tensor: Tensor, shape: tuple[int, ...]) -> int:
    # look up each only once: a new stack has hundreds of patches before its first step
    if (
        tensor.is_cpu
        and tensor.shape == shape
        and tensor.dtype in _TYPES
        and tensor.is_contiguous()
    ):
        return tensor.data_ptr()
    have = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
    raise InternalError(f"a patch has {have} where {shape} belongs, contiguous, for native kernels")


def add(work: Sequence[tuple[slice, slice, Patch]], x: Tensor, y: Tensor) -> None:
    """y [T, out] in place, for (rows, columns, patch): out_scale * y + shift + (x a^T) b.

    Twin of patched.add; y is fp32 and contiguous.
    """
    library = native()
    if library is None:
        raise InternalError("native patches without native kernels")
    x, width = x.float().contiguous(), x.shape[1]
    patches = (abi.Patch * len(work))()
    pieces = (abi.Piece * len(work))()
    size = ctypes.sizeof(abi.Patch)
    for at, (rows, columns, patch) in enumerate(work):
        height = columns.stop - columns.start
        patches[at] = _row(patch, width, height)
        where = ctypes.addressof(patches) + at * size
        count = rows.stop - rows.start
        pieces[at] = abi.Piece(where, rows.start, count, columns.start, height, 0)
    library.call.ct_patches(
        pieces, len(work), x.data_ptr(), width, y.data_ptr(), y.shape[1], torch.get_num_threads()
    )
