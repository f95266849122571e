"""Adapters as a device's kernels read them: per row of a step the addresses of its patches.

One record per stack, made when it is first seen; a step gathers its rows' records into one table,
so that a kernel finds a patch in one read. Knows no kernel and no adapter kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.kernels.patch import PARTS

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.kernels.patch import Patch, Segment, Stack

# words of a site: addresses of a, b, in_scale, out_scale, shift (0: none), rank, 1 if a and b are
# fp32, one unused
WORDS = 8
# the largest rank whose terms a captured step has room for; above it torch does the work
MAX_RANK = 256
# from so many rows on a segment's matrices are worth products of their own
LONG_ROWS = 512
# what the kernels' widest loads ask of an address
_ALIGN = 16


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A stack's sites, by layer and part. Keeps none of the stack's memory."""

    # [layers * parts, WORDS] int64; None: something in it is beyond the kernels
    sites: Tensor | None
    rank: int
    # some a and b are fp32
    wide: bool
    # all its patches belong to the layers
    inside: bool


def record_of(stack: Stack, device: torch.device) -> Record:
    """Made once per stack, which lies on one device."""
    found: Record | None = stack.tables.get("cuda")
    if found is None:
        found = stack.tables["cuda"] = _record(stack, device)
    return found


def _record(stack: Stack, device: torch.device) -> Record:
    inner = {site: patch for site, patch in stack.patches.items() if site[1] in PARTS}
    inside = len(inner) == len(stack.patches)
    if not all(_readable(site[1], patch) for site, patch in inner.items()):
        return Record(None, 0, False, inside)
    layers = 1 + max((layer for layer, _ in inner), default=-1)
    words = [[0] * WORDS for _ in range(layers * len(PARTS))]
    for (layer, part), patch in inner.items():
        words[layer * len(PARTS) + PARTS.index(part)] = _words(patch)
    rank = max((patch.rank for patch in inner.values()), default=0)
    sites = torch.tensor(words, dtype=torch.int64).view(len(words), WORDS)
    wide = any(map(_wide, inner.values()))
    return Record(sites.to(device), rank, wide, inside)


def _readable(part: str, patch: Patch) -> bool:
    """A scaled input is the kernels' own only in front of `down`; the other products are fused or
    read attention's output as it is."""
    vectors = (patch.a, patch.b, patch.in_scale, patch.out_scale, patch.shift)
    aligned = all(part is None or part.data_ptr() % _ALIGN == 0 for part in vectors)
    return aligned and patch.rank <= MAX_RANK and (part == "down" or patch.in_scale is None)


def _wide(patch: Patch) -> bool:
    return patch.a is not None and patch.a.dtype == torch.float32


def _words(patch: Patch) -> list[int]:
    vectors = (patch.a, patch.b, patch.in_scale, patch.out_scale, patch.shift)
    addresses = [0 if v is None else v.data_ptr() for v in vectors]
    return [*addresses, patch.rank, int(_wide(patch)), 0]


# (first row, past the last, what they read)
Places = tuple[tuple[int, int, Record], ...]


class PatchRows:
    """What `rows` rows read at every site of `layers` layers. The table's address never changes."""

    def __init__(self, rows: int, layers: int, device: torch.device, wide: bool) -> None:
        self.device = device
        self.table = torch.zeros(
            (rows, layers * len(PARTS), WORDS), dtype=torch.int64, device=device
        )
        # terms of one row and part that must have room; whether some of them come from fp32
        self.rank, self.wide = MAX_RANK, wide
        # set by whoever honours the table: captured steps of others run adapters eagerly
        self.read = False
        self._filled: Places = ()

    def fill(self, places: Places) -> None:
        """Rows elsewhere run the model as it is. Nothing to do if all is as last time; whoever
        fills keeps the stacks until the step has been computed."""
        if places == self._filled:
            return
        numbers: dict[Record, int] = {}
        index = [0] * len(self.table)
        for first, last, record in places:
            number = numbers.setdefault(record, len(numbers) + 1)
            index[first:last] = [number] * (last - first)
        sites = [self.table.new_zeros((self.table.shape[1], WORDS))]
        sites += [record.sites for record in numbers if record.sites is not None]
        joined = torch.nn.utils.rnn.pad_sequence(sites, batch_first=True)
        torch.index_select(joined, 0, torch.tensor(index, device=self.device), out=self.table)
        self._filled = places


def places_of(segments: Sequence[Segment], device: torch.device) -> Places:
    """Stacks of soft tokens alone have nothing to read."""
    pairs = ((part, record_of(part.stack, device)) for part in segments if part.stack.patches)
    return tuple((part.first, part.last, record) for part, record in pairs)


def family(places: Places, layers: int) -> str:
    """Which captured steps serve these rows: "plain", "narrow" (a and b are bf16), "wide", or
    "" where none does."""
    if not places:
        return "plain"
    records, most = [record for _, _, record in places], layers * len(PARTS)
    if any(r.sites is None or not r.inside or len(r.sites) > most for r in records):
        return ""
    return "wide" if any(record.wide for record in records) else "narrow"


def rows_of(batch: AttentionBatch, layers: int) -> tuple[PatchRows | None, tuple[Segment, ...]]:
    """What the row kernels read, and the segments that are left to torch: long ones, and those
    that the kernels cannot. `layers` counts up to the last one of this call."""
    if batch.patch_rows is not None:
        return batch.patch_rows, ()
    device = batch.positions.device
    short, rest = [], []
    for part in batch.patches:
        if not part.stack.patches:
            continue
        record = record_of(part.stack, device)
        if record.sites is None or part.last - part.first >= LONG_ROWS:
            rest.append(part)
            continue
        short.append((part.first, part.last, record))
        layers = max(layers, len(record.sites) // len(PARTS))
    if not short:
        return None, tuple(rest)
    return _gathered(tuple(short), len(batch.positions), layers, device), tuple(rest)


# a model that is walked layer by layer asks for each of them
@lru_cache(maxsize=1)
def _gathered(places: Places, rows: int, layers: int, device: torch.device) -> PatchRows:
    wide = any(record.wide for _, _, record in places)
    found = PatchRows(rows, layers, device, wide)
    found.rank = max(16, *(record.rank for _, _, record in places))
    found.fill(places)
    return found
