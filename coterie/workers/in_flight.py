"""All accepted requests of a replica: the tokens that each client has, and the crashes it was in.

Sends each event to the request's sink once, even if a restarted worker repeats events. Decides
which requests a new worker gets, and which must run alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from coterie.core.errors import InvalidRequest
from coterie.core.events import Delta, Event, Failed, Finished, Started, Timings, Usage
from coterie.core.plan import Admitted, Assignment, Rejected
from coterie.obs.log import log
from coterie.workers.contract import OnOutage, Sink, WorkerReport, never_moved
from coterie.workers.loop import VALUE_LOST

# a request that was running in this many crashes is suspect and runs alone; after one more it fails
SUSPECT_CRASHES = 2
# the engine checks deadlines itself; if it is silent this long after one, it hangs or is dead
LATE_S = 0.5
# faults that are logged once, not with every report
MAX_LOGGED_FAULTS = 256


@dataclass(slots=True)
class InFlightRequest:
    assignment: Assignment
    sink: Sink
    verdict: asyncio.Future[Admitted | Rejected]
    emitted: list[list[int]]
    on_outage: OnOutage = never_moved
    # choice -> finish_reason
    finished: dict[int, str] = field(default_factory=dict)
    started: Started | None = None
    # seconds since arrival
    started_s: float = 0.0
    first_token_s: float = 0.0
    crashes: int = 0
    # time.monotonic() of the last crash until an event comes again, then 0; and all such time
    lost_at: float = 0.0
    outage_s: float = 0.0
    # whether the running worker has it
    present: bool = True
    # worker processes that had it when they fell silent. They may have sent reports of it that are
    # still to be read, so it never runs there again
    left: set[object] = field(default_factory=set)
    # timer for a deadline that passes without an event
    alarm: asyncio.TimerHandle | None = None

    @property
    def suspect(self) -> bool:
        return self.crashes >= SUSPECT_CRASHES

    def may_move(self, *, is_silent: bool) -> bool:
        """Whether another replica may continue it. A suspect could end that one too, so it stays.
        `is_silent`: the worker sends nothing, and has not been seen to die."""
        if not self.present:
            return not self.suspect
        return is_silent and not self.crashes and len(self.finished) < len(self.emitted)

    def resumed(self) -> Assignment:
        emitted = tuple(tuple(ids) for ids in self.emitted) if any(self.emitted) else ()
        return replace(self.assignment, emitted=emitted, finished=tuple(sorted(self.finished)))


class InFlightRequests:
    def __init__(self) -> None:
        self._entries: dict[str, InFlightRequest] = {}
        # number of requests that the running worker does not have, and of suspects
        self._waiting = self._num_suspects = 0
        # the worker missed a deadline and has been silent since
        self._is_late = False
        self._emptied = asyncio.Event()
        self._emptied.set()
        # recoveries since start: requests that another worker continued, and how many of them
        # alone; deadlines that the worker missed; values that could not be passed on
        self._continued = self._alone = self._missed = self._faults = 0
        # paths of such values that were already logged
        self._logged_faults: set[str] = set()

    def stats(self) -> dict[str, float]:
        return {
            "requests_continued": float(self._continued),
            "requests_alone": float(self._alone),
            "deadlines_missed": float(self._missed),
            "values_refused": float(self._faults),
        }

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def quarantined(self) -> bool:
        """Whether a suspect waits or runs: then no other request may run."""
        return self._num_suspects > 0

    @property
    def working(self) -> bool:
        """Whether the running worker has requests, so that it must report."""
        return self._is_late or len(self._entries) > self._waiting

    async def emptied(self) -> None:
        await self._emptied.wait()

    async def drain(self, replica: str, timeout_s: float) -> None:
        """Wait until every request has ended, at most `timeout_s`."""
        try:
            await asyncio.wait_for(self.emptied(), timeout_s)
        except TimeoutError:
            log("drain_timed_out", level="warning", replica=replica, pending=len(self))

    def open(
        self, assignment: Assignment, sink: Sink, on_outage: OnOutage = never_moved
    ) -> asyncio.Future[Admitted | Rejected]:
        """Add a request that is being sent to the worker; the future is the worker's verdict."""
        if assignment.request_id in self._entries:
            raise InvalidRequest(f"a request with the id {assignment.request_id!r} is running")
        verdict: asyncio.Future[Admitted | Rejected] = asyncio.get_running_loop().create_future()
        emitted: list[list[int]] = [[] for _ in range(assignment.sampling.n or 1)]
        self._insert(InFlightRequest(assignment, sink, verdict, emitted, on_outage))
        return verdict

    def holds(self, request_id: str) -> bool:
        return request_id in self._entries

    def offer(self, *, is_silent: bool) -> None:
        """Tell the requests that no worker runs, so that they may be moved."""
        for entry in list(self._entries.values()):
            if entry.may_move(is_silent=is_silent):
                try:
                    entry.on_outage()
                except Exception as error:
                    # it waits for the next worker of this replica
                    request_id = entry.assignment.request_id
                    log("request_not_moved", level="error", error=error, request_id=request_id)

    def release(
        self, request_id: str, to_child: object, *, is_silent: bool
    ) -> InFlightRequest | None:
        """Remove a request that another worker process continues; None if it has to stay."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.may_move(is_silent=is_silent) or to_child in entry.left:
            return None
        return self._remove(request_id)

    def adopt(self, entry: InFlightRequest) -> None:
        """Take over a request from another replica; `resume` returns it."""
        if entry.present:
            # the worker that it leaves is silent: as if that one had died
            entry.present = False
            entry.crashes += 1
            entry.lost_at = time.monotonic()
        self._insert(entry)
        self._waiting += 1

    def drop(self, request_id: str) -> bool:
        """Remove a request that no one waits for. Returns whether the worker has it."""
        entry = self._remove(request_id)
        if entry is None:
            return False
        if not entry.verdict.done():
            entry.verdict.set_result(Rejected("unavailable", "aborted by the caller", None))
        return entry.present

    def postpone(self, request_id: str) -> None:
        """The request did not reach the worker: the next worker gets it."""
        self._set_present(self._entries[request_id], False)

    def take(self, report: WorkerReport) -> list[str]:
        """Set verdicts and pass events on, in the order of the report's lists. Returns the requests
        that ended because of a bad value: the worker still runs them."""
        self._is_late = False
        entries = self._entries
        for request_id, admitted in report.admitted:
            if request_id in entries and not entries[request_id].verdict.done():
                entries[request_id].verdict.set_result(admitted)
        for request_id, rejected in report.rejected:
            self._rejected(request_id, rejected)
        lost = self._faulty_requests(report)
        events: Iterator[Event] = chain(
            report.started, report.deltas, report.finished, report.failed
        )
        for event in events:
            try:
                self._take(event)
            except Exception as error:
                log("event_lost", level="error", error=error, request_id=event.request_id)
                lost.append(event.request_id)
                self._fail_undelivered(event.request_id)
        return lost

    def refused(self, request_id: str, path: str) -> None:
        """A value of this request could not be passed on."""
        self._faults += 1
        log("value_refused", level="error", request_id=request_id, reason=path)

    def _faulty_requests(self, report: WorkerReport) -> list[str]:
        if not report.faults:
            return []
        failed = [event.request_id for event in report.failed]
        for path in report.faults:
            if not failed and path in self._logged_faults:
                # faults without a request come with every report: log each once
                self._faults += 1
                continue
            if len(self._logged_faults) < MAX_LOGGED_FAULTS:
                self._logged_faults.add(path)
            self.refused(",".join(failed), path)
        return failed

    def _take(self, event: Event) -> None:
        entry = self._entries.get(event.request_id)
        if entry is None:
            return
        if entry.lost_at:
            entry.outage_s += time.monotonic() - entry.lost_at
            entry.lost_at = 0.0
        if isinstance(event, Delta):
            _take_delta(entry, event)
        elif not isinstance(event, Started):
            self._end(event)
        elif entry.started is None:
            entry.started = event
            entry.started_s = max((event.at or time.monotonic()) - entry.assignment.arrived_at, 0.0)
            entry.sink(event)

    def _fail_undelivered(self, request_id: str) -> None:
        """An event could not be passed on: try to tell its request that it failed."""
        self._faults += 1
        with suppress(Exception):
            self._end(Failed(request_id, "internal_error", VALUE_LOST))

    def crashed(self) -> None:
        """The worker died. Count the crash for the requests it had; those that cannot be retried
        fail."""
        self._is_late = False
        for entry in list(self._entries.values()):
            if not entry.present:
                continue
            entry.crashes += 1
            entry.lost_at = entry.lost_at or time.monotonic()
            self._num_suspects += entry.crashes == SUSPECT_CRASHES
            self._set_present(entry, False)
            if len(entry.finished) == len(entry.emitted):
                self._end(_synthesised(entry))
            elif entry.crashes > SUSPECT_CRASHES:
                message = f"the worker died {entry.crashes} times while running this request"
                self._end(Failed(entry.assignment.request_id, "worker_crashed", message))

    def resume(self) -> Iterator[Assignment]:
        """The assignments to send to the running worker now. A suspect is sent alone."""
        waiting = [entry for entry in self._entries.values() if not entry.present]
        suspects = [entry for entry in waiting if entry.suspect]
        if self.quarantined:
            waiting = suspects[:1] if not self.working else []
        for entry in waiting:
            self._set_present(entry, True)
            self._continued += 1
            self._alone += entry.suspect
            yield entry.resumed()

    def fail_all(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        for request_id in list(self._entries):
            self._end(Failed(request_id, code, message, retry_after_s))

    def _rejected(self, request_id: str, rejected: Rejected) -> None:
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if not entry.verdict.done():
            self._remove(request_id)
            entry.verdict.set_result(rejected)
            return
        # it was accepted before a crash: it waits as long as the worker says that there will be
        # room
        self._set_present(entry, False)
        if rejected.retry_after_s is None:
            failed = Failed(request_id, rejected.code, rejected.reason, rejected.retry_after_s)
            self._end(failed)

    def _late(self, request_id: str) -> None:
        """The worker did not end it in time: end it with the text that its client has."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        log("deadline_missed", level="warning", request_id=request_id)
        self._missed += 1
        self._is_late |= entry.present
        for choice in range(len(entry.emitted)):
            if choice not in entry.finished:
                _take_delta(entry, Delta(request_id, choice, "", (), finish_reason="timeout"))
        self._end(_synthesised(entry))

    def _end(self, event: Finished | Failed) -> None:
        entry = self._remove(event.request_id)
        if entry is None:
            return
        if not entry.verdict.done():
            entry.verdict.set_result(_verdict_of(event))
        entry.sink(_whole_timings(entry, event))

    def _insert(self, entry: InFlightRequest) -> None:
        assignment = entry.assignment
        if assignment.deadline is not None:
            left_s = max(0.0, assignment.deadline - time.monotonic()) + LATE_S
            loop = asyncio.get_running_loop()
            entry.alarm = loop.call_later(left_s, self._late, assignment.request_id)
        self._entries[assignment.request_id] = entry
        self._emptied.clear()

    def _remove(self, request_id: str) -> InFlightRequest | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.alarm is not None:
            entry.alarm.cancel()
        if entry is not None:
            self._waiting -= not entry.present
            self._num_suspects -= entry.suspect
        if not self._entries:
            self._emptied.set()
        return entry

    def _set_present(self, entry: InFlightRequest, present: bool) -> None:
        if entry.present != present:
            self._waiting += -1 if present else 1
            entry.present = present


