"""What a replica owes: every accepted request, the tokens its client has, and the crashes it saw.

Sends each event to its request's sink once, whatever a restarted worker repeats, and says what to
hand to a new worker and in which company.
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
from coterie.workers.contract import Sink, WorkerReport
from coterie.workers.loop import VALUE_LOST

# Present in this many crashes: suspect, and run alone. In one more: failed.
SUSPECT_CRASHES = 2
# an engine keeps deadlines itself and tells more: one that is silent for so long is hung or dead
LATE_S = 0.5
# faults that are logged once and not with every report
MAX_STANDING = 256


@dataclass(slots=True)
class InFlightRequest:
    assignment: Assignment
    sink: Sink
    verdict: asyncio.Future[Admitted | Rejected]
    emitted: list[list[int]]
    # choice -> finish_reason
    finished: dict[int, str] = field(default_factory=dict)
    started: Started | None = None
    # both from arrival
    started_s: float = 0.0
    first_token_s: float = 0.0
    crashes: int = 0
    # the running worker has it
    present: bool = True
    # goes off when its deadline has passed in silence
    alarm: asyncio.TimerHandle | None = None

    @property
    def suspect(self) -> bool:
        return self.crashes >= SUSPECT_CRASHES

    def resumed(self) -> Assignment:
        emitted = tuple(tuple(ids) for ids in self.emitted) if any(self.emitted) else ()
        return replace(self.assignment, emitted=emitted, finished=tuple(sorted(self.finished)))


class InFlightRequests:
    def __init__(self) -> None:
        self._entries: dict[str, InFlightRequest] = {}
        # entries that the running worker does not have
        self._waiting = 0
        # it let a deadline pass and has said nothing since
        self._is_late = False
        self._emptied = asyncio.Event()
        self._emptied.set()
        # recovered from, since start: requests handed to another worker, of these alone; deadlines
        # that the worker let pass; values that could not be passed on
        self._continued = self._alone = self._missed = self._faults = 0
        # paths of these that were logged
        self._standing: set[str] = set()

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
        """A suspect waits or runs: nobody else may run beside it."""
        return any(entry.suspect for entry in self._entries.values())

    @property
    def working(self) -> bool:
        """The running worker has something to say."""
        return self._is_late or len(self._entries) > self._waiting

    async def emptied(self) -> None:
        await self._emptied.wait()

    async def drain(self, replica: str, timeout_s: float) -> None:
        """Wait until every request has ended, at most `timeout_s`."""
        try:
            await asyncio.wait_for(self.emptied(), timeout_s)
        except TimeoutError:
            log("drain_timed_out", level="warning", replica=replica, pending=len(self))

    def open(self, assignment: Assignment, sink: Sink) -> asyncio.Future[Admitted | Rejected]:
        """Enter a request that is being handed to the worker; the future is its verdict."""
        if assignment.request_id in self._entries:
            raise InvalidRequest(f"a request with the id {assignment.request_id!r} is running")
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[Admitted | Rejected] = loop.create_future()
        emitted: list[list[int]] = [[] for _ in range(assignment.sampling.n or 1)]
        entry = InFlightRequest(assignment, sink, verdict, emitted)
        if assignment.deadline is not None:
            left_s = max(0.0, assignment.deadline - time.monotonic()) + LATE_S
            entry.alarm = loop.call_later(left_s, self._late, assignment.request_id)
        self._entries[assignment.request_id] = entry
        self._emptied.clear()
        return verdict

    def drop(self, request_id: str) -> bool:
        """Forget a request nobody waits for any more; says whether the worker has it."""
        entry = self._remove(request_id)
        if entry is None:
            return False
        if not entry.verdict.done():
            entry.verdict.set_result(Rejected("unavailable", "aborted by the caller", None))
        return entry.present

    def postpone(self, request_id: str) -> None:
        """The hand-over did not reach a worker: it goes with the next one."""
        self._set_present(self._entries[request_id], False)

    def take(self, report: WorkerReport) -> list[str]:
        """Settle verdicts and pass events on, in the order a report promises. Names the requests
        that a bad value ended: the worker still runs them."""
        self._is_late = False
        entries = self._entries
        for request_id, admitted in report.admitted:
            if request_id in entries and not entries[request_id].verdict.done():
                entries[request_id].verdict.set_result(admitted)
        for request_id, rejected in report.rejected:
            self._rejected(request_id, rejected)
        lost = self._told(report)
        events: Iterator[Event] = chain(
            report.started, report.deltas, report.finished, report.failed
        )
        for event in events:
            try:
                self._take(event)
            except Exception as error:
                log("event_lost", level="error", error=error, request_id=event.request_id)
                lost.append(event.request_id)
                self._broke(event.request_id)
        return lost

    def refused(self, request_id: str, path: str) -> None:
        """A value of this request could not be passed on."""
        self._faults += 1
        log("value_refused", level="error", request_id=request_id, reason=path)

    def _told(self, report: WorkerReport) -> list[str]:
        if not report.faults:
            return []
        failed = [event.request_id for event in report.failed]
        for path in report.faults:
            if not failed and path in self._standing:
                # what is nobody's comes with every report
                self._faults += 1
                continue
            if len(self._standing) < MAX_STANDING:
                self._standing.add(path)
            self.refused(",".join(failed), path)
        return failed

    def _take(self, event: Event) -> None:
        entry = self._entries.get(event.request_id)
        if entry is None:
            return
        if isinstance(event, Delta):
            _take_delta(entry, event)
        elif not isinstance(event, Started):
            self._end(event)
        elif entry.started is None:
            entry.started = event
            entry.started_s = _since_arrival_s(entry)
            entry.sink(event)

    def _broke(self, request_id: str) -> None:
        """An event could not be handed on; who waited for it is told so, as far as that goes."""
        self._faults += 1
        with suppress(Exception):
            self._end(Failed(request_id, "internal_error", VALUE_LOST))

    def crashed(self) -> None:
        """The worker died. Who was present is counted; who cannot be retried ends here."""
        self._is_late = False
        for entry in list(self._entries.values()):
            if not entry.present:
                continue
            entry.crashes += 1
            self._set_present(entry, False)
            if len(entry.finished) == len(entry.emitted):
                self._end(_synthesised(entry))
            elif entry.crashes > SUSPECT_CRASHES:
                message = f"the worker died {entry.crashes} times while running this request"
                self._end(Failed(entry.assignment.request_id, "worker_crashed", message))

    def resume(self) -> Iterator[Assignment]:
        """Assignments to hand to the running worker now. A suspect goes alone."""
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
        # accepted before a crash: it waits for room as long as the worker says there will be some
        self._set_present(entry, False)
        if rejected.retry_after_s is None:
            failed = Failed(request_id, rejected.code, rejected.reason, rejected.retry_after_s)
            self._end(failed)

    def _late(self, request_id: str) -> None:
        """Nobody ended it in time: it ends with the text that its client has."""
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
        entry.sink(_mended(entry, event))

    def _remove(self, request_id: str) -> InFlightRequest | None:
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.alarm is not None:
            entry.alarm.cancel()
        if entry is not None and not entry.present:
            self._waiting -= 1
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
    return Admitted("", 0.0)


def _synthesised(entry: InFlightRequest) -> Finished:
    """Every choice had ended and only the last word was lost, or was never said."""
    started = entry.started
    usage = Usage(
        prompt_tokens=len(entry.assignment.prompt_ids),
        completion_tokens=sum(len(ids) for ids in entry.emitted),
        cached_tokens=started.cached_tokens if started else 0,
        stored_tokens=started.stored_tokens if started else 0,
    )
    total_s = _since_arrival_s(entry)
    choices = tuple(reason for _, reason in sorted(entry.finished.items()))
    timings = Timings(
        queue_s=entry.started_s if started else total_s,
        first_token_s=entry.first_token_s,
        total_s=total_s,
    )
    return Finished(entry.assignment.request_id, choices, usage, timings)


def _mended(entry: InFlightRequest, event: Finished | Failed) -> Event:
    """A worker that took over counts from its own start: tell what the client saw."""
    if isinstance(event, Failed) or not entry.crashes or entry.started is None:
        return event
    timings = replace(
        event.timings,
        queue_s=entry.started_s,
        load_s=min(event.timings.load_s, entry.started_s),
        first_token_s=entry.first_token_s,
        decode_s=event.timings.total_s - entry.first_token_s,
    )
    usage = replace(
        event.usage,
        cached_tokens=entry.started.cached_tokens,
        stored_tokens=entry.started.stored_tokens,
    )
    return replace(event, usage=usage, timings=timings)


def _since_arrival_s(entry: InFlightRequest) -> float:
    return time.monotonic() - entry.assignment.arrived_at
