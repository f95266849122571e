"""An accepted request from start to end: the text of its choices, its times, and its events.

Turns drawn tokens into `Delta`s and detects when a choice has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from coterie.core.errors import CoterieError, InvalidRequest
from coterie.core.events import Delta, Finished, Started, Timings, TokenLogprob, Usage
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeUsage
from coterie.core.plan import Assignment, Rejected
from coterie.core.prefix import root_digest
from coterie.core.request import Sampling, own_tenant
from coterie.core.sampling import check_sampling
from coterie.engine.adapter_holds import AdapterPoolView, error_for_client
from coterie.engine.beam import num_continuations
from coterie.engine.detokenize import Detokenizer, StopMatch, TokenPieces, pieces_of
from coterie.engine.draw import BadWords, make_draw
from coterie.engine.grammar import Constraint, GrammarCache, GrammarTask
from coterie.engine.sequence import BASE, Sequence, SequenceAdapters, SequenceStatus, TenantShare
from coterie.engine.step import TokenScore
from coterie.engine.time_ledger import RequestLedger, TimeLedger


@dataclass(slots=True)
class RequestTimes:
    """Times of the lane's clock; None = not yet."""

    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class ActiveRequest:
    assignment: Assignment
    pieces: TokenPieces
    stop_ids: frozenset[int]
    min_output: int
    max_output: int
    num_choices: int
    bad_words: BadWords | None = None
    # by choice, if the answer must follow a grammar
    constraints: dict[int, Constraint] = field(default_factory=dict)
    # the task that starts the constraints; None when they have started
    beginning: GrammarTask | None = None
    # sequences that are still computed; in a beam search they are not the choices
    sequences: list[Sequence] = field(default_factory=list)
    texts: dict[int, Detokenizer] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_completion: int = 0
    num_cached: int = 0
    num_stored: int = 0
    num_preemptions: int = 0
    # how long it waited for its adapters
    load_s: float = 0.0
    # bytes of its adapter stack
    adapter_bytes: int = 0
    # all KV blocks of its ended sequences
    blocks: set[int] = field(default_factory=set)
    prompt_scores: dict[int, TokenScore] = field(default_factory=dict)
    clock: RequestTimes = field(default_factory=RequestTimes)
    # cost of its MoE experts so far; None for a dense model
    moe: MoeUsage | None = None
    ledger: RequestLedger = field(default_factory=RequestLedger)

    @property
    def request_id(self) -> str:
        return self.assignment.request_id

    @property
    def session(self) -> tuple[str, str]:
        """The session of its prefix blocks; without a key the tenant's default session."""
        return self.assignment.tenant, self.assignment.session

    @property
    def is_over(self) -> bool:
        return len(self.reasons) == self.num_choices

    def emitted(self, choice: int) -> tuple[int, ...]:
        """The tokens of a choice that the client already has."""
        known = self.assignment.emitted
        return known[choice] if choice < len(known) else ()

    def replay(self, choice: int) -> tuple[Detokenizer, str | None]:
        """The text state after the tokens that the client has, and whether these are all."""
        tokens = self.emitted(choice)
        limits = self.assignment.limits
        text = Detokenizer(self.pieces, limits.stop, limits.text.include_stop)
        reason = None
        for count, token in enumerate(tokens, 1):
            _, reason, _ = self._advance(text, token, count)
        reason = reason or self.complete(choice)
        self.num_completion += len(tokens)
        return text, reason

    def produce(self, choice: int, token: int, count: int, score: TokenScore | None) -> Delta:
        """Add the `count`-th output token of a choice. Records the end of the choice."""
        text, reason, match = self._advance(self.texts[choice], token, count)
        if self.constraints and reason is None and self.complete(choice):
            text, reason = text + self.texts[choice].flush(), self.complete(choice)
        if reason is not None:
            self.reasons[choice] = reason
        self.num_completion += 1
        logprobs = None if score is None else (self.describe(token, score),)
        return Delta(self.assignment.request_id, choice, text, (token,), logprobs, reason, match)

    def produce_all(self, choice: int, output: Iterable[int]) -> list[Delta]:
        """Add a whole output at once (a beam search ends), after what the client already has."""
        known = len(self.emitted(choice))
        deltas = []
        for count, token in enumerate(output, 1):
            if choice in self.reasons:
                break
            if count > known:
                deltas.append(self.produce(choice, token, count, None))
        return deltas

    def cut(self, choice: int, reason: str) -> Delta:
        """End a choice early, with all the text it has."""
        self.reasons[choice] = reason
        text = self.texts[choice].flush() if choice in self.texts else ""
        return Delta(self.request_id, choice, text, (), finish_reason=reason)

    def started(self, replica: str) -> Started:
        scores = None
        num_top = self.assignment.sampling.prompt_logprobs
        ids = self.assignment.prompt_ids
        if num_top is not None:
            scored = [self.prompt_scores.get(position) for position in range(len(ids))]
            scores = tuple(
                None if one is None else self.describe(token, one)
                for token, one in zip(ids, scored, strict=True)
            )
            self.prompt_scores.clear()
        return Started(
            self.request_id,
            replica,
            len(ids),
            self.num_cached,
            scores,
            stored_tokens=self.num_stored,
            at=self.clock.scheduled or 0.0,
        )

    def finished(self, now: float, times: TimeLedger) -> Finished:
        """`times`: all steps of the engine."""
        arrived, clock = self.assignment.arrived_at, self.clock
        scheduled = now if clock.scheduled is None else clock.scheduled
        first = now if clock.first_token is None else clock.first_token
        last = first if clock.last_token is None else clock.last_token
        return Finished(
            self.request_id,
            tuple(self.reasons[choice] for choice in range(self.num_choices)),
            Usage(
                len(self.assignment.prompt_ids),
                self.num_completion,
                self.num_cached,
                stored_tokens=self.num_stored,
            ),
            Timings(
                queue_s=max(scheduled - arrived, 0.0),
                prefill_s=max(first - scheduled, 0.0),
                first_token_s=max(first - arrived, 0.0),
                decode_s=max(last - first, 0.0),
                total_s=max(now - arrived, 0.0),
                num_preemptions=self.num_preemptions,
                load_s=self.load_s,
                spent=self.ledger.spent(
                    times.busy_s, max(now - scheduled, 0.0), times.since_ran(now)
                ),
            ),
            self.moe,
            len(self.blocks),
            self.adapter_bytes,
            unfinished=self._unfinished(),
        )

    def _unfinished(self) -> tuple[int, ...]:
        if not self.constraints:
            return ()
        has_begun = self.beginning is None
        return tuple(
            n for n, held in sorted(self.constraints.items()) if not (has_begun and held.may_end)
        )

    def describe(self, token: int, score: TokenScore) -> TokenLogprob:
        top = tuple((other, *self._names(other), value) for other, value in score.top)
        return TokenLogprob(token, *self._names(token), score.logprob, top, score.rank)

    def _names(self, token: int) -> tuple[str, bytes]:
        return self.pieces.name(token)

    def complete(self, choice: int) -> str | None:
        """The finish reason of a choice whose grammar allows no further token."""
        constraint = self.constraints.get(choice) if self.beginning is None else None
        return "stop" if constraint is not None and constraint.is_complete else None

    def _advance(
        self, text: Detokenizer, token: int, count: int
    ) -> tuple[str, str | None, str | int | None]:
        """(text to send, finish reason, what matched) after one more output token."""
        if token in self.stop_ids and count > self.min_output:
            # the text of an end token is sent if the request asked for it
            limits = self.assignment.limits
            last = text.push(token, may_stop=False) if limits.text.include_stop else ""
            assert not isinstance(last, StopMatch)
            named = token in limits.stop_token_ids
            return last + text.flush(), "stop", token if named else None
        pushed = text.push(token, count > self.min_output)
        if isinstance(pushed, StopMatch):
            return pushed.text, "stop", pushed.match
        if count >= self.max_output:
            return pushed + text.flush(), "length", None
        return pushed, None, None


