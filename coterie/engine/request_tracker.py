"""All accepted requests until their end: applies drawn tokens, deadlines and failures to them.

Appends to the caller's list of events. Each request ends with exactly one Finished or Failed; then
its sequences end too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from heapq import heapify, heappop, heappush

from coterie.core.errors import CoterieError, InternalError, InvalidRequest, WeightsError
from coterie.core.events import Delta, Event, Failed
from coterie.core.moe import MoeUsage
from coterie.core.sampling import value_of
from coterie.engine.active_request import ActiveRequest
from coterie.engine.adapter_holds import error_for_client
from coterie.engine.beam import BeamSearch
from coterie.engine.grammar import GrammarTask
from coterie.engine.scheduler import Scheduler
from coterie.engine.sequence import Sequence, SequenceStatus
from coterie.engine.step import BeamScores, LateDraw, StepPlan, StepResult, StepUsage, TokenScore

log = logging.getLogger(__name__)

# deadlines of ended requests that may stay in the heap
SLACK = 64
# the message for clients; the text of an exception may quote a prompt
FAILED = "the engine failed on this request; the log has the reason"
# the message for clients; the text of a weights error names files of this machine
UNREADABLE = "weights of {lane} could not be read or are damaged; the server's log has the reason"


class RequestTracker:
    def __init__(
        self, schedulers: Mapping[str, Scheduler], replica: str, clock: Callable[[], float]
    ) -> None:
        self._schedulers, self._replica, self._now = schedulers, replica, clock
        self._requests: dict[str, ActiveRequest] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._deadlines: list[tuple[float, str]] = []
        # requests whose grammars have not started, and draws whose tokens are not final
        self._beginning: dict[str, ActiveRequest] = {}
        self._late: dict[Sequence, LateDraw] = {}
        # requests that ended, by lane
        self.num_ended: Counter[str] = Counter()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def open(self, request: ActiveRequest, events: list[Event]) -> None:
        """Queue the sequences of the request. A request that is already complete ends at once."""
        assignment = request.assignment
        for choice, reason in request.reasons.items():
            if choice not in assignment.finished:
                events.append(Delta(assignment.request_id, choice, "", (), finish_reason=reason))
        if request.is_over:
            events.append(request.finished(self._now()))
            return
        self._requests[assignment.request_id] = request
        num_beams = assignment.sampling.num_beams or 1
        if num_beams > 1:
            self._searches[assignment.request_id] = BeamSearch(
                request.sequences[0],
                num_beams,
                value_of(assignment.sampling, "length_penalty"),
                request.stop_ids,
            )
        if assignment.deadline is not None:
            heappush(self._deadlines, (assignment.deadline, assignment.request_id))
        scheduler = self._schedulers[assignment.lane]
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.WAITING:
                scheduler.add(sequence)
        if request.beginning is not None:
            scheduler.held.update(request.sequences)
            self._beginning[assignment.request_id] = request

    @property
    def grammar_jobs(self) -> list[GrammarTask]:
        """The grammar tasks that sequences wait for."""
        starting = [request.beginning for request in self._beginning.values()]
        return [job for job in starting if job is not None] + [
            draw.job for draw in self._late.values()
        ]

    def settle(self, events: list[Event]) -> None:
        """Continue the sequences whose grammar tasks are done, in order of arrival."""
        for request in list(self._beginning.values()):
            job = request.beginning
            if job is not None and job.done:
                self._begun(request, job, events)
        for sequence in [sequence for sequence, draw in self._late.items() if draw.job.done]:
            # its request may have ended because of another of its choices
            draw = self._late.pop(sequence, None)
            if draw is not None:
                self._settled(sequence, draw, events)

    def _settled(self, sequence: Sequence, draw: LateDraw, events: list[Event]) -> None:
        request = self._requests[sequence.request_id]
        self._schedulers[request.assignment.lane].held.remove(sequence)
        try:
            token, score = draw.finish()
        except Exception:
            log.exception("request_broke", extra=self._fields(request))
            self._fail(request, events)
        else:
            self._drawn(request, sequence, token, score, events)

    def _begun(self, request: ActiveRequest, job: GrammarTask, events: list[Event]) -> None:
        del self._beginning[request.request_id]
        request.beginning = None
        if job.error is not None:
            typed = job.error if isinstance(job.error, CoterieError) else None
            if typed is None:
                log.error("request_broke", exc_info=job.error, extra=self._fields(request))
            self._fail(request, events, typed)
            return
        self._schedulers[request.assignment.lane].held.difference_update(request.sequences)
        for sequence in list(request.sequences):
            reason = request.complete(sequence.choice)
            if reason is not None:
                events.append(request.cut(sequence.choice, reason))
                self._end(request, sequence)
        if request.is_over:
            self._finish(request, events)

    def abort(self, request_id: str, events: list[Event]) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._cut(request, "abort", events)

    def expire(self, events: list[Event]) -> None:
        """End all requests whose deadline has passed, with the text they have."""
        while self._deadlines and self._deadlines[0][0] <= self._now():
            deadline, request_id = heappop(self._deadlines)
            if self._awaited(deadline, request_id):
                self._cut(self._requests[request_id], "timeout", events)

    def start(self, sequence: Sequence, events: list[Event]) -> None:
        """`sequence` runs for the first time."""
        request = self._requests[sequence.request_id]
        if request.clock.scheduled is not None:
            return
        request.clock.scheduled = self._now()
        self._charge_load(request)
        holds = self._schedulers[request.assignment.lane].holds
        if holds is not None and sequence.adapter_key:
            request.adapter_bytes = holds.stack_bytes(sequence.adapter_key)
        cached = min(sequence.num_cached, sequence.num_prompt)
        request.num_cached = max(cached - sequence.num_virtual, 0)
        space = self._schedulers[request.assignment.lane].space
        request.num_stored = space.num_stored(sequence)
        if request.assignment.sampling.prompt_logprobs is None:
            events.append(request.started(self._replica))

    def commit(self, plan: StepPlan, result: StepResult, events: list[Event]) -> None:
        """Give every drawn token to its request."""
        if result.dispatch is not None:
            self._charge(plan, result.dispatch)
        for (row, position), found in result.prompt_scores.items():
            sequence = plan.rows[row].sequence
            request = self._requests[sequence.request_id]
            request.prompt_scores[position - sequence.num_virtual] = found
        requests, scores = self._requests, result.scores
        for index, sequence in enumerate(plan.draws):
            drawer = requests.get(sequence.request_id)
            # the request may have ended because of an earlier draw of this step
            if drawer is None:
                if index in result.late:
                    result.late[index].job.drop()
            elif index in result.late:
                self._schedulers[drawer.assignment.lane].held.add(sequence)
                self._late[sequence] = result.late[index]
            elif sequence.draw.num_continuations:
                self._stamp(drawer, events)
                try:
                    self._search(drawer, sequence, result.beams[index], events)
                except Exception:
                    log.exception("request_broke", extra=self._fields(drawer))
                    self._fail(drawer, events)
            else:
                score = scores.get(index) if scores else None
                self._drawn(drawer, sequence, result.tokens[index], score, events)

    def _stamp(self, request: ActiveRequest, events: list[Event]) -> None:
        now, clock = self._now(), request.clock
        if clock.first_token is None:
            self._first_token(request, now, events)
        clock.last_token = now

    def _drawn(
        self,
        request: ActiveRequest,
        sequence: Sequence,
        token: int,
        score: TokenScore | None,
        events: list[Event],
    ) -> None:
        self._stamp(request, events)
        try:
            self._produce(request, sequence, token, score, events)
        except InvalidRequest as error:
            # the grammar failed
            self._fail(request, events, error)
        except Exception:
            log.exception("request_broke", extra=self._fields(request))
            self._fail(request, events)

    def _charge(self, plan: StepPlan, usage: StepUsage) -> None:
        for row, cost in zip(plan.rows, usage.rows, strict=True):
            request = self._requests.get(row.sequence.request_id)
            if request is not None:
                request.moe = cost if request.moe is None else request.moe + cost

    def charge_moe_updates(self, plan: StepPlan, cost: MoeUsage) -> None:
        """Charge the cost of moving experts after this step to all requests that continue."""
        for request_id in {row.sequence.request_id for row in plan.rows}:
            request = self._requests.get(request_id)
            if request is not None and request.moe is not None:
                request.moe += cost

    def _first_token(self, request: ActiveRequest, now: float, events: list[Event]) -> None:
        request.clock.first_token = now
        if request.assignment.sampling.prompt_logprobs is not None:
            events.append(request.started(self._replica))

    def _produce(
        self,
        request: ActiveRequest,
        sequence: Sequence,
        token: int,
        score: TokenScore | None,
        events: list[Event],
    ) -> None:
        sequence.tokens.append(token)
        draw = sequence.draw
        if draw.penalties is not None or draw.constraint is not None:
            draw.produced(token)
        count = len(sequence.tokens) - sequence.num_prompt
        delta = request.produce(sequence.choice, token, count, score)
        events.append(delta)
        if delta.finish_reason is not None:
            self._end(request, sequence, session=request.session)
            if request.is_over:
                self._finish(request, events)

    def _search(
        self, request: ActiveRequest, beam: Sequence, scores: BeamScores, events: list[Event]
    ) -> None:
        search = self._searches[request.request_id]
        if not search.report(beam, scores):
            return
        alive = search.advance(self._schedulers[request.assignment.lane])
        request.sequences = search.sequences
        if alive:
            return
        for choice in range(request.num_choices):
            events += request.produce_all(choice, search.done[choice].output)
        for sequence in list(request.sequences):
            self._end(request, sequence, session=request.session)
        self._finish(request, events)

    def _cut(self, request: ActiveRequest, reason: str, events: list[Event]) -> None:
        """End a request early: free everything and send the text that was kept back."""
        search = self._searches.get(request.request_id)
        for choice in range(request.num_choices):
            if choice in request.reasons:
                continue
            if search is not None and reason == "timeout":
                events += request.produce_all(choice, search.best(choice))
            if choice not in request.reasons:
                events.append(request.cut(choice, reason))
        for sequence in list(request.sequences):
            self._end(request, sequence)
        self._finish(request, events)

    def fail(self, plan: StepPlan, error: Exception, events: list[Event]) -> None:
        """The step failed: its requests fail. Clients get the message of a typed error."""
        typed = error if isinstance(error, CoterieError) else None
        for row in plan.rows:
            request = self._requests.get(row.sequence.request_id)
            if request is not None:
                log.error("request_lost_with_step", extra=self._fields(request))
                if isinstance(error, WeightsError):
                    typed = WeightsError(UNREADABLE.format(lane=request.assignment.lane))
                self._fail(request, events, typed)

    def fail_adapters(self, sequence: Sequence, error: CoterieError, events: list[Event]) -> None:
        """The adapters of the sequence cannot be loaded: only its request fails."""
        request = self._requests.get(sequence.request_id)
        if request is None:
            return
        log.error("adapter_failed", extra=self._fields(request) | {"reason": error.message})
        self._fail(request, events, error_for_client(error, request.assignment.adapters))

    def _fail(
        self, request: ActiveRequest, events: list[Event], error: CoterieError | None = None
    ) -> None:
        for sequence in list(request.sequences):
            self._end(request, sequence)
        self._forget(request)
        error = error or InternalError(FAILED)
        events.append(Failed(request.request_id, error.code, error.message, error.retry_after_s))

    def _fields(self, request: ActiveRequest) -> dict[str, str]:
        return {"request_id": request.request_id, "replica": self._replica}

    def _charge_load(self, request: ActiveRequest) -> None:
        holds = self._schedulers[request.assignment.lane].holds
        if holds is not None and request.assignment.adapters:
            request.load_s += holds.waited_s(request.request_id)

    def _end(
        self, request: ActiveRequest, sequence: Sequence, session: Hashable | None = None
    ) -> None:
        request.blocks.update(sequence.blocks)
        self._schedulers[request.assignment.lane].end(sequence, session)
        late = self._late.pop(sequence, None)
        if late is not None:
            late.job.drop()
        request.num_preemptions += sequence.num_preemptions
        request.sequences.remove(sequence)

    def _finish(self, request: ActiveRequest, events: list[Event]) -> None:
        self._charge_load(request)
        events.append(request.finished(self._now()))
        self._forget(request)

    def _forget(self, request: ActiveRequest) -> None:
        self._charge_load(request)
        del self._requests[request.request_id]
        self._searches.pop(request.request_id, None)
        if self._beginning.pop(request.request_id, None) is not None and request.beginning:
            request.beginning.drop()
        self.num_ended[request.assignment.lane] += 1
        if len(self._deadlines) > 2 * len(self._requests) + SLACK:
            self._deadlines = [item for item in self._deadlines if self._awaited(*item)]
            heapify(self._deadlines)

    def _awaited(self, deadline: float, request_id: str) -> bool:
        # a later request may have the same id
        request = self._requests.get(request_id)
        return request is not None and request.assignment.deadline == deadline
