"""All experts in memory: the least a MoE stack can run on, for tests of the models alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.core.moe import MoeUsage
from coterie.kernels.cpu.expert_mlp import RecordTable, combine, run_experts
from coterie.kernels.cpu.expert_record import pack_record
from coterie.kernels.expert_layout import ExpertLayout
from coterie.models.build.moe import MoeRequirements
from coterie.moe.runtime.memory_trade import MemoryTrade
from coterie.moe.runtime.step import ExpertStep
from coterie.weights.quantize import dense


class Resident:
    """Remembers what it was asked: steps by (layer, phase), hints, groups loaded."""

    def __init__(self, wanted: MoeRequirements) -> None:
        moe, self.geometry = wanted.moe, wanted.geometry()
        kind = "fp32" if wanted.dtype == "auto" else wanted.dtype
        matrices = 3 if moe.gated else 2
        self.layout = ExpertLayout(wanted.hidden, moe.intermediate, moe.gated, (kind,) * matrices)
        self.tables = {layer: RecordTable(moe.num_experts) for layer in moe.layers}
        for layer, expert in list(self.geometry.keys()):
            record = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
            pack_record(self.layout, parts_of(wanted, layer, expert), record)
            self.tables[layer].set(expert, record)
        self.wants_hints = False
        self.layer_groups: tuple[tuple[int, ...], ...] | None = None
        self.steps: list[ExpertStep] = []
        self.hints: list[tuple[int, Tensor]] = []
        self.loaded: list[int] = []
        self.closed = False

    def run(self, step: ExpertStep) -> Tensor:
        self.steps.append(step)
        out = torch.full((step.topk_ids.numel(), step.hidden.shape[1]), float("nan"))
        run_experts(self.layout, step.hidden, step.topk_ids, self.tables[step.layer], out)
        return combine(out, step.topk_weights).to(step.hidden.dtype)

    def resident(self, phase: str) -> None:
        """Every layer asks: that is what is tested."""

    def prompt_pool(self, rows: int) -> None:
        return None

    def launched(self, copies: bool) -> None: ...

    def device_pool(self) -> None:
        """There is no device."""

    def loading_pool(self) -> None:
        """Nor one that is being filled."""

    moves_beside_steps = False
    trade: MemoryTrade | None = None

    def record_device_step(self, found: Any, demands: Any, s: float) -> None: ...

    def groups(self, phase: str) -> tuple[tuple[int, ...], ...] | None:
        return self.layer_groups if phase == "prefill" else None

    def load_group(self, index: int) -> None:
        self.loaded.append(index)

    def hint(self, layer: int, predicted: Tensor) -> None:
        self.hints.append((layer, predicted))

    def end_step(self) -> tuple[MoeUsage, list[MoeUsage]]:
        return MoeUsage(device_hits=len(self.steps)), []

    def record_resident_step(self, *told: object) -> None:
        raise AssertionError("nothing is resident, so nothing ran beside the layers")

    def update(self) -> tuple[int, int]:
        return 0, 0

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


def parts_of(wanted: MoeRequirements, layer: int, expert: int) -> dict:
    checkpoint, parts = wanted.checkpoint, {}
    for part, template in wanted.moe.parts.items():
        weight = checkpoint.read(template.format(layer=layer, expert=expert))
        parts[part] = dense(weight) if part.endswith("bias") else weight
    return parts
