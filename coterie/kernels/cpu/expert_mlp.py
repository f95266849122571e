"""Runs the experts of one MoE layer over the rows that chose them.

`run_experts` takes records (see `expert_layout`) on any device: it runs natively on the CPU, and in
torch on CUDA or without a compiler. Every (row, k) pair has its own output row. `combine` adds them
in the order of k, so that the result does not depend on which expert ran first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from coterie.core.errors import InternalError
from coterie.kernels.backend import best_backend
from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.expert_record import dense_parts
from coterie.kernels.device_record import arranged_parts
from coterie.kernels.expert_layout import ExpertLayout
from coterie.weights.kinds import BLOCK_KINDS


class RecordTable:
    """The records of one layer that are in memory, by expert; reused by many calls."""

    def __init__(self, num_experts: int) -> None:
        self.pointers = (ctypes.c_void_p * num_experts)()
        self._records: dict[int, Tensor] = {}

    def set(self, expert: int, record: Tensor) -> None:
        """record: uint8, contiguous; the table keeps it alive."""
        self._records[expert] = record
        self.pointers[expert] = record.data_ptr()

    def clear(self, expert: int) -> None:
        self._records.pop(expert, None)
        self.pointers[expert] = None

    @property
    def device(self) -> torch.device | None:
        """The device of the records; None when there are none."""
        for record in self._records.values():
            return record.device
        return None

    def pick(self, experts: Iterable[int] | None = None) -> list[tuple[int, Tensor]]:
        """The records of `experts`, or of all."""
        if experts is None:
            return list(self._records.items())
        return [(expert, self._records[expert]) for expert in experts]


Records = Sequence[tuple[int, Tensor]] | RecordTable


def run_experts(
    layout: ExpertLayout,
    x: Tensor,
    topk_ids: Tensor,
    records: Records,
    out: Tensor,
    threads: int | None = None,
    *,
    only: Sequence[int] | None = None,
) -> None:
    """out[t * K + k] = MLP of expert topk_ids[t, k] over x[t], where that expert is in `records`
    (and in `only`, if given); other rows of out [T * K, D] fp32 are left alone. topk_ids: int32 on
    the CPU. All records are on one device."""
    if not len(x):
        return
    table = _table(records, only)
    if table.device is None:
        return
    library = native() if table.device.type == "cpu" else None
    if library is None:
        run_experts_torch(layout, x, topk_ids, table.pick(), out)
        return
    _check(layout, topk_ids, out)
    rows, ids = x.to(device="cpu", dtype=torch.float32).contiguous(), topk_ids.contiguous()
    call = abi.ExpertCall(
        expert_shape(layout),
        rows.data_ptr(),
        len(rows),
        ids.data_ptr(),
        ids.shape[1],
        table.pointers,
        len(table.pointers),
        out.data_ptr(),
        threads or torch.get_num_threads(),
    )
    library.call.ct_experts(ctypes.byref(call))


def _table(records: Records, only: Sequence[int] | None) -> RecordTable:
    if isinstance(records, RecordTable):
        if only is None:
            return records
        pairs: Sequence[tuple[int, Tensor]] = records.pick(only)
    else:
        pairs = [pair for pair in records if only is None or pair[0] in only]
    table = RecordTable(max((expert for expert, _ in pairs), default=-1) + 1)
    for expert, record in pairs:
        table.set(expert, record)
    return table


def _check(layout: ExpertLayout, topk_ids: Tensor, out: Tensor) -> None:
    """Check what the native call does not check."""
    fits = out.shape == (topk_ids.numel(), layout.hidden) and out.is_contiguous()
    if not fits or out.dtype != torch.float32 or out.device.type != "cpu":
        raise InternalError("experts on the CPU need a contiguous fp32 row there for every pair")
    if topk_ids.dtype != torch.int32 or topk_ids.device.type != "cpu":
        raise InternalError("the chosen experts must be int32, on the CPU")


@lru_cache(maxsize=64)
def expert_shape(layout: ExpertLayout) -> abi.ExpertShape:
    places = {place.name: place for place in layout.parts()}

    def part(name: str) -> abi.ExpertPart:
        place, bias = places[name], places.get(f"{name}_bias")
        kind = abi.KINDS[place.kind]
        return abi.ExpertPart(kind, place.rows, place.offset, -1 if bias is None else bias.offset)

    inner = ("gate", "up") if layout.gated else ("fc1",)
    return abi.ExpertShape(
        layout.hidden,
        layout.intermediate,
        len(inner),
        (abi.ExpertPart * 2)(*map(part, inner)),
        part("down" if layout.gated else "fc2"),
    )


def run_experts_torch(
    layout: ExpertLayout,
    x: Tensor,
    topk_ids: Tensor,
    records: Sequence[tuple[int, Tensor]],
    out: Tensor,
) -> None:
    """The same in torch, on the records' device: fp32 on the CPU, otherwise x's dtype."""
    device = records[0][1].device
    dtype = torch.float32 if device.type == "cpu" else x.dtype
    x = x.to(device=device, dtype=dtype)
    order, ranges = _by_expert(topk_ids, records)
    pairs = order.to(device, non_blocking=True)
    rows = x[torch.div(pairs, topk_ids.shape[1], rounding_mode="floor")]
    results = torch.empty(len(rows), layout.hidden, dtype=torch.float32, device=device)
    for (_, record), (begin, end) in zip(records, ranges, strict=True):
        if end > begin:
            results[begin:end] = _mlp(layout, _parts(layout, record, dtype), rows[begin:end])
    out[pairs] = results


def _parts(layout: ExpertLayout, record: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """On a device records are arranged where its kernels support their layout."""
    if record.device.type == "cpu":
        return dense_parts(layout, record, dtype)
    arranged = arranged_parts(layout, record, dtype)
    if arranged is not None:
        return arranged
    if best_backend(record.device) == "triton" and any(k in BLOCK_KINDS for k in layout.kinds):
        from coterie.kernels.triton.panels import panel_parts

        return panel_parts(layout, record, dtype)
    return dense_parts(layout, record, dtype)


def _by_expert(
    topk_ids: Tensor, records: Sequence[tuple[int, Tensor]]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Pairs of the experts in `records`, one expert after another, and the range of each."""
    flat = topk_ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    experts = torch.tensor([expert for expert, _ in records])
    ordered = flat[order]
    begins = torch.searchsorted(ordered, experts).tolist()
    ends = torch.searchsorted(ordered, experts, right=True).tolist()
    picked = [order[begin:end] for begin, end in zip(begins, ends, strict=True)]
    ranges, at = [], 0
    for part in picked:
        ranges.append((at, at + len(part)))
        at += len(part)
    return torch.cat(picked), ranges


