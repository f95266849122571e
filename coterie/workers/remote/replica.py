"""A remote server as a replica: a bounded queue here, so many requests at once there.

Nothing is sent twice once a byte of an answer has come, and nothing is continued elsewhere: if the
server dies in the middle of an answer, the answer ends with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from coterie.core.ensemble import RemoteSettings
from coterie.core.errors import CoterieError, InvalidRequest
from coterie.core.events import Event, Failed
from coterie.core.lane import queue_capacity
from coterie.core.plan import (
    AdapterChoice,
    Admitted,
    Assignment,
    LaneState,
    Rejected,
    RemoteAssignment,
)
from coterie.core.request import own_tenant
from coterie.obs.log import log
from coterie.workers.contract import (
    AdapterLoad,
    OnOutage,
    Replica,
    ReplicaInfo,
    Sink,
    never_moved,
)
from coterie.workers.remote.answer import AnswerReader
from coterie.workers.remote.body import path_and_body
from coterie.workers.remote.failure import RETRY_S, RemoteFailure
from coterie.workers.remote.health import RemoteHealth
from coterie.workers.remote.places import PlaceQueue
from coterie.workers.remote.server import RemoteServer, limits_of

# weight of the newest answer in the moving averages
NEWEST = 0.2
# kinds of faults that are counted
FAULTS = ("timeouts", "cut_answers", "bad_answers")
# a stream without a chunk
EMPTY = "empty_streams"


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """Which server answers for which specialist."""

    # of the replica, and of the specialist
    name: str
    lane: str
    settings: RemoteSettings
    # requests that may wait here
    max_queue: int = 256


@dataclass(slots=True, eq=False)
class _OpenRequest:
    assignment: RemoteAssignment
    sink: Sink
    task: asyncio.Task[None] | None = None
    # its sink gets nothing more
    is_closed: bool = False

    def put(self, event: Event) -> None:
        if not self.is_closed:
            self.sink(event)


class RemoteReplica:
    def __init__(self, spec: RemoteSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = spec.name
        self._spec = spec
        self._server = RemoteServer(spec.lane, spec.settings)
        self._health = RemoteHealth(clock)
        self._places = PlaceQueue(spec.settings.max_running)
        self._open: dict[str, _OpenRequest] = {}
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._woken = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self._draining = False
        self._counts = dict.fromkeys(("answers", *FAULTS, EMPTY, "refusals"), 0.0)
        # seconds to the first token, and of an answer; 0 = not known
        self._first_token_s = self._answer_s = 0.0

    async def start(self) -> ReplicaInfo:
        """Does not fail if the server is not there: it may come later."""
        await self._server.open()
        await self._probe()
        self._probing = asyncio.ensure_future(self._keep_probing())
        settings, lane = self._spec.settings, self._spec.lane
        return ReplicaInfo(
            name=self.name,
            pid=0,
            architecture="remote",
            dtype="remote",
            device="remote",
            threads=0,
            weight_bytes=0,
            kv_bytes=0,
            # no adapter is made for it
            fingerprint=f"remote:{lane}",
            contexts={lane: settings.context},
            max_sequences={lane: settings.max_running},
            generation={},
        )

    async def submit(
        self, assignment: Assignment, sink: Sink, on_outage: OnOutage = never_moved
    ) -> Admitted | Rejected:
        if not isinstance(assignment, RemoteAssignment):
            raise InvalidRequest(f"{self._spec.lane} is remote: it takes text, not tokens")
        if assignment.request_id in self._open:
            raise InvalidRequest(f"a request with the id {assignment.request_id!r} is running")
        if not self.healthy():
            return Rejected(
                "unavailable", f"{self._spec.lane} cannot be reached now", self.retry_after_s()
            )
        if self._places.num_waiting >= self._most_waiting(assignment):
            return Rejected("overloaded", "the queue is full", max(self._answer_s, 1.0))
        entry = _OpenRequest(assignment, sink)
        self._open[assignment.request_id] = entry
        self._emptied.clear()
        entry.task = asyncio.ensure_future(self._run(entry))
        return Admitted(self.name)

    def move(self, request_id: str, to: Replica) -> bool:
        # another server would write another answer
        return False

    async def abort(self, request_id: str) -> None:
        entry = self._open.get(request_id)
        if entry is None:
            return
        entry.is_closed = True
        self._remove(entry)
        if entry.task is not None:
            # closes the connection, by which the server knows
            entry.task.cancel()

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        """Nothing to load."""

    def lane_states(self) -> dict[str, LaneState]:
        settings, waiting = self._spec.settings, self._places.num_waiting
        running = len(self._open) - waiting
        wait_s = 0.0
        if running >= settings.max_running:
            wait_s = self._answer_s * (waiting + 1) / settings.max_running
        state = LaneState(
            lane=self._spec.lane,
            queued=waiting,
            max_queue=self._spec.max_queue,
            free_tokens=max(settings.max_running - running, 0) * settings.context,
            total_tokens=settings.max_running * settings.context,
            resident_adapters=(),
            prefix_digests=frozenset(),
            predicted_first_token_s=self._first_token_s + wait_s,
            preempting=False,
        )
        return {self._spec.lane: state}

    def in_flight(self) -> int:
        return len(self._open)

    def stats(self) -> dict[str, float]:
        return {
            **self._counts,
            "deaths": float(self._health.num_deaths),
            "requests_resent": float(self._server.num_resent),
            "restarts": float(self._health.num_returns),
        }

    def adapter_loads(self) -> tuple[AdapterLoad, ...]:
        return ()

    def residency(self) -> None:
        """Not known here."""

    def healthy(self) -> bool:
        return self.state() == "up"

    def state(self) -> str:
        if self._draining:
            return "draining"
        if self._health.is_up is None:
            return "starting"
        return "up" if self._health.is_up else "silent"

    def retry_after_s(self) -> float:
        return max(self._health.probe_in_s, 1.0)

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
        except TimeoutError:
            log("drain_timed_out", level="warning", replica=self.name, pending=len(self._open))

    async def close(self) -> None:
        self._draining = True
        probing, self._probing = self._probing, None
        tasks = [probing] if probing is not None else []
        for entry in list(self._open.values()):
            self._fail(entry, RemoteFailure("unavailable", "the server was shut down"))
            if entry.task is not None:
                tasks.append(entry.task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()

    def _most_waiting(self, assignment: Assignment) -> int:
        tenant = own_tenant(assignment.tenant)
        others = (own_tenant(entry.assignment.tenant) for entry in self._open.values())
        return queue_capacity(
            self._spec.max_queue,
            is_expected=assignment.limits.is_expected,
            is_new=all(other != tenant for other in others),
        )

    async def _run(self, entry: _OpenRequest) -> None:
        """The whole way of one request. It always ends in one event, unless it was aborted."""
        assignment = entry.assignment
        deadline = None
        if assignment.deadline is not None:
            left_s = assignment.deadline - time.monotonic()
            deadline = asyncio.get_running_loop().time() + left_s
        reader = AnswerReader(assignment, self._spec.lane, entry.put, self._server.key)
        timeout = asyncio.timeout_at(deadline)
        try:
            async with timeout:
                await self._places.take(assignment.limits.priority)
                try:
                    await self._answer(entry, reader)
                finally:
                    self._places.give_back()
        except RemoteFailure as failure:
            self._met(failure)
            self._fail(entry, failure)
        except TimeoutError:
            if not timeout.expired():
                self._fail(entry, RemoteFailure("unavailable", "a wait was too long", RETRY_S))
            else:
                reader.expire()
                self._finish(entry, reader)
        except CoterieError as error:
            self._fail(entry, RemoteFailure(error.code, error.message, error.retry_after_s))
        except Exception as error:
            log("remote_failed", level="error", error=error, replica=self.name,
                request_id=assignment.request_id)  # fmt: skip
            self._fail(entry, RemoteFailure("internal_error", "the answer could not be read"))

    async def _answer(self, entry: _OpenRequest, reader: AnswerReader) -> None:
        assignment, settings = entry.assignment, self._spec.settings
        path, body = path_and_body(assignment, settings.model or self._spec.lane)
        reader.sent_s = time.monotonic() - assignment.arrived_at
        try:
            try:
                await self._exchange(entry, reader, path, body)
            except RemoteFailure as failure:
                if failure.kind != EMPTY:
                    raise
                # some servers tell why there is no answer only if they do not stream
                self._counts[EMPTY] += 1
                whole = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
                await self._exchange(entry, reader, path, whole)
        except RemoteFailure as failure:
            if reader.has_ended:
                # the answer is whole; only its counts are missing
                self._met(failure)
                self._finish(entry, reader)
                return
            if reader.is_started and failure.code == "unavailable":
                failure.code = "worker_crashed"
            raise

    async def _exchange(
        self, entry: _OpenRequest, reader: AnswerReader, path: str, body: dict[str, Any]
    ) -> None:
        limits = limits_of(entry.assignment, self._spec.settings)
        async with (
            self._traced(entry, str(body.get("model", ""))) as headers,
            self._server.answer(path, body, limits, headers) as answer,
            aclosing(answer.chunks()) as chunks,
        ):
            async for chunk in chunks:
                if chunk:
                    reader.take(chunk)
                else:
                    self._completed(entry, reader)

    @asynccontextmanager
    async def _traced(
        self, entry: _OpenRequest, model: str
    ) -> AsyncIterator[Mapping[str, str] | None]:
        """The headers that carry the trace of the request, if it has one; notes how the call
        ended."""
        trace = entry.assignment.trace
        if trace is None:
            yield None
            return
        error = ""
        try:
            yield trace.call_began(self._server.host, self._server.port, model)
        except BaseException as failure:
            error = type(failure).__name__
            if isinstance(failure, (RemoteFailure, CoterieError)):
                error = failure.code
            raise
        finally:
            trace.call_ended(error)

    def _completed(self, entry: _OpenRequest, reader: AnswerReader) -> None:
        if not reader.has_ended:
            text = f"{self._spec.lane} ended its answer in the middle"
            kind = "cut_answers" if reader.is_started else EMPTY
            raise RemoteFailure("unavailable", text, RETRY_S, kind=kind)
        self._noticed(self._health.succeeded())
        self._measured(reader)
        self._finish(entry, reader)

    def _met(self, failure: RemoteFailure) -> None:
        """Note what a request met."""
        if failure.kind in self._counts:
            self._counts[failure.kind] += 1
        elif failure.code != "unavailable":
            self._counts["refusals"] += 1
        if failure.is_down:
            self._went_down(failure.message)
        elif failure.code in ("unavailable", "worker_crashed"):
            self._health.suspect()
            self._woken.set()

    def _measured(self, reader: AnswerReader) -> None:
        timings = reader.finished().timings
        for name, seconds in (
            ("_first_token_s", timings.first_token_s - timings.queue_s),
            ("_answer_s", timings.total_s - timings.queue_s),
        ):
            known = getattr(self, name) or seconds
            setattr(self, name, known + NEWEST * (seconds - known))

    def _finish(self, entry: _OpenRequest, reader: AnswerReader) -> None:
        if not entry.is_closed:
            self._counts["answers"] += 1
            self._end(entry, reader.finished())

    def _fail(self, entry: _OpenRequest, failure: RemoteFailure) -> None:
        if not entry.is_closed:
            request_id = entry.assignment.request_id
            event = Failed(request_id, failure.code, failure.message, failure.retry_after_s)
            self._end(entry, event)

    def _end(self, entry: _OpenRequest, event: Event) -> None:
        self._remove(entry)
        entry.put(event)
        entry.is_closed = True

    def _remove(self, entry: _OpenRequest) -> None:
        self._open.pop(entry.assignment.request_id, None)
        if not self._open:
            self._emptied.set()

    # health

    async def _keep_probing(self) -> None:
        while True:
            self._woken.clear()
            # not wait_for, which may lose a cancellation
            with suppress(TimeoutError):
                async with asyncio.timeout(max(self._health.probe_in_s, 0.05)):
                    await self._woken.wait()
            if self._health.probe_in_s <= 0:
                await self._probe()

    async def _probe(self) -> None:
        try:
            if self._health.is_up is False:
                # the key may have been replaced
                await self._server.read_key()
            await self._server.probe()
        except RemoteFailure as failure:
            self._went_down(failure.message)
        except CoterieError as error:
            self._went_down(error.message)
        except Exception as error:
            log("remote_failed", level="error", error=error, replica=self.name)
            self._went_down(type(error).__name__)
        else:
            self._noticed(self._health.succeeded())

    def _went_down(self, reason: str) -> None:
        was_up = self._health.failed(reason)
        self._woken.set()
        if was_up:
            log("remote_down", level="warning", replica=self.name, reason=reason)

    def _noticed(self, is_back: bool) -> None:
        if is_back:
            log("remote_back", replica=self.name)