def _take_delta(entry: InFlightRequest, delta: Delta) -> None:
    emitted = entry.emitted[delta.choice]
    if delta.token_ids and not emitted and not entry.first_token_s:
        entry.first_token_s = _since_arrival_s(entry)
    emitted += delta.token_ids
    if delta.finish_reason is not None:
        entry.finished[delta.choice] = delta.finish_reason
    entry.sink(delta)


def _verdict_of(event: Finished | Failed) -> Admitted | Rejected:
    if isinstance(event, Failed):
        return Rejected(event.code, event.message, event.retry_after_s)
    return Admitted("")


def _synthesised(entry: InFlightRequest) -> Finished:
    """`Finished` for a request whose choices have ended, but whose last event was lost."""
    started = entry.started
    usage = Usage(
        prompt_tokens=len(entry.assignment.prompt_ids),
        completion_tokens=sum(len(ids) for ids in entry.emitted),
        cached_tokens=started.cached_tokens if started else 0,
        stored_tokens=started.stored_tokens if started else 0,
    )
    total_s = _since_arrival_s(entry)
    choices = tuple(reason for _, reason in sorted(entry.finished.items()))
    queue_s, first_s = entry.started_s if started else total_s, entry.first_token_s
    timings = Timings(
        queue_s=queue_s,
        prefill_s=max((first_s or total_s) - queue_s, 0.0),
        first_token_s=first_s,
        decode_s=max(total_s - first_s, 0.0) if first_s else 0.0,
        total_s=total_s,
        outage_s=entry.outage_s,
    )
    return Finished(entry.assignment.request_id, choices, usage, timings)


def _whole_timings(entry: InFlightRequest, event: Finished | Failed) -> Event:
    """The event with times and counts of the whole request: a worker that continued it counts only
    from its own start."""
    if isinstance(event, Failed) or not entry.crashes or entry.started is None:
        return event
    timings = replace(
        event.timings,
        queue_s=entry.started_s,
        load_s=min(event.timings.load_s, entry.started_s),
        first_token_s=entry.first_token_s,
        decode_s=event.timings.total_s - entry.first_token_s,
        outage_s=entry.outage_s,
    )
    usage = replace(
        event.usage,
        cached_tokens=entry.started.cached_tokens,
        stored_tokens=entry.started.stored_tokens,
    )
    return replace(event, usage=usage, timings=timings)


def _since_arrival_s(entry: InFlightRequest) -> float:
    return time.monotonic() - entry.assignment.arrived_at
