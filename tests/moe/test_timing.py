"""Times beside busy processes: the fastest slices are the true ones, or the result is marked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from coterie.kernels.expert_layout import ExpertLayout
from coterie.moe.planner import measure, timing
from coterie.moe.planner.machine import MACHINE, Machine, profile_mark
from coterie.moe.planner.measure import ComputeTarget
from coterie.moe.planner.overhead import ZeroExpertStore
from coterie.moe.planner.timing import MachineUse, TimedWork, TimeSlice, time_together

# figures that are not marked may be so far from the quiet ones, beside the spreads
TOLERANCE = 0.35


def work_of(seconds: Sequence[float], *, clean: bool = True, pooled: bool = False) -> TimedWork:
    """Slices that took so long, as they were seen."""
    made = TimedWork(lambda: None, pooled=pooled)
    made.slices = [TimeSlice((s,), s, 0.0 if clean else s) for s in seconds]
    made.turns = timing.LEAST_TURNS
    return made


def test_the_fastest_slices_count() -> None:
    made = work_of([1.0, 1.01, 1.02] + [5.0] * 40).timing()
    assert made.settled and made.seconds == 1.01 and made.spread == pytest.approx(0.02)


def test_slices_that_disagree_or_waited_are_not_settled() -> None:
    apart = work_of([1.0, 1.5, 1.9] + [5.0] * 10).timing()
    assert not apart.settled and apart.seconds == 1.0 and apart.spread == pytest.approx(0.9)
    waited = work_of([1.0, 1.0, 1.0] * 4, clean=False).timing()
    assert not waited.settled and waited.seconds < 1.0 <= waited.seconds * (1 + waited.spread)
    # a single clean one beside them is enough
    one = work_of([1.0, 1.0, 1.0] * 4, clean=False)
    one.slices.append(TimeSlice((1.05,), 1.05, 0.0))
    assert one.timing().settled
    # threads of a pool wait for one another anyway
    assert work_of([1.0] * 24, clean=False, pooled=True).is_settled
    assert not work_of([1.0] * 12, clean=False, pooled=True).is_settled


def test_a_pool_beside_others_may_be_faster_than_it_was_seen() -> None:
    made = TimedWork(lambda: None, pooled=True, threads=2)
    # threads computed for 4 of 10 seconds and waited for 8
    made.slices = [TimeSlice((10.0,), 4.0, 8.0)] * timing.POOLED_SLICES
    beside = timing._widened(made.timing(), made, 0.9)
    assert beside.seconds == pytest.approx((10 * 2) ** 0.5) and not beside.settled
    assert beside.seconds * (1 + beside.spread) == pytest.approx(10.0)
    # a disk that nobody waits for a processor at is as slow as it was seen
    made.slices = [TimeSlice((10.0,), 4.0, 0.0)] * timing.POOLED_SLICES
    disk = timing._widened(made.timing(), made, 0.9)
    assert disk.seconds == 10.0 and disk.settled
    # others that used little changed little
    made.slices = [TimeSlice((10.0,), 4.0, 8.0)] * timing.POOLED_SLICES
    assert timing._widened(made.timing(), made, 0.1).seconds == pytest.approx(9.0**0.5 * 10**0.5)


def test_parts_have_fastest_slices_of_their_own() -> None:
    made = TimedWork(lambda: None)
    for row in range(9):
        slow = 10.0 if row % 3 else 1.0
        other = 1.0 if row % 3 else 10.0
        made.slices.append(TimeSlice((slow, other), 11.0, 9.0))
    assert made.timing().seconds == 2.0 and made.timing().settled


def test_threads_that_are_late_alike_every_time_are_found_out() -> None:
    """Parts that agree at fifty times what one thread alone takes."""

    def alone() -> None:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass

    made = TimedWork(lambda: None, threads=2, on_one=alone)
    made.slices = [TimeSlice((0.05, 0.05), 0.004, 0.3)] * timing.LEAST_SLICES
    made.turns = timing.LEAST_TURNS
    assert made.is_settled and made.timing().seconds == pytest.approx(0.1)
    made.time_on_one()
    found = made.timing()
    assert not found.settled and 0.001 <= found.seconds < 0.01
    assert found.seconds * (1 + found.spread) < 0.02
    # one that is merely no faster with two threads is left as it was seen
    made.slices = [TimeSlice((0.001, 0.0015), 0.004, 0.0)] * timing.LEAST_SLICES
    assert made.timing().settled and made.timing().seconds == pytest.approx(0.0025)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def figures(made: Machine, name: str) -> dict[str, tuple[float, str]]:
    """Seconds, and the part that they belong to."""
    record = made.profiles[name]
    return {
        "layer": (made.layer_s, MACHINE),
        "memory": (1 / made.dram_bytes_s, MACHINE),
        "expert": (record.host.at(1), profile_mark(name)),
        "prompt expert": (record.host.at(64), profile_mark(name)),
        "read": (record.read.each_s, profile_mark(name)),
        "link": (record.link.each_s, profile_mark(name)),
    }


def test_beside_four_loops_figures_hold_or_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real measurement, with real busy processes; before and after it without them."""
    monkeypatch.setattr(measure, "COLD_BYTES", 8 << 20)
    monkeypatch.setattr(measure, "_DRAM_BYTES", 1 << 25)
    monkeypatch.setattr(timing, "PATIENCE_S", 0.5)
    layout = ExpertLayout(256, 128, True, ("fp32", "fp32", "fp32"))
    store, place = ZeroExpertStore(layout), ComputeTarget("cpu", torch.get_num_threads())
    name = measure.profile_name(store, place)
    made = [measure.measure(store, place, None)]
    with busy_loops(4):
        made.append(measure.measure(store, place, None))
    made.append(measure.measure(store, place, None))
    before, beside, after = made
    for figure, (seconds, part) in figures(beside, name).items():
        marks = [each.marks[part] for each in made]
        if any(mark.disturbed for mark in marks):
            continue
        allowed = 1 + TOLERANCE + sum(max(mark.spreads.values()) for mark in marks)
        quiet = [figures(each, name)[figure][0] for each in (before, after)]
        assert min(quiet) / allowed <= seconds <= max(quiet) * allowed, (figure, made)


def test_others_are_seen_and_named() -> None:
    use = MachineUse()
    with busy_loops(os.cpu_count() or 1):
        deadline = time.monotonic() + 30
        while use.shares()[0] < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "other processes used" in use.reason()


def test_trying_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PATIENCE_S", 0.05)
    monkeypatch.setattr(timing, "_PAUSE_S", 0.0)
    calls = iter(range(10**9))
    # every run takes longer than the one before it: no two agree
    never = TimedWork(lambda: (0.8 ** next(calls),))
    started = time.monotonic()
    made = time_together({"never": never})
    assert not made.timings["never"].settled and time.monotonic() - started < 20
