"""From an assignment to an active request, or to the reason why it is refused. Never raises."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from coterie.core.errors import CoterieError
from coterie.core.plan import Assignment, Rejected
from coterie.core.request import Sampling, own_tenant
from coterie.engine.active import ActiveRequest
from coterie.engine.beam import num_continuations
from coterie.engine.detokenize import TokenPieces, pieces_of
from coterie.engine.draw import BadWords, make_draw
from coterie.engine.grammar import GrammarCache
from coterie.engine.lane import LaneConfig
from coterie.engine.prefix import root_digest
from coterie.engine.seats import Adapters, error_for_client
from coterie.engine.sequence import BASE, Sequence, SequenceAdapters, SequenceStatus, TenantShare

log = logging.getLogger(__name__)

MAX_CHOICES = 128


class RequestSetup(NamedTuple):
    """Where a request comes in: its lane, its stack, and how many came before it."""

    config: LaneConfig
    front: SequenceAdapters
    order: int
    grammars: GrammarCache


def sequence_adapters(
    assignment: Assignment, adapters: Adapters | None, vocab: int
) -> SequenceAdapters | Rejected:
    """What the request's adapters ask for, or why they cannot run here."""
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
    """Why this lane can never run `assignment`; None when it can."""
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
    """The request with its sequences, behind whatever the client already has.

    Choices that turn out to be complete are in `reasons`, as are those named finished. A grammar
    that takes long is still `beginning`: its sequences are held. Raises what is wrong with it.
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
    made = {n: grammars.constraint(request.assignment, request.max_output) for n in choices}
    request.constraints = made
    job = grammars.begin(request.assignment, [(made[n], request.emitted(n)) for n in choices])
    # asked once: it may be done at any moment, and with what is wrong
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
            # its prompt is the leader's: it draws from the same logits and forks
            sequence.status = SequenceStatus.FOLLOWING
            leader.followers.append(sequence)


def _open_beams(request: ActiveRequest, entry: RequestSetup) -> None:
    num_beams = request.assignment.sampling.num_beams or 1
    sequence = _sequence(request, entry, 0, restart=True)
    wanted = num_continuations(num_beams, len(request.stop_ids))
    sequence.draw = replace(sequence.draw, num_continuations=wanted)
    request.sequences.append(sequence)


def _sequence(
    request: ActiveRequest, entry: RequestSetup, choice: int, restart: bool = False
) -> Sequence:
    assignment = request.assignment
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
        rank=(-assignment.limits.priority, assignment.arrived_at, entry.order, choice),
        draw=make_draw(assignment, choice, emitted, stop_ids, constraint, request.bad_words),
        share=TenantShare(own_tenant(assignment.tenant), assignment.limits.max_running),
    )


def _context(assignment: Assignment, config: LaneConfig) -> int:
    asked = assignment.limits.context_size
    return config.capacity_tokens if asked is None else min(asked, config.capacity_tokens)


def _max_total(assignment: Assignment, front: SequenceAdapters, config: LaneConfig) -> int:
    room, wanted = _context(assignment, config), assignment.limits.max_tokens
    num_prompt = len(front.tokens) + len(assignment.prompt_ids)
    return room if wanted is None else min(room, num_prompt + wanted)


def _refuse_beams(
    assignment: Assignment, front: SequenceAdapters, config: LaneConfig
) -> Rejected | None:
    """Beams advance together: all of them must fit at their longest."""
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
    bounds = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("typical_p", sampling.typical_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf),
        ("presence_penalty", sampling.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf),
        ("length_penalty", sampling.length_penalty, -math.inf, math.inf),
        ("n", sampling.n, 1, MAX_CHOICES),
        ("num_beams", sampling.num_beams, 1, MAX_CHOICES),
        ("logprobs", sampling.logprobs, 0, vocab),
        ("prompt_logprobs", sampling.prompt_logprobs, 0, vocab),
    )
    for name, value, low, high in bounds:
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            return f"{name} must be a number from {low:g} to {high:g}"
    for name in ("top_p", "typical_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            return f"{name} must be larger than 0"
    rules = sampling.rules
    if rules is not None and rules.allowed_ids is not None:
        if not rules.allowed_ids:
            return "allowed_token_ids names no token"
        if min(rules.allowed_ids) < 0 or max(rules.allowed_ids) >= vocab:
            return "allowed_token_ids names a token outside the vocabulary"
        if sampling.constraint is not None:
            return "allowed_token_ids cannot be held to beside a format; leave one of them out"
    for token, amount in sampling.logit_bias:
        if not 0 <= token < vocab or not math.isfinite(amount):
            return "logit_bias names a token outside the vocabulary, or a value that is no number"
    return None


def _limits_problem(assignment: Assignment) -> str | None:
    limits = assignment.limits
    if limits.max_tokens is not None and limits.max_tokens < 1:
        return "max_tokens must be at least 1"
    if limits.min_tokens < 0:
        return "min_tokens must not be negative"
    if len(assignment.emitted) > (assignment.sampling.n or 1):
        return "more choices were emitted than asked for"
    return None


def _invalid(reason: str) -> Rejected:
    return Rejected("invalid_request", reason, None)
