"""A layer's experts shared between the kernels of pairs and the CPU, in Triton's interpreter with
the native thread beside it, against torch, on fresh random inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.kernels.triton_interpreter import interpreted, relative
from tests.kernels.test_cpu_share import bell_of, needs_compiler
from tests.kernels.test_triton_gemv import random_pool

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [pytest.mark.timeout(600), needs_compiler]

# one row, already normed or not; several rows that share experts, and chunks with masks
CASES = ["layer/fp32/1/normed", "whole/fp32/2/plain", "whole/fp32/9/plain"]
MORE = ["whole/fp32/4/plain", "whole/int8/4/plain"]
MORE += [
    f"layer/{kind}/{rows}/{norm}"
    for kind in ("fp32", "int8", "int4")
    for rows in (1, 4)
    for norm in ("normed", "plain")
]
# integers of 15 bits stand for the input of int8 and int4
TOLERANCE = {"fp32": 1e-5, "int8": 1e-3, "int4": 1e-3}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return interpreted(__file__, [*CASES, "silence"])


@pytest.mark.parametrize("case", CASES)
def test_shared_layer_is_the_whole_layer(errors: dict[str, float], case: str) -> None:
    assert errors[case] < TOLERANCE[case.split("/")[1]]


def test_takes_what_the_table_says(errors: dict[str, float]) -> None:
    assert errors["wrong decisions"] == 0


def test_silent_cpu_is_reported_and_gets_nothing_until_it_is_allowed(
    errors: dict[str, float],
) -> None:
    assert errors["failed job is the one that rang"] == 1
    assert errors["given while off"] == 0
    # the device then computes everything itself
    assert errors["layer while off"] < TOLERANCE["fp32"]
    assert errors["layer afterwards"] < TOLERANCE["fp32"]


@pytest.mark.full
def test_every_kind() -> None:
    found = interpreted(__file__, MORE)
    assert all(found[case] < TOLERANCE[case.split("/")[1]] for case in MORE)
    assert found["wrong decisions"] == 0


class Layer:
    """Random experts of which most are not on the device, one step, and the CPU's side."""

    def __init__(self, kind: str, rows: int, norm: bool, draw: Any) -> None:
        from coterie.kernels.cpu.build import native
        from coterie.kernels.cpu.share import ShareCoordinator, ShareRecords
        from coterie.kernels.triton import expert_gemv as kernels
        from coterie.kernels.triton.cpu_share import ShareState

        self.rows, self.inner, self.top_k, experts = rows, 96, 3, 6
        self.pool = pool = random_pool(kind, experts, 64, self.inner, draw)
        size = pool.record.nbytes
        begins = (pool.places * 16).tolist()
        records = [pool.base[begin : begin + size] for begin in begins]
        # more rows than a space of the answer has, or fewer
        self.bell = bell_of(12, 36, 64)
        self.share = ShareState.new(self.bell, experts * self.inner, "cpu")
        # spaces and numbers begin again
        self.first = int(torch.tensor([0, 30, 2**31 - 1, -1])[torch.randint(4, ())])
        for count in (self.bell.rung, self.bell.answered, self.share.state[:1]):
            count.fill_(self.first)
        library: Any = native()
        self.coordinator = ShareCoordinator(
            library, self.bell, [ShareRecords([None] * experts, pool.record),
                                  ShareRecords(records, pool.record)], 2,
        )  # fmt: skip
        self.tiers = (torch.rand(experts) < 0.7).to(torch.int8)
        self.x, self.gain = draw(rows, 64, std=1.0), 1 + draw(64)
        self.routed = kernels.RoutedRows.empty(rows, self.top_k, "cpu")
        self.draw_experts()
        self.routed.weights.copy_(torch.rand(rows, self.top_k))
        self.norms = torch.rsqrt(self.x.square().mean(-1) + 1e-6) if norm else None
        if self.norms is not None:
            self.routed.norms.copy_(self.norms)

    def draw_experts(self) -> None:
        drawn = [torch.randperm(6)[: self.top_k] for _ in range(self.rows)]
        self.routed.ids.copy_(torch.stack(drawn))
        self.routed.places.copy_(self.pool.places[self.routed.ids.long()])

    def allow(self, share: float) -> None:
        channels = [int(share * n * 32) // 32 * 32 for n in range(len(self.share.table))]
        self.share.table.copy_(torch.tensor(channels))

    def run_whole(self, limit: int = 100_000) -> float:
        """The error of one step in which the CPU takes whole experts."""
        from coterie.kernels.triton import cpu_share
        from coterie.kernels.triton import expert_gemv as kernels
        from coterie.kernels.triton.expert_groups import ExpertScratch, run_experts_many

        routed = self.routed
        self.taken = torch.full(routed.ids.shape, 99, dtype=torch.int32)
        cpu_share.ring(
            self.x, routed.ids, routed.weights, self.tiers, 1, self.inner, self.share, self.taken,
            whole=True,
        )  # fmt: skip
        hidden = torch.zeros(self.rows, 64)
        scratch = ExpertScratch.empty(
            self.rows, self.top_k, 6, self.pool.record, torch.float32, "cpu"
        )
        # what the CPU computes is nowhere else
        scratch.values.fill_(float("nan"))
        left = replace(routed, ids=self.taken)
        run_experts_many(self.x, left, self.pool, hidden, scratch)
        cpu_share.await_cpu(hidden, self.share, limit)
        want = kernels.experts_torch(self.x, routed.ids, routed.weights, self.pool)
        return relative(hidden, want)

    def run(self, limit: int = 100_000) -> float:
        """The error of one step."""
        from coterie.kernels.triton import cpu_share
        from coterie.kernels.triton import expert_gemv as kernels

        routed, sizes = self.routed, kernels.PairSizes(16, 1, 16, 1, 64)
        self.taken = torch.full(routed.ids.shape, -1, dtype=torch.int32)
        # what the CPU computes is nowhere else
        acts = torch.full((routed.ids.numel(), self.inner), float("nan"))
        before = torch.randn(self.rows, 64)
        hidden = before.clone()
        norm = None if self.norms is None else (self.gain, self.norms)
        gain = None if norm is None else self.gain
        cpu_share.ring(
            self.x, routed.ids, routed.weights, self.tiers, 1, self.inner, self.share, self.taken,
            norm,
        )  # fmt: skip
        kernels.pair_gate_up(self.x, routed, self.pool, acts, sizes, gain, taken=self.taken)
        kernels.pair_down(acts, routed, self.pool, hidden, sizes, taken=self.taken)
        cpu_share.await_cpu(hidden, self.share, limit)
        x = self.x if norm is None else self.x * norm[1][:, None] * self.gain
        want = kernels.experts_torch(x, routed.ids, routed.weights, self.pool)
        return relative(hidden - before, want)

    def is_wrong(self, whole: bool) -> bool:
        from coterie.kernels.triton.cpu_share import taken_torch

        want = taken_torch(self.routed.ids, self.tiers, self.share.table, self.inner, whole)
        return not torch.equal(self.taken, want)


def measure(cases: list[str]) -> dict[str, float]:
    torch.seed()
    found: dict[str, float] = {"wrong decisions": 0.0}

    def draw(*size: int, std: float = 0.2) -> Any:
        return torch.randn(size) * std

    for case in cases:
        if case == "silence":
            found |= silence(Layer("fp32", 1, True, draw))
            continue
        way, kind, rows, norm = case.split("/")
        layer = Layer(kind, int(rows), norm == "normed", draw)
        worst = 0.0
        for share in (0.6, 0.0, 1.0) if case in MORE else (0.6,):
            layer.allow(share)
            layer.draw_experts()
            worst = max(worst, layer.run_whole() if way == "whole" else layer.run())
            found["wrong decisions"] += layer.is_wrong(way == "whole")
        layer.coordinator.close()
        found[case] = worst
    return found


def silence(layer: Layer) -> dict[str, float]:
    """A thread that does not answer for a while."""
    from coterie.kernels.cpu.share import next_number

    layer.tiers.fill_(1)
    layer.allow(0.5)
    layer.coordinator.pause(True)
    layer.run(limit=20)
    told = int(layer.bell.failed) == next_number(layer.first)
    found = {"failed job is the one that rang": float(told)}
    found["layer while off"] = layer.run(limit=20)
    found["given while off"] = float(layer.taken.sum())
    layer.coordinator.pause(False)
    layer.share.state[2] = 0
    found["layer afterwards"] = layer.run()
    layer.coordinator.close()
    return found