log = logging.getLogger(__name__)


class RequestSetup(NamedTuple):
    """What a new request needs: its lane, its adapter stack, and its number in order of arrival."""

    config: LaneConfig
    front: SequenceAdapters
    order: int
    grammars: GrammarCache


def sequence_adapters(
    assignment: Assignment, adapters: AdapterPoolView | None, vocab: int
) -> SequenceAdapters | Rejected:
    """The adapters of the request, or the reason why they cannot run here."""
    if not assignment.adapters:
        return BASE
    if adapters is None:
        return Rejected("unsupported", "this engine runs no adapters", None)
    try:
        facts = adapters.describe(assignment.adapters)
    except CoterieError as error:
        fields = {"request_id": assignment.request_id, "reason": error.message}
        log.warning("adapter_refused", extra=fields)
        shown = error_for_client(error, assignment.adapters)
        return Rejected(shown.code, shown.message, shown.retry_after_s)
    tokens = range(vocab, vocab + facts.num_virtual_tokens)
    return SequenceAdapters(facts.key, assignment.adapters, tokens)


def refuse(
    assignment: Assignment, front: SequenceAdapters, config: LaneConfig, vocab: int
) -> Rejected | None:
    """Why this lane can never run `assignment`; None if it can."""
    if not assignment.prompt_ids:
        return _invalid("the prompt has no tokens")
    if min(assignment.prompt_ids) < 0 or max(assignment.prompt_ids) >= vocab:
        return _invalid(f"a prompt token is outside the vocabulary of {vocab}")
    problem = _sampling_problem(assignment.sampling, vocab) or _limits_problem(assignment)
    if problem:
        return _invalid(problem)
    room = _context(assignment, config)
    if len(front.tokens) + len(assignment.prompt_ids) >= room:
        soft = f" and its adapters {len(front.tokens)} more" if front.tokens else ""
        return Rejected(
            "context_length_exceeded",
            f"the prompt has {len(assignment.prompt_ids)} tokens{soft}; "
            f"with room for one more the context holds {room - 1}",
            None,
        )
    if assignment.sampling.constraint is not None and (assignment.sampling.num_beams or 1) > 1:
        reason = "a response format cannot be enforced in a beam search; leave one of them out"
        return Rejected("unsupported", reason, None)
    return _refuse_beams(assignment, front, config)


