"""How long steps of a CUDA device take while its kernels read experts where they are: in its own
memory, or in RAM over the link, where the CPU computes a part of them.

Everything is calculated from a few measured numbers (`DevicePath`). This module measures nothing,
knows no strategy and does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from coterie.moe.planner.cost_curve import CostCurve

# rows of a step beyond which the CPU takes no part: pairs over experts per row, as in `cpu_share`
SHARED_PAIRS = 256
# what a layer with missing experts takes beside their bytes, until it is measured: the CPU's job
# and the two kernels that wait for the link
JOINT_S = 24e-6
# layers that are on the device at one time while a prompt is computed
BUFFERS = 2


@dataclass(frozen=True, slots=True)
class DevicePath:
    """Measured on a few layers of a model, with its own kernels and runtime."""

    # precision and bytes of a record, as the device reads it
    kind: str
    record_bytes: int
    # bytes per second: copies from pinned RAM; kernels that read it; the CPU's part (0: none)
    copy_bytes_s: float
    read_bytes_s: float
    cpu_bytes_s: float
    # seconds of a layer with all experts on the device, by rows, of decoding and of a prompt; and
    # of a step without its layers
    decode_layer: CostCurve
    prompt_layer: CostCurve
    rest_s: float
    # seconds that a layer takes more, by the number of its experts that are missing
    missing: CostCurve

    @property
    def link_part(self) -> float:
        """Of the bytes of missing experts, those that cross the link while a step decodes."""
        return self.read_bytes_s / (self.read_bytes_s + self.cpu_bytes_s)

    def thinned(self, part: float) -> DevicePath:
        """For one layer in `part`: as much less of what is in no layer."""
        return replace(self, rest_s=self.rest_s / part)

    def smaller(self, kind: str, share: float) -> DevicePath:
        """About the same with records of `share` of the bytes; only what is bound by bytes
        changes."""
        size, missing = int(self.record_bytes * share), self.missing.scaled(share)
        return replace(self, kind=kind, record_bytes=size, missing=missing)

    def faster(self, link: float = 1.0, cpu: float = 1.0, device: float = 1.0) -> DevicePath:
        """As if these were so many times as fast."""
        rate = self.link_part * link + (1 - self.link_part) * cpu
        return replace(
            self,
            copy_bytes_s=self.copy_bytes_s * link,
            read_bytes_s=self.read_bytes_s * link,
            cpu_bytes_s=self.cpu_bytes_s * cpu,
            decode_layer=self.decode_layer.scaled(1 / device),
            prompt_layer=self.prompt_layer.scaled(1 / device),
            rest_s=self.rest_s / device,
            missing=self.missing.scaled(1 / rate),
        )

    def missing_s(self, rows: int, count: float, top_k: int) -> float:
        """What so many missing experts add to a layer of a step with so many rows."""
        if count <= 0:
            return 0.0
        if rows * top_k <= SHARED_PAIRS:
            first = self.missing.rows[0]
            if count < first:
                # a mean over layers of which some miss nothing
                return self.missing.seconds[0] * count / first
            return self.missing.at(count)
        return count * self.record_bytes / self.read_bytes_s

    def decode_s(
        self, rows: int, missing: Sequence[float], top_k: int, copied_beside: int = 0
    ) -> float:
        """A step of so many rows. `missing`: experts by layer; `copied_beside`: experts that are
        copied to slots meanwhile, which takes the link from those that are read."""
        seconds = self.rest_s + len(missing) * self.decode_layer.at(rows)
        reading = sum(self.missing_s(rows, count, top_k) for count in missing)
        copying = copied_beside * self.record_bytes / self.copy_bytes_s
        # the CPU's part was chosen for a link that does nothing else
        return max(seconds + reading + min(copying, reading), copying)

    def copied_s(self, rows: int, copied: int, read: Sequence[float], top_k: int) -> float:
        """A step that copies what it misses into slots before it computes with it: nothing runs
        beside the copies. `read`: experts by layer that get no slot."""
        copying = copied * self.record_bytes / self.copy_bytes_s
        return self.decode_s(rows, read, top_k) + copying

    def prompt_s(
        self, rows: int, copied: Sequence[float], read: Sequence[float], top_k: int
    ) -> float:
        """A step with a prompt: experts by layer that are copied ahead, and that kernels read."""
        compute = self.prompt_layer.at(rows)
        copies = [count * self.record_bytes / self.copy_bytes_s for count in copied]
        computes = [compute + self.missing_s(rows, count, top_k) for count in read]
        return self.rest_s + streamed_s(copies, computes)

    def decode_limit_s(self, missing: float, step_bytes: float, device_bytes_s: float) -> float:
        """The least time of a step: `missing` experts by link and CPU at their full rates, or all
        bytes by the device."""
        wires = self.copy_bytes_s + self.cpu_bytes_s
        return max(missing * self.record_bytes / wires, step_bytes / device_bytes_s)

    def prompt_limit_s(self, missing: float, step_bytes: float, device_bytes_s: float) -> float:
        return max(missing * self.record_bytes / self.copy_bytes_s, step_bytes / device_bytes_s)


def streamed_s(copies: Sequence[float], computes: Sequence[float]) -> float:
    """Layers whose experts are copied ahead into one of two buffers: a copy waits for the one
    before it and for the layer that reads its buffer, a layer for its copy."""
    filled = computed = 0.0
    read = [0.0] * BUFFERS
    for row, (copy, compute) in enumerate(zip(copies, computes, strict=True)):
        if copy > 0:
            filled = max(filled, read[row % BUFFERS]) + copy
            computed = max(computed, filled)
        computed += compute
        read[row % BUFFERS] = computed
    return computed


def missing_by_rates(record_bytes: int, read_bytes_s: float, cpu_bytes_s: float) -> CostCurve:
    """The cost of missing experts where only rates are known: link and CPU end together."""
    each = record_bytes / (read_bytes_s + cpu_bytes_s)
    return CostCurve((1, 2), (JOINT_S + each, JOINT_S + 2 * each))


def missing_by_steps(points: Sequence[tuple[float, float]]) -> CostCurve:
    """From measured steps: (missing experts of a layer, seconds that it took more than a layer
    that misses nothing). The line through the first two goes on to one expert. A disturbed
    measurement must neither make an expert free nor more of them faster."""
    found = sorted((count, max(0.0, extra_s)) for count, extra_s in points if count > 0)
    most = list(accumulate((extra_s for _, extra_s in found), max))
    counts = [count for count, _ in found]
    few, few_s = counts[0], most[0]
    if few > 1:
        apart = len(found) > 1 and counts[1] - few >= 0.5
        each = (most[1] - few_s) / (counts[1] - few) if apart else few_s / few
        counts.insert(0, 1.0)
        most.insert(0, max(few_s - each * (few - 1), few_s / few * 0.5))
    return CostCurve(tuple(counts), tuple(most))


def path_from_json(data: Mapping[str, Any]) -> DevicePath:
    curves = {
        name: CostCurve(tuple(data[name]["rows"]), tuple(data[name]["seconds"]))
        for name in ("decode_layer", "prompt_layer", "missing")
    }
    return DevicePath(**{**data, **curves})
