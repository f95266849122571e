"""Finds the bytes of every expert in a checkpoint: one tensor per expert, or a stack per layer.

Checks names, shapes and types, and decides what each part becomes at the requested precision. Reads
only headers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.moe.store.base import ExpertGeometry, ExpertNames, ExpertShape, Key
from coterie.weights.files import FileExtent
from coterie.weights.formats.gguf_tensors import decode
from coterie.weights.kinds import GROUP, KEPT_AS
from coterie.weights.quantize import DenseWeight, GgufBlocks, Weight, dense

if TYPE_CHECKING:
    from coterie.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of one expert on disk."""

    part: str
    name: str
    extent: FileExtent
    stored: str
    shape: tuple[int, ...]
    # the bytes are the transpose of shape, in the columns from this one on; None: not transposed
    column: int | None = None

    def decode(self, raw: Tensor) -> Weight:
        if self.column is None:
            return decode(raw, self.stored, self.shape)
        rows, columns = self.shape
        whole = decode(raw, self.stored, (columns, -1))
        assert isinstance(whole, DenseWeight)
        return DenseWeight(whole.tensor[:, self.column : self.column + rows].T.contiguous())


def locate_parts(
    checkpoint: Checkpoint, geometry: ExpertGeometry, names: ExpertNames, shape: ExpertShape
) -> dict[Key, tuple[StoredPart, ...]]:
    """The pieces of every expert, in the order of the layout's parts."""
    finder = _Finder(checkpoint, geometry, names, shape)
    found: dict[Key, tuple[StoredPart, ...]] = {}
    for layer in geometry.layers:
        found.update(finder.layer(layer))
    return found


def kind_of(piece: StoredPart, dtype: str) -> str:
    """The kind of matrix that a piece becomes at `dtype`."""
    kept = KEPT_AS.get(piece.stored)
    if kept is None:
        raise WeightsError(
            f"{piece.extent.path}: expert tensor {piece.name!r} is stored as {piece.stored}; "
            f"{', '.join(KEPT_AS)} are supported. Use a checkpoint in one of them, or a GGUF file."
        )
    if dtype in ("fp32", "bf16"):
        return dtype
    groupable = dtype != "auto" and piece.shape[-1] % GROUP == 0
    return kept if kept in ("int8", "int4") or not groupable else dtype


def fit_to_kind(part: Weight | Tensor, kind: str) -> Weight | Tensor:
    """`part`, ready to be packed as `kind`: GGUF's blocks of another kind are widened."""
    if isinstance(part, GgufBlocks) and part.kind != kind:
        return DenseWeight(dense(part))
    return part


class _Finder:
    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: ExpertGeometry,
        names: ExpertNames,
        shape: ExpertShape,
    ) -> None:
        self.checkpoint, self.geometry, self.shape = checkpoint, geometry, shape
        self.templates = {part: names.parts[part] for part in shape.parts}
        self.known = frozenset(checkpoint.names())

    def layer(self, layer: int) -> Iterable[tuple[Key, tuple[StoredPart, ...]]]:
        experts = self.geometry.present(layer)
        parts = []
        for part in self.shape.parts:
            single = self.templates[part].format(layer=layer, expert=experts[0])
            if single in self.known:
                parts.append([self._single(layer, expert, part) for expert in experts])
            else:
                parts.append(self._from_stack(layer, part))
        for index, expert in enumerate(experts):
            yield (layer, expert), tuple(pieces[index] for pieces in parts)

    def _single(self, layer: int, expert: int, part: str) -> StoredPart:
        name = self.templates[part].format(layer=layer, expert=expert)
        if name not in self.known:
            raise WeightsError(
                f"{self.checkpoint.path}: has no tensor {name!r}. Fetch or convert it again."
            )
        found, wanted = self.checkpoint.shape(name), self.shape.of(part)
        if found != wanted:
            raise self._wrong_shape(name, wanted)
        stored = self.checkpoint.stored_as(name)
        return StoredPart(part, name, self.checkpoint.extent(name), stored, wanted)

    def _from_stack(self, layer: int, part: str) -> list[StoredPart]:
        name, fused = self._stack_name(layer, part)
        count, wanted = self.geometry.num_experts, self.shape.of(part)
        found = self.checkpoint.shape(name)
        rows = wanted[0] * (2 if fused else 1)
        plain, transposed = (count, rows, *wanted[1:]), (count, *wanted[1:], rows)
        # a square stack is stored as the other stacks of its layer are
        is_transposed = found != plain or (plain == transposed and self._transposed(layer))
        if found not in (plain, transposed) or (is_transposed and len(wanted) == 1):
            raise self._wrong_shape(name, plain)
        second = fused and part == "up"
        return [
            self._slice(part, name, e, second, is_transposed) for e in self.geometry.present(layer)
        ]

    def _slice(
        self, part: str, name: str, expert: int, second: bool, is_transposed: bool
    ) -> StoredPart:
        """The slice of one expert; `second`: after the gate with which it is fused."""
        whole, stored = self.checkpoint.extent(name), self.checkpoint.stored_as(name)
        wanted = self.shape.of(part)
        stack = self.checkpoint.shape(name)
        stride = whole.nbytes // stack[0]
        start = whole.offset + expert * stride
        if is_transposed:
            if stored not in ("F32", "F16", "BF16"):
                raise self._wrong_shape(name, (stack[0], stack[2], stack[1]))
            extent = FileExtent(whole.path, start, stride)
            return StoredPart(part, name, extent, stored, wanted, wanted[0] if second else 0)
        nbytes = stride // stack[1] * wanted[0]
        extent = FileExtent(whole.path, start + (nbytes if second else 0), nbytes)
        return StoredPart(part, name, extent, stored, wanted)

    def _stack_name(self, layer: int, part: str) -> tuple[str, bool]:
        """The name of the stack with `part`, and whether it has both gate and up."""
        stem = self.templates[part].replace(".{expert}", "").format(layer=layer)
        fused = stem.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")
        for name in dict.fromkeys((stem, fused)):
            for candidate in (name, name.removesuffix(".weight")):
                if candidate in self.known:
                    return candidate, name != stem
        single = self.templates[part].format(layer=layer, expert=0)
        raise WeightsError(
            f"{self.checkpoint.path}: has no tensor {single!r} and no stack {stem!r}. "
            "Fetch or convert it again."
        )

    def _transposed(self, layer: int) -> bool:
        """Whether a stack of the layer that is not square is stored transposed."""
        count = self.geometry.num_experts
        for part in self.shape.parts:
            name, fused = self._stack_name(layer, part)
            rows, *columns = self.shape.of(part)
            rows *= 2 if fused else 1
            if [rows] != columns and columns:
                return self.checkpoint.shape(name) == (count, *columns, rows)
        return False

    def _wrong_shape(self, name: str, wanted: tuple[int, ...]) -> WeightsError:
        return WeightsError(
            f"{self.checkpoint.path}: expert tensor {name!r} is {self.checkpoint.shape(name)}, not "
            f"{wanted} as config.json says. Fetch or convert it again."
        )
