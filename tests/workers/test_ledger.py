"""workers/in_flight.py: nothing is lost, nothing is said twice, suspects run alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from coterie.core.errors import InvalidRequest
from coterie.core.events import Delta, Event, Failed, Finished, Started, Timings, Usage
from coterie.core.plan import Admitted, Rejected
from coterie.core.request import Sampling
from coterie.workers.contract import WorkerReport
from coterie.workers.in_flight import LATE_S, InFlightRequests
from tests.helpers.serving.worker_requests import GREEDY, assign

FULL = Rejected("overloaded", "full", 1.0)


def on_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def runner() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    runner.__name__ = test.__name__
    return runner


def accepted(ledger: InFlightRequests, name: str, sampling: Sampling = GREEDY) -> list[Event]:
    events: list[Event] = []
    verdict = ledger.open(assign(name, sampling=sampling), events.append)
    ledger.take(
        WorkerReport(admitted=[(name, Admitted("r0"))], started=[Started(name, "r0", 4, 0)])
    )
    assert isinstance(verdict.result(), Admitted)
    return events


def delta(name: str, *tokens: int, choice: int = 0, end: str | None = None) -> WorkerReport:
    return WorkerReport(deltas=[Delta(name, choice, "", tokens, finish_reason=end)])


NINE = Timings(total_s=9.0)


def finished(name: str, timings: Timings = NINE) -> WorkerReport:
    return WorkerReport(finished=[Finished(name, ("stop",), Usage(4, 1, 3), timings)])


def resumed(ledger: InFlightRequests) -> dict[str, Any]:
    return {item.request_id: item for item in ledger.resume()}


@on_loop
async def test_a_crash_resumes_behind_what_the_client_has() -> None:
    ledger = InFlightRequests()
    two = Sampling(temperature=0.0, top_p=1.0, n=2, num_beams=1, seed=1)
    events = accepted(ledger, "a", two)
    ledger.take(delta("a", 1, 2))
    ledger.take(delta("a", 3, choice=1, end="stop"))
    ledger.crashed()
    assert ledger.waiting == 1 and not ledger.working
    again = resumed(ledger)["a"]
    assert again.emitted == ((1, 2), (3,)) and again.finished == (1,)
    # the second worker begins again: its verdict and Started are not news
    ledger.take(WorkerReport(admitted=[("a", Admitted("r0"))], started=[Started("a", "r0", 4, 9)]))
    ledger.take(delta("a", 4, end="length"))
    ledger.take(finished("a"))
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", "Delta", "Delta", "Delta", "Finished"]
    # counts and times are those the client saw, not the second worker's
    assert isinstance(events[-1], Finished) and events[-1].usage.cached_tokens == 0
    assert len(ledger) == 0


@on_loop
async def test_a_takeover_did_not_wait_in_the_queue_while_it_ran() -> None:
    ledger = InFlightRequests()
    events: list[Event] = []
    ledger.open(replace(assign("a"), arrived_at=time.monotonic() - 1.0), events.append)
    ledger.take(WorkerReport(started=[Started("a", "r0", 4, 0)]))
    ledger.take(delta("a", 1, 2))
    ledger.crashed()
    await asyncio.sleep(0.02)
    resumed(ledger)
    # the second worker scheduled it nine seconds after it came, five of them for its adapters
    ledger.take(finished("a", Timings(queue_s=9.0, load_s=5.0, first_token_s=9.1, total_s=10.0)))
    last = events[-1]
    assert isinstance(last, Finished)
    told = last.timings
    assert 1.0 <= told.queue_s <= told.first_token_s < 2.0 and told.total_s == 10.0
    assert 0.02 <= told.outage_s < 1.0
    assert told.load_s <= told.queue_s and told.decode_s == told.total_s - told.first_token_s


@on_loop
async def test_a_lost_last_word_is_made_up() -> None:
    ledger = InFlightRequests()
    events = accepted(ledger, "a")
    ledger.take(delta("a", 1, 2, 3, end="stop"))
    ledger.crashed()
    assert len(ledger) == 0 and not resumed(ledger)
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.choices == ("stop",) and last.usage == Usage(4, 3, 0)


@on_loop
async def test_two_crashes_then_alone_then_failed() -> None:
    ledger = InFlightRequests()
    events = {name: accepted(ledger, name) for name in ("a", "b")}
    ledger.crashed()
    assert set(resumed(ledger)) == {"a", "b"} and not ledger.quarantined
    late = accepted(ledger, "late")
    ledger.crashed()
    # a and b are suspects: one runs, the others wait, the innocent one too
    assert ledger.quarantined
    assert set(resumed(ledger)) == {"a"}
    assert not resumed(ledger)
    ledger.crashed()
    assert isinstance(events["a"][-1], Failed) and events["a"][-1].code == "worker_crashed"
    # who was not there is not blamed
    assert set(resumed(ledger)) == {"b"}
    ledger.take(finished("b"))
    assert isinstance(events["b"][-1], Finished)
    assert not ledger.quarantined and set(resumed(ledger)) == {"late"}
    ledger.take(finished("late"))
    assert isinstance(late[-1], Finished)
    assert len(ledger) == 0 and ledger.waiting == 0


@on_loop
async def test_an_accepted_request_waits_when_the_new_worker_is_full() -> None:
    ledger = InFlightRequests()
    accepted(ledger, "a")
    events = accepted(ledger, "b")
    ledger.crashed()
    assert set(resumed(ledger)) == {"a", "b"}
    ledger.take(WorkerReport(rejected=[("b", FULL)]))
    assert ledger.waiting == 1 and not isinstance(events[-1], Failed)
    ledger.take(finished("a"))
    assert set(resumed(ledger)) == {"b"}
    # also by a worker that runs nothing we know of: aborted requests may still fill its queue
    ledger.take(WorkerReport(rejected=[("b", FULL)]))
    assert set(resumed(ledger)) == {"b"} and not isinstance(events[-1], Failed)
    # a refusal without a time to come back is final
    ledger.take(WorkerReport(rejected=[("b", Rejected("invalid_request", "never", None))]))
    assert isinstance(events[-1], Failed) and events[-1].code == "invalid_request"
    assert len(ledger) == 0


@on_loop
async def test_refusals_drops_and_late_words() -> None:
    ledger = InFlightRequests()
    events: list[Event] = []
    verdict = ledger.open(assign("a"), events.append)
    with pytest.raises(InvalidRequest):
        ledger.open(assign("a"), events.append)
    ledger.take(WorkerReport(rejected=[("a", FULL)]))
    assert verdict.result() == FULL and len(ledger) == 0 and events == []
    events = accepted(ledger, "b")
    assert ledger.drop("b") and not ledger.drop("b")
    ledger.take(delta("b", 1))
    ledger.take(finished("b"))
    assert len(events) == 1
    await asyncio.wait_for(ledger.emptied(), 60)


@on_loop
async def test_a_request_without_verdict_survives_a_crash() -> None:
    ledger = InFlightRequests()
    events: list[Event] = []
    verdict = ledger.open(assign("a"), events.append)
    ledger.crashed()
    assert not verdict.done() and set(resumed(ledger)) == {"a"}
    ledger.fail_all("unavailable", "gone")
    assert verdict.result() == Rejected("unavailable", "gone", None)


@on_loop
async def test_a_deadline_holds_when_the_worker_is_silent() -> None:
    ledger = InFlightRequests()
    two = Sampling(temperature=0.0, top_p=1.0, n=2, num_beams=1, seed=1)
    events: list[Event] = []
    unheard: list[Event] = []
    soon = time.monotonic() + 0.05
    begun = replace(assign("begun", sampling=two), deadline=soon)
    ledger.open(begun, events.append)
    verdict = ledger.open(replace(assign("unheard"), deadline=soon), unheard.append)
    ended = accepted(ledger, "plain")
    ledger.take(WorkerReport(started=[Started("begun", "r0", 4, 0)]))
    ledger.take(delta("begun", 1, 2))
    ledger.take(delta("begun", 3, choice=1, end="stop"))
    # dead or alive
    ledger.crashed()
    await asyncio.sleep(0.05 + LATE_S + 0.1)
    *_, cut, last = events
    assert isinstance(cut, Delta) and (cut.choice, cut.finish_reason) == (0, "timeout")
    assert isinstance(last, Finished) and last.choices == ("timeout", "stop")
    assert last.usage == Usage(4, 3, 0) and last.timings.total_s >= 0.05
    assert last.timings.queue_s <= last.timings.first_token_s < last.timings.total_s
    # its caller still waited for a verdict
    assert isinstance(verdict.result(), Admitted)
    assert [type(event) for event in unheard] == [Delta, Finished]
    # what comes late is nobody's, and who has no deadline waits on
    ledger.take(delta("begun", 9))
    assert events[-1] is last and len(ledger) == 1 and len(ended) == 1


@on_loop
async def test_a_deadline_that_was_kept_says_nothing_more() -> None:
    ledger = InFlightRequests()
    events: list[Event] = []
    ledger.open(replace(assign("a"), deadline=time.monotonic() + 60), events.append)
    ledger.take(finished("a"))
    assert len(events) == 1 and len(ledger) == 0
    waiting = [handle for handle in asyncio.get_running_loop()._scheduled if not handle._cancelled]  # type: ignore[attr-defined]
    assert not waiting


@on_loop
async def test_a_worker_owes_a_word_for_the_deadline_it_missed() -> None:
    ledger = InFlightRequests()
    for heard in (lambda: ledger.take(WorkerReport()), ledger.crashed):
        ledger.open(replace(assign("a"), deadline=time.monotonic()), lambda event: None)
        await asyncio.sleep(LATE_S + 0.05)
        assert len(ledger) == 0 and ledger.working
        heard()
        assert not ledger.working
    # one that no worker had is nobody's fault
    ledger.open(replace(assign("b"), deadline=time.monotonic()), lambda event: None)
    ledger.postpone("b")
    await asyncio.sleep(LATE_S + 0.05)
    assert len(ledger) == 0 and not ledger.working