def _mlp(layout: ExpertLayout, parts: dict[str, Tensor], x: Tensor) -> Tensor:
    if layout.gated:
        gate, up = functional.linear(x, parts["gate"]), functional.linear(x, parts["up"])
        return functional.linear(functional.silu(gate) * up, parts["down"])
    inner = functional.gelu(functional.linear(x, parts["fc1"], parts["fc1_bias"]))
    return functional.linear(inner, parts["fc2"], parts["fc2_bias"])


def combine(
    out: Tensor,
    topk_weights: Tensor,
    threads: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[T, D]: the sum over k, in its order and in fp32, of topk_weights[t, k] * out[t * K + k]."""
    tokens, top_k = topk_weights.shape
    rows = out.view(tokens, top_k, -1)
    weights = topk_weights.to(device=out.device, dtype=torch.float32)
    library = native() if out.device.type == "cpu" else None
    if library is not None and out.is_contiguous():
        total = torch.empty(tokens, rows.shape[2])
        weights = weights.contiguous()
        count = threads or torch.get_num_threads()
        library.call.ct_combine(
            out.data_ptr(),
            weights.data_ptr(),
            tokens,
            top_k,
            rows.shape[2],
            total.data_ptr(),
            count,
        )
        return total.to(dtype)
    total = rows[:, 0] * weights[:, :1]
    for k in range(1, top_k):
        total = total + rows[:, k] * weights[:, k : k + 1]
    return total.to(dtype)
