"""Unicode normalisation (NFC) in linear time.

Marks are put in order by insertion: a run of a hundred thousand of them would hold the event loop
for seconds. No text has runs of even fifty; what has longer ones is left as it came.
"""

from __future__ import annotations

from itertools import pairwise
from unicodedata import combining, is_normalized, normalize

# a run of up to this many is never taken for a long one, one of twice as many always is
STEP = 64
# these decompose into marks without being one
_HIDDEN = frozenset("\u0f73\u0f75\u0f81")


def nfc(text: str) -> str:
    if is_normalized("NFC", text) or _has_long_run(text):
        return text
    return normalize("NFC", text)


def _has_long_run(text: str) -> bool:
    """Two of every `STEP`th character in a row lie in a long run, if there is one."""
    return any(
        _is_mark(one) and _is_mark(other) and all(map(_is_mark, text[i * STEP : (i + 1) * STEP]))
        for i, (one, other) in enumerate(pairwise(text[::STEP]))
    )


def _is_mark(char: str) -> bool:
    return combining(char) != 0 or char in _HIDDEN
