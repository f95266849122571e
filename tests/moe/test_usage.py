"""Counts of steps: all layers at once are the same as one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from coterie.moe.runtime.layer_executor import LayerJob
from coterie.moe.runtime.step import ExpertStep
from coterie.moe.runtime.usage import FIELDS, LayerTally, UsageTally, UsageTelemetry
from coterie.moe.store.base import ExpertGeometry

if TYPE_CHECKING:
    from coterie.kernels.expert_layout import ExpertLayout

GEOMETRY = ExpertGeometry((1, 2, 5, 6), 8, 2)
COUNTED = ("device_hits", "device_misses", "host_hits", "moved_bytes", "stall_s", "compute_s")


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_step_counts_as_its_layers_one_by_one(seed: int) -> None:
    draw, at_once, one_by_one = np.random.default_rng(seed), *map(UsageTelemetry, [GEOMETRY] * 2)
    for number in range(4):
        counts = {
            name: draw.random(4) if name.endswith("_s") else draw.integers(0, 1 << 40, 4)
            for name in COUNTED
        }
        whole = at_once.add_step(counts)
        for row, layer in enumerate(GEOMETRY.layers):
            tally = UsageTally()
            for name, values in counts.items():
                setattr(tally, name, values[row].item())
            one_by_one.add(layer, tally)
        # what belongs to no step, and what only one of the layers has
        for telemetry in (at_once, one_by_one):
            telemetry.outside_steps(2).read_bytes += 77 + number
            late = UsageTally()
            late.moved_bytes = 5
            telemetry.add(5, late)
        (total, parts), (want, _) = at_once.end_step(), one_by_one.end_step()
        assert total.layers == want.layers and parts == [total]
        for name in FIELDS:
            assert getattr(total, name) == pytest.approx(getattr(want, name), rel=1e-12)
            # sent to another process: no number of numpy's
            assert type(getattr(total, name)) is (float if name.endswith("_s") else int)
        assert whole.moved_bytes == total.moved_bytes - 5
    for layer, tally in at_once.layers.items():
        found, wanted = tally.as_dict(), one_by_one.layers[layer].as_dict()
        assert found == pytest.approx(wanted, rel=1e-12)
        assert found["moved_bytes"] == wanted["moved_bytes"]
    assert at_once.total().as_dict() == pytest.approx(one_by_one.total().as_dict(), rel=1e-12)


def test_an_accelerator_waits_for_what_the_cpu_computes() -> None:
    """Layer by layer: experts that the CPU computes beside a device are not the device's time."""
    step = ExpertStep(
        0, "decode", torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
    )

    def closed(own_memory: bool) -> LayerTally:
        job = LayerJob(step, cast("ExpertLayout", None), torch.zeros(2, 4), lambda *_: None)
        if own_memory:
            job.host_out = torch.zeros(2, 4)
        job.worked = {"device": [(0.0, 1.0)], "host": [(0.5, 3.0), (4.0, 4.5)]}
        job.tally.waits = job.tally.disk_waits = [(3.0, 4.0)]
        job.close()
        return job.tally

    beside = closed(own_memory=True)
    assert (beside.cpu_s, beside.disk_s, beside.stall_s) == (2.5, 1.0, 3.5)
    assert beside.compute_s == 4.0
    # where both are one memory, the cores that compute are the device
    alone = closed(own_memory=False)
    assert (alone.cpu_s, alone.disk_s, alone.stall_s) == (0.0, 1.0, 1.0)
