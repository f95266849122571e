"""How a step's missing experts are divided between the link and the CPU, and what happens when the
CPU does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from benchmarks.moe.gpu_split import WAYS, hold
from coterie.core.errors import Unavailable
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.device_record import DeviceRecord
from coterie.moe.runtime import cpu_share
from coterie.moe.runtime.cpu_share import CpuShare, ShareRates
from tests.moe.test_bank import GEOMETRY, RECORD, DrawnStore, filled_bank

pytest.importorskip("triton")

LARGE = DeviceRecord("bf16", 2048, 768)


def times_of(rates: ShareRates, channels: int, own: int, each: float) -> tuple[float, float]:
    """Seconds of the device and of the CPU in a layer whose CPU part has `own` channels."""
    link = cpu_share._LAYER_S + (channels - own) * each / rates.link
    return link, cpu_share._JOB_S + own * each / rates.cpu if own else 0.0


@pytest.mark.parametrize("cpu", [5e9, 50e9, 90e9, 500e9])
def test_both_end_together_and_no_later_than_one_alone(cpu: float) -> None:
    rates, each = ShareRates(52e9, cpu), LARGE.nbytes / LARGE.intermediate
    table = rates.table(8, LARGE).tolist()
    assert len(table) == 8 * LARGE.intermediate // 32 + 1
    assert table[0] == 0 and table == sorted(table)
    for missing, own in enumerate(table):
        channels = missing * 32
        assert own % 32 == 0 and 0 <= own <= channels
        link, mine = times_of(rates, channels, own, each)
        alone = min(max(times_of(rates, channels, one, each)) for one in (0, channels))
        # a job that saves less is not given
        assert max(link, mine) <= alone + cpu_share._LEAST_GAIN_S
        if 0 < own < channels:
            assert abs(link - mine) <= 32 * each * (1 / rates.link + 1 / rates.cpu)


def test_a_slow_cpu_and_small_experts_get_nothing() -> None:
    assert not ShareRates(52e9, 1e6).table(8, LARGE).any()
    assert not ShareRates(52e9, 90e9).table(8, RECORD).any()


@pytest.fixture
def share() -> Iterator[CpuShare]:
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    library = native()
    assert library is not None
    bank = filled_bank(DrawnStore())
    found = CpuShare(cast("Any", bank), GEOMETRY, RECORD, library)
    yield found
    found.close()
    bank.close()


def test_rates_are_measured_and_then_follow_the_steps(share: CpuShare) -> None:
    # the experts are small
    assert not share.start(52e9)
    assert share.rates.link == 52e9 and share.rates.cpu > 0
    assert int(share.state.state[0]) == int(share._bell.rung) > 0
    before, sums = share.rates, share._bell.sums
    share.follow()
    assert share.rates is before
    # jobs, ns of the device, ns that it waited, channels over the link: a step that compiled
    sums.copy_(torch.tensor([1000, 10**12, 0, 10]))
    share.follow()
    followed = share.rates.link
    assert followed == pytest.approx(52e9 / 2 + 52e9 / 16 / 2, rel=1e-3)
    # a link that has next to nothing to do does not look fast
    sums.add_(torch.tensor([1000, 1000 * 13_000, 0, 10**9]))
    share.follow()
    assert share.rates.link == pytest.approx((followed + 52e9) / 2, rel=1e-3)


def test_the_benchmark_gives_everything_to_one_and_then_the_choice_back(
    share: CpuShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_share, "_LEAST_GAIN_S", 0.0)
    share.start(1e6)
    own: dict[str, list[torch.Tensor]] = {}
    channels = torch.arange(len(share.state.table)) * 32
    for way in (*WAYS, WAYS[0]):
        hold(share, way)
        # a step that compiled
        share._bell.sums.add_(torch.tensor([1000, 10**12, 0, 10]))
        share.follow()
        own.setdefault(way, []).append(share.state.table.clone())
    assert not own["link"][0].any() and torch.equal(own["CPU"][0], channels.int())
    for table in own["split"]:
        assert table.any() and (table <= channels).all()
    assert share.rates.link < share.measured.link, "the last way follows the steps"


def test_a_late_cpu_gets_less_and_is_tried_again(
    share: CpuShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_share, "_LEAST_GAIN_S", 0.0)
    share._patience = 3
    assert share.start(1e6)
    assert share.state.table.any()
    share._counts = replace(share._counts, nbytes=share._counts.nbytes - 1000)
    # a job of which the device waited for an hour, though the thread was busy for microseconds
    share._bell.sums.copy_(torch.tensor([96, 96 * 20_000, 3600 * 10**9, 1]))
    share.follow()
    assert share.rates.cpu == pytest.approx(share.measured.cpu * (1 + 1 / 16) / 2, rel=1e-3)
    share.rates = ShareRates(1e15, 1.0)
    share._send()
    assert not share.state.table.any()
    for _ in range(2):
        share.follow()
    assert not share.state.table.any()
    rung = int(share._bell.rung)
    share.follow()
    assert share.state.table.any() and share.rates == share.measured
    # the device's next number is the one behind those of the measurement
    assert int(share.state.state[0]) == int(share._bell.rung) > rung


def test_a_cpu_that_was_busy_at_start_is_measured_again(
    share: CpuShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_share, "_LEAST_GAIN_S", 1e-6)
    measure, slow = share._measure, [True, True]
    monkeypatch.setattr(
        share, "_measure", lambda *limit: 1.0 if slow and slow.pop() else measure(*limit)
    )
    share._patience = 4
    # worth nothing now, but the experts are large enough for such a link
    assert share.start(1e6) and not share.state.table.any()
    asked = 0
    while not share.state.table.any():
        share.follow()
        asked += 1
    # still busy at the first time, and then twice as long
    assert asked == 4 + 8 and share.measured.cpu > 1.0
    assert share._patience == cpu_share._QUIET_STEPS


def test_a_measurement_beside_requests_is_short(share: CpuShare) -> None:
    """A CPU that is slow now would let them wait for all jobs."""
    share.start(52e9)
    rung = int(share._bell.rung)
    assert share._measure(0.0) > 0
    assert int(share.state.state[0]) == int(share._bell.rung) == rung + 1
    asked: list[float] = []
    share._measure = lambda limit_s=0.0: asked.append(limit_s) or 0.0  # type: ignore
    share._patience, share._gives = 1, False
    share.follow()
    assert asked == [cpu_share._BESIDE_REQUESTS_S]


def test_a_silent_cpu_is_not_measured_behind_a_job_that_waits(share: CpuShare) -> None:
    share.start(52e9)
    share.pause(True)
    share._bell.rung.add_(1)
    assert share._measure() == 0.0 and int(share._bell.rung) == int(share.state.state[0]) + 1
    share.pause(False)


def test_silence_fails_one_step_and_the_cpu_gets_nothing_until_it_answers(share: CpuShare) -> None:
    share.start(52e9)
    share.check()
    share.pause(True)
    # what the device does when its time is over
    share._bell.rung.add_(1)
    share._bell.failed.copy_(share._bell.rung)
    share.state.state[2] = 1
    with pytest.raises(Unavailable, match="did not come within"):
        share.check()
    share.check()
    assert int(share.state.state[2]) == 1 and share.report()["failures"] == 1
    share.pause(False)
    deadline = time.perf_counter() + 30
    while int(share.state.state[2]) and time.perf_counter() < deadline:
        share.wake()
        share.check()
    assert int(share.state.state[2]) == 0
    assert share.report()["failures"] == 1
