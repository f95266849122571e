"""An accepted request from add to its end: its choices' text, its clock, and its events.

Turns drawn tokens into `Delta`s and knows when a choice is over. Knows no blocks and no order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coterie.core.dispatch import MoeUsage
from coterie.core.events import Delta, Finished, Started, Timings, TokenLogprob, Usage
from coterie.core.plan import Assignment
from coterie.engine.detokenize import Detokenizer, StopMatch, TokenPieces, token_name
from coterie.engine.draw import BadWords
from coterie.engine.grammar import Constraint
from coterie.engine.grammar_work import GrammarTask
from coterie.engine.sequence import Sequence
from coterie.engine.step import TokenScore


@dataclass(slots=True)
class RequestTimes:
    """Moments of the lane's clock; None = not yet."""

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
    # by choice, where the answer has to keep to a grammar
    constraints: dict[int, Constraint] = field(default_factory=dict)
    # begins them; None where they are begun
    beginning: GrammarTask | None = None
    # choices still to be computed; a beam search has other sequences than choices
    sequences: list[Sequence] = field(default_factory=list)
    texts: dict[int, Detokenizer] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    num_completion: int = 0
    num_cached: int = 0
    num_stored: int = 0
    num_preemptions: int = 0
    # how long its adapters were waited for
    load_s: float = 0.0
    # of its stack
    adapter_bytes: int = 0
    # every KV block that an ended sequence held
    blocks: set[int] = field(default_factory=set)
    prompt_scores: dict[int, TokenScore] = field(default_factory=dict)
    clock: RequestTimes = field(default_factory=RequestTimes)
    # what its experts cost so far; None for a model without any
    experts: MoeUsage | None = None

    @property
    def request_id(self) -> str:
        return self.assignment.request_id

    @property
    def session(self) -> tuple[str, str]:
        """Whose prefix blocks these become; without a key the tenant's default session."""
        return self.assignment.tenant, self.assignment.session

    @property
    def is_over(self) -> bool:
        return len(self.reasons) == self.num_choices

    def emitted(self, choice: int) -> tuple[int, ...]:
        """The tokens of a choice that the client already has."""
        known = self.assignment.emitted
        return known[choice] if choice < len(known) else ()

    def replay(self, choice: int) -> tuple[Detokenizer, str | None]:
        """The text state behind the tokens the client already has, and whether they were all."""
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
        """The `count`-th output token of a choice. Its end, if it is the end, is recorded."""
        text, reason, match = self._advance(self.texts[choice], token, count)
        if self.constraints and reason is None and self.complete(choice):
            text, reason = text + self.texts[choice].flush(), self.complete(choice)
        if reason is not None:
            self.reasons[choice] = reason
        self.num_completion += 1
        logprobs = None if score is None else (self.describe(token, score),)
        return Delta(self.assignment.request_id, choice, text, (token,), logprobs, reason, match)

    def produce_all(self, choice: int, output: Iterable[int]) -> list[Delta]:
        """A whole output at once (a beam search ends), behind what the client already has."""
        known = len(self.emitted(choice))
        deltas = []
        for count, token in enumerate(output, 1):
            if choice in self.reasons:
                break
            if count > known:
                deltas.append(self.produce(choice, token, count, None))
        return deltas

    def cut(self, choice: int, reason: str) -> Delta:
        """End a choice from outside, with all text it has."""
        self.reasons[choice] = reason
        text = self.texts[choice].flush() if choice in self.texts else ""
        return Delta(self.request_id, choice, text, (), finish_reason=reason)

    def started(self, replica: str) -> Started:
        scores = None
        asked = self.assignment.sampling.prompt_logprobs
        ids = self.assignment.prompt_ids
        if asked is not None:
            found = [self.prompt_scores.get(position) for position in range(len(ids))]
            scores = tuple(
                None if one is None else self.describe(token, one)
                for token, one in zip(ids, found, strict=True)
            )
            self.prompt_scores.clear()
        return Started(
            self.request_id,
            replica,
            len(ids),
            self.num_cached,
            scores,
            stored_tokens=self.num_stored,
        )

    def finished(self, now: float) -> Finished:
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
            ),
            self.experts,
            len(self.blocks),
            self.adapter_bytes,
            unfinished=self._unfinished(),
        )

    def _unfinished(self) -> tuple[int, ...]:
        begun = self.beginning is None
        return tuple(
            n for n, held in sorted(self.constraints.items()) if not (begun and held.may_end)
        )

    def describe(self, token: int, score: TokenScore) -> TokenLogprob:
        top = tuple((other, *self._names(other), value) for other, value in score.top)
        return TokenLogprob(token, *self._names(token), score.logprob, top, score.rank)

    def _names(self, token: int) -> tuple[str, bytes]:
        return token_name(self.pieces.tokenizer, token)

    def complete(self, choice: int) -> str | None:
        """The finish reason of a choice whose grammar lets nothing follow."""
        constraint = self.constraints.get(choice) if self.beginning is None else None
        return "stop" if constraint is not None and constraint.is_complete else None

    def _advance(
        self, text: Detokenizer, token: int, count: int
    ) -> tuple[str, str | None, str | int | None]:
        """(text to send, finish reason, what matched) after one more output token."""
        if token in self.stop_ids and count > self.min_output:
            # an end token's own text is sent where it was asked for
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
