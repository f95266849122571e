"""Holds drawn tokens to a grammar: which tokens may follow, and whether the text is complete.

One `Constraint` per choice; its state depends on the choice's own tokens alone, so it can be built
again behind any of them. Knows nothing of logits' values, batches' order or requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import InvalidRequest
from coterie.core.request import ResponseFormat
from coterie.models.grammar import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from coterie.core.plan import Assignment
    from coterie.models.tokenizer import Tokenizer

# compiled grammars that are kept, the least recently used go first
MAX_COMPILED = 64


class Constraint:
    """One choice's place in its grammar."""

    __slots__ = ("_matcher", "_shunned", "_words", "is_complete")

    def __init__(self, start: LLMatcher, num_words: int, shunned: Sequence[int]) -> None:
        """`shunned` tokens come only where nothing else may."""
        self._matcher = start.deep_copy()
        self._words = np.zeros(num_words, dtype=np.uint32)
        self._shunned = list(shunned)
        # nothing may follow, not even by choice
        self.is_complete = False

    def produced(self, token: int) -> None:
        """One more token of the output. Raises InvalidRequest when the grammar was too much."""
        if not self._matcher.consume_token(token):
            reason = " ".join(self._matcher.get_error().split())[:300]
            raise InvalidRequest(f"the grammar cannot be followed any further: {reason}")
        self.is_complete = self._matcher.is_stopped()

    def allowed(self, size: int, banned: Sequence[int] = ()) -> NDArray[np.bool_]:
        """[size] whether each token may follow; `banned` ones only where nothing else may.

        A grammar that fails allows everything here, and nothing in `produced`.
        """
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), count=size, bitorder="little").view(np.bool_)
        avoided = [*self._shunned, *banned]
        if avoided:
            kept = bits[avoided]
            bits[avoided] = False
            if not bits.any():
                bits[avoided] = kept
        if self._matcher.is_error():
            bits[:] = True
        return bits


class Grammars:
    """Compiled grammars of one engine, over its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._num_ids, self._eos_ids = tokenizer, num_ids, eos_ids
        self._vocabulary: GrammarVocabulary | None = None
        self._compiled: OrderedDict[ResponseFormat, LLMatcher] = OrderedDict()

    def compile(self, wanted: ResponseFormat) -> LLMatcher:
        """The grammar at its start, from the cache if it is there. Raises what is wrong with it."""
        found = self._compiled.get(wanted)
        if found is None:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer, self._num_ids, self._eos_ids)
            found = self._compiled[wanted] = self._vocabulary.compile(wanted)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(wanted)
        return found

    def constraint(self, assignment: Assignment, output: Sequence[int]) -> Constraint:
        """A choice's own, behind the `output` it has already."""
        wanted = assignment.sampling.constraint
        assert wanted is not None
        start = self.compile(wanted)
        shunned = self._eos_ids if assignment.limits.ignore_eos else ()
        found = Constraint(start, -(-self._vocab_ids // 32), shunned)
        for token in output:
            found.produced(token)
        return found

    @property
    def _vocab_ids(self) -> int:
        assert self._vocabulary is not None
        return int(self._vocabulary.backend.vocab_size)
