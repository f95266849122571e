"""All accepted requests until their end: applies drawn tokens, deadlines and failures to them.

Appends to the caller's list of events. Each request ends with exactly one Finished or Failed; then
its sequences end too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from typing import NamedTuple, cast

from coterie.core.errors import (
    CoterieError,
    InternalError,
    InvalidRequest,
    Overloaded,
    WeightsError,
)
from coterie.core.events import Delta, Event, Failed
from coterie.core.moe import MoeUsage
from coterie.core.sampling import value_of
from coterie.engine.active_request import ActiveRequest, RequestTimes
from coterie.engine.adapter_holds import error_for_client
from coterie.engine.beam import BeamSearch
from coterie.engine.detokenize import Detokenizer
from coterie.engine.draw import TokenPenalties
from coterie.engine.grammar import GrammarTask
from coterie.engine.scheduler import Scheduler
from coterie.engine.sequence import Sequence, SequenceStatus
from coterie.engine.step import (
    BeamScores,
    DecodeRows,
    LateDraw,
    StepPlan,
    StepResult,
    StepUsage,
    TokenScore,
)
from coterie.engine.time_ledger import StepTimes, TimeLedger

log = logging.getLogger(__name__)

# deadlines of ended requests that may stay in the heap
SLACK = 64
# the message for clients; the text of an exception may quote a prompt
FAILED = "the engine failed on this request; the log has the reason"
# the message for clients; the text of a weights error names files of this machine
UNREADABLE = "weights of {lane} could not be read or are damaged; the server's log has the reason"


class DecodeStream(NamedTuple):
    """What one more token of a sequence is compared with and added to."""

    request: ActiveRequest
    clock: RequestTimes
    text: Detokenizer
    tokens: list[int]
    stop_ids: frozenset[int]
    max_total: int
    penalties: TokenPenalties | None


class DecodeStreams:
    """The streams of all rows of decode steps with the same sequences, until one of them ends."""

    def __init__(self, sequences: list[Sequence], streams: list[DecodeStream]) -> None:
        self.sequences, self.streams = sequences, streams
        self.ids = [sequence.request_id for sequence in sequences]
        # whether some are choices of one request
        self.has_siblings = len(set(self.ids)) < len(self.ids)
        self.choices = [sequence.choice for sequence in sequences]
        self.stop_ids = frozenset[int]().union(*(stream.stop_ids for stream in streams))
        self.penalised = [row for row, one in enumerate(streams) if one.penalties is not None]
        # rows whose text may be kept back; steps until the first row is complete
        self.kept_back = {row for row, one in enumerate(streams) if not one.text.sends_whole}
        self.num_left = min(stream.max_total - len(stream.tokens) for stream in streams)

    def special(self, tokens: Seq[int], texts: Seq[str | None]) -> list[int]:
        """The rows whose token may end them or may not be sent as it is, in order."""
        self.num_left -= 1
        if self.num_left <= 0:
            return list(range(len(tokens)))
        found = self.kept_back
        if not all(texts):
            found = found.union([row for row, text in enumerate(texts) if not text])
        if not self.stop_ids.isdisjoint(tokens):
            ends = self.stop_ids
            found = found.union([row for row, token in enumerate(tokens) if token in ends])
        return sorted(found)


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
        # made when a sequence decodes
        self._streams: dict[Sequence, DecodeStream] = {}
        self._decoding: DecodeStreams | None = None
        # requests that ended, by lane
        self.num_ended: Counter[str] = Counter()
        self.times = TimeLedger()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def is_empty(self) -> bool:
        return not self._requests

    def open(self, request: ActiveRequest, events: list[Event]) -> None:
        """Queue the sequences of the request. A request that is already complete ends at once."""
        assignment = request.assignment
        for choice, reason in request.reasons.items():
            if choice not in assignment.finished:
                events.append(Delta(assignment.request_id, choice, "", (), finish_reason=reason))
        if request.is_over:
            events.append(request.finished(self._now(), self.times))
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
        except (InvalidRequest, Overloaded) as error:
            # the grammar takes too much time
            self._fail(request, events, error)
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
        request.ledger.from_s = self.times.busy_s
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
        if isinstance(plan.rows, DecodeRows) and not (scores or result.beams or result.late):
            self._commit_decoded(plan.rows.sequences, result.tokens, events)
            return
        now = self._now()
        for index, sequence in enumerate(plan.draws):
            if not (scores or result.beams or result.late):
                self._decode(sequence, result.tokens[index], events, now)
                continue
            drawer = requests.get(sequence.request_id)
            # it may have ended because of an earlier draw of this step, or of the step before if
            # this one was launched before that was known
            if drawer is None or sequence.status is SequenceStatus.ENDED:
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

    def _commit_decoded(
        self, sequences: list[Sequence], tokens: Seq[int], events: list[Event]
    ) -> None:
        """`commit` of tokens that have no scores. Most of them are whole text and end nothing."""
        now, batch = self._now(), self._decoding
        if batch is None or batch.sequences is not sequences:
            batch = self._decoding = self._join(sequences)
        if batch is None:
            for sequence, token in zip(sequences, tokens, strict=True):
                self._decode(sequence, token, events, now)
            return
        # all streams have the same pieces
        texts = list(map(batch.streams[0].text.pieces.get, tokens))
        first = 0
        for row in batch.special(tokens, texts):
            self._extend(batch, range(first, row), tokens, texts, events, now)
            first = row + 1
            self._decode(sequences[row], tokens[row], events, now)
            if batch.has_siblings and batch.ids[row] not in self._requests:
                # if it failed, its other choices ended with it
                for sequence, token in zip(sequences[first:], tokens[first:], strict=True):
                    self._decode(sequence, token, events, now)
                return
            if batch.streams[row].text.sends_whole:
                batch.kept_back.discard(row)
            else:
                batch.kept_back.add(row)
        self._extend(batch, range(first, len(tokens)), tokens, texts, events, now)

    def _decode(self, sequence: Sequence, token: int, events: list[Event], now: float) -> None:
        # also the stream of another row may have ended just now
        stream = self._streams.get(sequence)
        if stream is None:
            self._decoded(sequence, token, events)
            return
        request, clock, detokenizer, output, stop_ids, limit, penalties = stream
        text = None
        if token not in stop_ids and len(output) + 1 < limit:
            text = detokenizer.push_whole(token)
        if text is None:
            self._drawn(request, sequence, token, None, events)
            return
        clock.last_token = now
        output.append(token)
        if penalties is not None:
            penalties.produced(token)
        request.num_completion += 1
        events.append(Delta(sequence.request_id, sequence.choice, text, (token,)))

    def _join(self, sequences: list[Sequence]) -> DecodeStreams | None:
        """The streams of all sequences; None if one has none or is shown otherwise."""
        streams: list[DecodeStream] = []
        for sequence in sequences:
            stream = self._streams.get(sequence)
            if stream is None or (streams and stream.text.pieces is not streams[0].text.pieces):
                return None
            streams.append(stream)
        return DecodeStreams(sequences, streams)

    def _extend(
        self,
        batch: DecodeStreams,
        rows: range,
        tokens: Seq[int],
        texts: Seq[str | None],
        events: list[Event],
        now: float,
    ) -> None:
        """Send the tokens of rows whose texts are whole and that go on."""
        part = slice(rows.start, rows.stop)
        some = tokens[part]
        for row in batch.penalised:
            if rows.start <= row < rows.stop:
                cast("TokenPenalties", batch.streams[row].penalties).produced(tokens[row])
        for (request, clock, text, output, _, _, _), token in zip(
            batch.streams[part], some, strict=True
        ):
            clock.last_token = now
            output.append(token)
            request.num_completion += 1
            text.last = token
        ids, choices, sent = batch.ids[part], batch.choices[part], cast("Seq[str]", texts[part])
        events += map(Delta, ids, choices, sent, zip(some, strict=True))

    def _decoded(self, sequence: Sequence, token: int, events: list[Event]) -> None:
        """A token of a sequence that has no stream: none yet, or not any more."""
        request = self._requests.get(sequence.request_id)
        if request is None or sequence.status is SequenceStatus.ENDED:
            return
        self._drawn(request, sequence, token, None, events)
        if sequence.row is not None and sequence.draw.constraint is None:
            self._streams[sequence] = DecodeStream(
                request,
                request.clock,
                request.texts[sequence.choice],
                sequence.tokens,
                request.stop_ids,
                sequence.max_total,
                sequence.draw.penalties,
            )

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
            if request is not None and row.sequence.status is not SequenceStatus.ENDED:
                request.moe = cost if request.moe is None else request.moe + cost

    def charge_time(self, plan: StepPlan, times: StepTimes) -> None:
        """Every request of a step waited for all of it; one that only decodes, also for the
        prompts of others."""
        requests, rows, number = self._requests, plan.rows, self.times.num_steps
        if not plan.num_prefill_tokens:
            sequences = rows.sequences if isinstance(rows, DecodeRows) else [r[0] for r in rows]
            for sequence in sequences:
                request = requests.get(sequence.request_id)
                if request is not None:
                    request.ledger.add(number, times, 0.0)
            return
        prompts = {row.sequence.request_id for row in rows if row.phase == "prefill"}
        others = plan.num_prefill_tokens / plan.num_tokens
        for row in rows:
            request_id = row.sequence.request_id
            request = requests.get(request_id)
            if request is not None:
                request.ledger.add(number, times, 0.0 if request_id in prompts else others)

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
        if sequence.draw.follows_output:
            sequence.draw.produced(token)
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
            if request is not None and row.sequence.status is not SequenceStatus.ENDED:
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
        scheduler = self._schedulers[request.assignment.lane]
        request.blocks.update(scheduler.used_blocks(sequence))
        scheduler.end(sequence, session)
        if self._streams.pop(sequence, None) is not None:
            self._decoding = None
        late = self._late.pop(sequence, None)
        if late is not None:
            late.job.drop()
        request.num_preemptions += sequence.num_preemptions
        request.sequences.remove(sequence)

    def _finish(self, request: ActiveRequest, events: list[Event]) -> None:
        self._charge_load(request)
        events.append(request.finished(self._now(), self.times))
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
