"""Holds drawn tokens to a grammar: which may follow, whether the text is complete, and that it can
still be completed in the tokens that are left.

One `Constraint` per choice. Its state is a function of the choice's own tokens, so it can be built
again behind any of them, by whoever takes over. Knows no logits, no batch order and no events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.core.request import ResponseFormat
from coterie.engine.closing import Closer
from coterie.models.grammar import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from coterie.core.plan import Assignment
    from coterie.models.tokenizer import Tokenizer

# compiled grammars that are kept; the least recently used go first
MAX_COMPILED = 64
# with so many tokens left, and twice the shortest answer's, every token is looked at
NEAR_END = 64


class Compiled(NamedTuple):
    """A grammar at its start, and the shortest answer found for it (None = none was)."""

    matcher: LLMatcher
    shortest: list[int] | None
    vocabulary: GrammarVocabulary
    closer: Closer


class Constraint:
    """One choice's place in its grammar.

    Near the end of what may be produced, a token is taken only if the text can be completed in the
    tokens left behind it; else the next token of the known way to its end is taken instead.
    """

    __slots__ = (
        "_can_end", "_closer", "_end", "_horizon", "_left", "_look_at", "_way",
        "error", "is_complete", "matcher", "num_words", "shunned",
    )  # fmt: skip

    def __init__(self, start: Compiled, max_output: int, shunned: Sequence[int]) -> None:
        """`shunned` tokens come only where nothing else may."""
        self.matcher = start.matcher.deep_copy()
        self.shunned = tuple(shunned)
        # of 32 bits in a mask
        self.num_words = start.vocabulary.num_words
        # nothing may follow
        self.is_complete = False
        # why the grammar cannot be followed any further
        self.error: str | None = None
        self._closer, self._end = start.closer, start.vocabulary.end
        self._can_end = self._end < start.vocabulary.num_ids
        self._left = max_output
        # tokens that complete the text from here; None = not looked for yet, or there is no way
        self._way: list[int] | None = None
        shortest = start.shortest
        self._horizon = NEAR_END + 2 * len(shortest or ())
        # it is looked for when no more than these are left; without a way there is nothing to do
        self._look_at = -1
        if shortest is not None and len(shortest) <= max_output:
            self._way = list(shortest) if max_output <= self._horizon else None
            self._look_at = max_output - max_output // 8

    def take(self, token: int) -> int:
        """One more token of the output: `token`, or what must come instead for the text to end in
        time. A grammar that fails keeps its reason in `error`."""
        matcher = self.matcher
        if self.error is not None or not matcher.consume_token(token):
            self.error = self.error or " ".join(matcher.get_error().split())[:300]
            return token
        self._left -= 1
        if self._way is not None:
            token = self._hold_to_way(self._way, token)
        elif self._left <= self._look_at:
            self._look()
        self.is_complete = matcher.is_stopped()
        return token

    def _hold_to_way(self, way: list[int], token: int) -> int:
        if way and token == way[0]:
            self._way = way[1:]
            return token
        after = self._way_behind(way)
        if after is not None:
            self._way = after
            return token
        if not way and not self._can_end:
            # no token ends a text of this model
            self._way = None
            return token
        self.matcher.rollback(1)
        token = way[0] if way else self._end
        self.matcher.consume_token(token)
        self._way = way[1:]
        return token

    def _way_behind(self, way: list[int]) -> list[int] | None:
        """From the state behind one more token, when the way before it was `way`."""
        if self.matcher.is_stopped():
            return []
        for known in (way[1:], way):
            if len(known) <= self._left and self._completes(known):
                return known
        return self._closer.find(self.matcher, self._left)

    def _completes(self, way: list[int]) -> bool:
        if not way:
            return bool(self.matcher.is_accepting())
        return bool(self.matcher.validate_tokens([*way, self._end]) == len(way) + 1)

    def _look(self) -> None:
        way = self._closer.find(self.matcher, self._left)
        near = self._left <= self._horizon
        if way is not None and (near or 2 * len(way) >= self._left):
            self._way = way
        self._look_at = -1 if near else self._left - self._left // 8


class Masks:
    """Which tokens may follow, for several choices at once: computed in parallel, by other threads
    than the interpreter's."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def allowed(
        self, constraints: Sequence[Constraint], banned: Sequence[Sequence[int]], size: int
    ) -> NDArray[np.bool_]:
        """[R, size]. Of each row's `banned` and shunned tokens, only where nothing else may follow.

        A grammar that fails allows everything here, and tells in `take`.
        """
        words = np.zeros((len(constraints), constraints[0].num_words), dtype=np.uint32)
        self._fill([constraint.matcher for constraint in constraints], words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=size, bitorder="little")
        allowed: NDArray[np.bool_] = bits.view(np.bool_)
        for row, constraint in enumerate(constraints):
            avoided = [*constraint.shunned, *banned[row]]
            if avoided:
                kept = allowed[row, avoided]
                allowed[row, avoided] = False
                if not allowed[row].any():
                    allowed[row, avoided] = kept
            if constraint.matcher.is_error():
                allowed[row] = True
        return allowed

    def _fill(self, matchers: list[LLMatcher], words: NDArray[np.uint32]) -> None:
        address, row_bytes = words.ctypes.data, words.shape[1] * 4
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(address, row_bytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, address, row_bytes, len(matchers))


class Grammars:
    """Compiled grammars of one engine, over its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._num_ids, self._eos_ids = tokenizer, num_ids, eos_ids
        self._parts: tuple[GrammarVocabulary, Closer] | None = None
        self._compiled: OrderedDict[ResponseFormat, Compiled] = OrderedDict()
        self._lock = Lock()

    def warm(self) -> None:
        """Ready the vocabulary, on a thread of the caller's: the first request then waits less."""
        with self._lock:
            if self._parts is None:
                words = GrammarVocabulary(self._tokenizer, self._num_ids, self._eos_ids)
                self._parts = words, Closer(words)

    def constraint(
        self, assignment: Assignment, output: Sequence[int], max_output: int
    ) -> Constraint:
        """A choice's own, behind the `output` it has already. Raises InvalidRequest."""
        wanted = assignment.sampling.constraint
        assert wanted is not None
        shunned = self._eos_ids if assignment.limits.ignore_eos else ()
        found = Constraint(self._compile(wanted), max_output, shunned)
        for token in output:
            found.take(token)
        return found

    def _compile(self, wanted: ResponseFormat) -> Compiled:
        found = self._compiled.get(wanted)
        if found is None:
            self.warm()
            assert self._parts is not None
            vocabulary, closer = self._parts
            matcher = vocabulary.compile(wanted)
            found = Compiled(matcher, closer.find(matcher, NEAR_END * 8), vocabulary, closer)
            self._compiled[wanted] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(wanted)
        return found