def open_request(
    assignment: Assignment, entry: RequestSetup, pieces: TokenPieces, eos_ids: frozenset[int]
) -> ActiveRequest:
    """The request with its sequences, which continue after what the client already has.

    Choices that are already complete are in `reasons`. If a grammar takes long to start, it is
    still `beginning` and its sequences wait. Raises the error of an invalid grammar.
    """
    limits = assignment.limits
    ends = frozenset() if limits.ignore_eos else eos_ids
    num_prompt = len(entry.front.tokens) + len(assignment.prompt_ids)
    tokenizer, rules = pieces.tokenizer, assignment.sampling.rules
    if not limits.text.skip_special:
        pieces = pieces_of(tokenizer, skip_special=False)
    request = ActiveRequest(
        assignment,
        pieces,
        ends | frozenset(limits.stop_token_ids),
        limits.min_tokens,
        _max_total(assignment, entry.front, entry.config) - num_prompt,
        assignment.sampling.n or 1,
        bad_words=BadWords(rules.bad_words, partial(tokenizer.encode, special=False))
        if rules is not None and rules.bad_words
        else None,
    )
    if assignment.sampling.constraint is not None:
        _begin_constraints(request, entry.grammars)
    for choice in range(request.num_choices):
        request.texts[choice], reason = request.replay(choice)
        if reason is not None or choice in assignment.finished:
            request.reasons[choice] = reason or "stop"
    if (assignment.sampling.num_beams or 1) > 1:
        _open_beams(request, entry)
    else:
        _open_choices(request, entry)
    return request


def _begin_constraints(request: ActiveRequest, grammars: GrammarCache) -> None:
    choices = range(request.num_choices)
    made = grammars.constraints(request.assignment, request.max_output, request.num_choices)
    request.constraints = made
    job = grammars.begin(request.assignment, [(made[n], request.emitted(n)) for n in choices])
    # read `done` once: the task may end at any moment, also with an error
    if job.done:
        job.result()
    else:
        request.beginning = job


def _open_choices(request: ActiveRequest, entry: RequestSetup) -> None:
    leader: Sequence | None = None
    for choice in range(request.num_choices):
        if choice in request.reasons:
            continue
        sequence = _sequence(request, entry, choice)
        request.sequences.append(sequence)
        if sequence.num_output:
            continue
        if leader is None:
            leader = sequence
        else:
            # it has the same prompt as the leader: it draws from the leader's logits and then forks
            sequence.status = SequenceStatus.FOLLOWING
            leader.followers.append(sequence)


