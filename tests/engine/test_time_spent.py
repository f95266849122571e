"""What a slow request waited for: its parts add up to its time, and the slow tier is named."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from benchmarks.gpu_runs import GREEDY, make_engine
from benchmarks.random_models import make_tokenizer
from coterie.core.events import Event, Finished, TimeSpent
from coterie.core.moe import MoeUsage
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits
from coterie.engine.engine import Engine
from coterie.engine.time_ledger import RequestLedger, TimeLedger
from tests.helpers.moe.dispatched_model import PROMPTS, DispatchedModel, Setting
from tests.helpers.moe.tiny_moe import checkpoint_of

READ_S = 0.004


def sent(engine: Engine, name: str, prompt: Sequence[int], output: int) -> None:
    limits = Limits(max_tokens=output, ignore_eos=True)
    assignment = Assignment(
        name, "m", tuple(prompt), GREEDY, limits, (), "", "", None, time.monotonic()
    )
    assert isinstance(engine.add(assignment), Admitted)


def ended(events: Sequence[Event]) -> dict[str, Finished]:
    return {event.request_id: event for event in events if isinstance(event, Finished)}


def drained(engine: Engine) -> dict[str, Finished]:
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    return ended(events)


@contextmanager
def served(strategy: str, capacity: int, host: str, delay_s: float) -> Iterator[Engine]:
    setting = Setting(checkpoint_of("qwen3_moe"), strategy, capacity, host, predict="off")
    with DispatchedModel(setting) as few:
        few.disk.delay_s = delay_s
        yield make_engine(few.model, make_tokenizer(few.model.spec.vocab), 2, 128)


def spent_of(end: Finished) -> TimeSpent:
    assert end.timings.spent is not None
    return end.timings.spent


@pytest.mark.parametrize(
    ("strategy", "capacity", "host"),
    [("lru", 3, "0"), ("cpu_only", 0, "10%"), ("adaptive", 6, "10%")],
)
def test_a_slow_disk_is_told(strategy: str, capacity: int, host: str) -> None:
    with served(strategy, capacity, host, READ_S) as engine:
        sent(engine, "slow", PROMPTS[2], 12)
        end = drained(engine)["slow"]
    spent = spent_of(end)
    assert end.timings.explained >= 0.95
    assert spent.disk_s > 0.5 * end.timings.total_s
    assert spent.link_s < 0.1 * end.timings.total_s and spent.cpu_s == spent.others_s == 0
    assert end.moe is not None
    assert end.moe.disk_s == pytest.approx(spent.disk_s, rel=0.05)


def test_nothing_is_told_of_the_disk_where_it_is_not_read() -> None:
    with served("persistent", 24, "100%", READ_S) as engine:
        sent(engine, "fast", PROMPTS[2], 12)
        end = drained(engine)["fast"]
    spent = spent_of(end)
    assert end.timings.explained >= 0.95
    assert spent.disk_s == spent.link_s == 0 and spent.device_s > 0


def test_waiting_for_others_is_told() -> None:
    """One decodes while another's prompt is computed in its steps; a third has no room to run."""
    with served("lru", 3, "0", READ_S) as engine:
        sent(engine, "decodes", PROMPTS[2], 20)
        events: list[Event] = []
        for _ in range(4):
            events += engine.step()
        sent(engine, "prompt", PROMPTS[0], 2)
        sent(engine, "queued", PROMPTS[1], 2)
        found = ended(events) | drained(engine)
    for end in found.values():
        assert end.timings.explained >= 0.95, end.request_id
    assert spent_of(found["decodes"]).others_s > 0.02
    assert found["queued"].timings.queue_s > 0.02


def test_waits_never_exceed_their_step() -> None:
    ledger, mine = TimeLedger(), RequestLedger()
    times = ledger.step(10.0, 11.0, 0.25, MoeUsage(stall_s=3.0, disk_s=1.0, cpu_s=0.5))
    assert times.run_s == pytest.approx(0.75) and times.host_s == 0.25
    assert times.device_s == pytest.approx(0.0) and times.link_s == pytest.approx(0.375)
    mine.add(ledger.num_steps, times, 0.0)
    mine.add(ledger.num_steps, times, 0.0)  # another choice of the same request
    # a step without it, 0.1 s behind the last
    ledger.step(11.1, 11.6, 0.25, None)
    spent = mine.spent(ledger.busy_s, 1.6)
    assert spent.others_s == pytest.approx(0.6)
    assert spent.total_s == pytest.approx(1.6)
    # 0.2 s of its first step's work were before it was scheduled, in its time in the queue
    at_once = RequestLedger()
    at_once.add(1, times, 0.0)
    assert at_once.spent(1.0, 0.8).total_s == pytest.approx(0.8)
    assert at_once.spent(1.0, 0.8).host_s == pytest.approx(0.05)
    # the last token became text 0.3 s behind its step
    assert ledger.since_ran(11.9) == pytest.approx(0.3)
    late = mine.spent(ledger.busy_s, 1.9, 0.3)
    assert late.host_s == pytest.approx(spent.host_s + 0.3)
    assert late.total_s == pytest.approx(1.9) and late.others_s == pytest.approx(0.6)
    # after a pause without requests
    ledger.idle()
    assert ledger.since_ran(50.0) == 0
    assert ledger.step(50.0, 51.0, 0.25, None).host_s == 0


def test_what_a_device_did_not_compute_was_the_engine() -> None:
    """By the device's clock a step took less than for the one who waited; or more, where it had
    begun before."""
    ledger = TimeLedger()
    usage = MoeUsage(stall_s=0.2, cpu_s=0.05)
    times = ledger.step(10.0, 11.0, 0.1, usage, device_s=0.6)
    assert times.run_s == pytest.approx(0.6) and times.host_s == pytest.approx(0.4)
    assert times.device_s == pytest.approx(0.4)
    assert times.link_s == pytest.approx(0.15) and times.cpu_s == pytest.approx(0.05)
    early = ledger.step(11.0, 11.5, 0.1, usage, device_s=0.7)
    assert early.run_s == pytest.approx(0.5) and early.host_s == pytest.approx(0.0)
    assert early.device_s == pytest.approx(0.3)
    # waits that pass at one time are not longer than what the device was busy
    assert ledger.step(11.5, 12.5, 0.1, usage, device_s=0.1).run_s == pytest.approx(0.1)
    assert ledger.busy_s == pytest.approx(2.5)
