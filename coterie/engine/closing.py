"""Finds a short way to end a text that keeps to a grammar, from wherever it stands.

Greedy: of the tokens that may follow, the one that is likeliest to end things. Not always the
shortest way, but a way; the same for the same state. Knows no requests and no limits but a length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from coterie.models.grammar import GrammarVocabulary

# longer ways are not looked for
MAX_TOKENS = 512
# where more tokens than these may follow, a text is open
MANY = 512
# of one token, before the first try is given up
MAX_REPEATS = 48
# what a token that was taken already counts on the second try, against a text that runs in circles
_AGAIN = 300

_BRACKETS, _DIGITS = frozenset(b"}])"), frozenset(b"0123456789")
_OPENERS = frozenset(b"{[(\\\n\t\r+-")
_SCALARS = frozenset({b"null", b"true", b"false", b"n", b"t", b"f"})
# what parts of a pattern are usually set off with
_MARKS = b"@./_#%&=;!?*~^$|<>'`"


class Closer:
    """Over one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._ranks = np.array([_rank(word) for word in vocabulary.words], dtype=np.int64)
        texts = [_text_rank(word) for word in vocabulary.words]
        self._text_ranks = np.array(texts, dtype=np.int64)
        self._words = np.zeros(vocabulary.num_words, dtype=np.uint32)

    def find(self, matcher: LLMatcher, limit: int) -> list[int] | None:
        """At most `limit` tokens behind which the text may end; None = no way was found.

        `matcher` is as it was when this returns.
        """
        limit = min(limit, MAX_TOKENS)
        way = self._walk(matcher.deep_copy(), limit, 0)
        return self._walk(matcher.deep_copy(), limit, _AGAIN) if way is None else way

    def _walk(self, matcher: LLMatcher, limit: int, again: int) -> list[int] | None:
        way: list[int] = []
        counts = np.zeros_like(self._ranks)
        while not matcher.is_accepting():
            taken = matcher.compute_ff_tokens() or self._pick(matcher, counts, again)
            counts[taken] += 1
            way += taken
            if not taken or len(way) > limit or not matcher.consume_tokens(taken):
                return None
            if not again and counts[taken[-1]] > MAX_REPEATS:
                return None
        return way

    def _pick(self, matcher: LLMatcher, counts: NDArray[np.int64], again: int) -> list[int]:
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        bits = np.unpackbits(self._words.view(np.uint8), count=len(counts), bitorder="little")
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return []
        ranks = self._text_ranks if len(allowed) > MANY else self._ranks
        return [int(allowed[(ranks[allowed] + again * counts[allowed]).argmin()])]


def _rank(word: bytes) -> int:
    """The lower, the sooner a text ends behind it: closing marks, then what fills a place with the
    least text, then the longest words (a text may have a least length), then openers."""
    letters, size = set(word), min(len(word), 99)
    if not word:
        return 9000
    if letters <= _BRACKETS:
        return 99 - size
    if letters == {34}:
        return 1000 + 99 - size
    if word in (b",", b":"):
        return 2000
    if size == 1 and word in _MARKS:
        return 3000 + _MARKS.index(word)
    if letters <= _DIGITS or word in _SCALARS:
        return 4000 + size
    if word.isalnum():
        return 5000 + 99 - size
    return (7000 if letters & (_OPENERS | _BRACKETS | {34}) else 6000) + size


def _text_rank(word: bytes) -> int:
    """Inside an open text every mark is a letter, but for the quote that ends it."""
    if word[:1] != b'"':
        return 100 + _rank(word)
    return 99 - min(len(word), 99) if set(word) <= _BRACKETS | {34} else 99