def _open_beams(request: ActiveRequest, entry: RequestSetup) -> None:
    num_beams = request.assignment.sampling.num_beams or 1
    sequence = _sequence(request, entry, 0, restart=True)
    num_kept = num_continuations(num_beams, len(request.stop_ids))
    sequence.draw = replace(sequence.draw, num_continuations=num_kept)
    request.sequences.append(sequence)


def _sequence(
    request: ActiveRequest, entry: RequestSetup, choice: int, restart: bool = False
) -> Sequence:
    assignment, limits = request.assignment, request.assignment.limits
    prompt = [*entry.front.tokens, *assignment.prompt_ids]
    emitted = () if restart else request.emitted(choice)
    constraint = request.constraints.get(choice)
    stop_ids = sorted(request.stop_ids)
    return Sequence(
        request_id=assignment.request_id,
        choice=choice,
        tokens=[*prompt, *emitted],
        num_prompt=len(prompt),
        max_total=len(prompt) + request.max_output,
        front=entry.front,
        root=root_digest(entry.config.name, assignment.adapters, assignment.tenant),
        rank=(-limits.priority, assignment.arrived_at, entry.order, choice),
        draw=make_draw(assignment, choice, emitted, stop_ids, constraint, request.bad_words),
        share=TenantShare(
            own_tenant(assignment.tenant), limits.max_running, limits.share, limits.step_tokens
        ),
    )


def _context(assignment: Assignment, config: LaneConfig) -> int:
    limit = assignment.limits.context_size
    return config.capacity_tokens if limit is None else min(limit, config.capacity_tokens)


def _max_total(assignment: Assignment, front: SequenceAdapters, config: LaneConfig) -> int:
    room, most = _context(assignment, config), assignment.limits.max_tokens
    num_prompt = len(front.tokens) + len(assignment.prompt_ids)
    return room if most is None else min(room, num_prompt + most)


def _refuse_beams(
    assignment: Assignment, front: SequenceAdapters, config: LaneConfig
) -> Rejected | None:
    """Beams advance together, so all of them must fit at full length."""
    num_beams = assignment.sampling.num_beams or 1
    if num_beams == 1:
        return None
    if (assignment.sampling.n or 1) > num_beams:
        return _invalid("n is larger than num_beams")
    if num_beams > config.max_sequences:
        return _invalid(f"num_beams is larger than {config.max_sequences}")
    if assignment.sampling.logprobs is not None or assignment.sampling.prompt_logprobs is not None:
        return Rejected("unsupported", "logprobs are not available with beam search", None)
    longest = -(-_max_total(assignment, front, config) // config.block_size)
    if num_beams * longest > config.num_blocks:
        tokens = config.num_blocks * config.block_size
        return Rejected(
            "context_length_exceeded", f"{num_beams} beams do not fit {tokens} KV tokens", None
        )
    return None


def _sampling_problem(sampling: Sampling, vocab: int) -> str | None:
    try:
        check_sampling(sampling)
    except InvalidRequest as error:
        return error.message
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, name) or 0) > vocab:
            return f"{name} must be a number from 0 to {vocab}"
    rules = sampling.rules
    if rules is not None and rules.allowed_ids is not None:
        if not rules.allowed_ids:
            return "allowed_token_ids names no token"
        if min(rules.allowed_ids) < 0 or max(rules.allowed_ids) >= vocab:
            return "allowed_token_ids names a token outside the vocabulary"
        if sampling.constraint is not None:
            return "allowed_token_ids cannot be held to beside a format; leave one of them out"
    if any(not 0 <= token < vocab for token, _ in sampling.logit_bias):
        return "logit_bias names a token outside the vocabulary"
    return None


def _limits_problem(assignment: Assignment) -> str | None:
    limits = assignment.limits
    if limits.max_tokens is not None and limits.max_tokens < 1:
        return "max_tokens must be at least 1"
    if limits.step_tokens < 0:
        return f"step_tokens is {limits.step_tokens}; it must be at least 0"
    if limits.min_tokens < 0:
        return "min_tokens must not be negative"
    if len(assignment.emitted) > (assignment.sampling.n or 1):
        return "more choices were emitted than asked for"
    return None


def _invalid(reason: str) -> Rejected:
    return Rejected("invalid_request", reason, None)
