"""Which checks work. A check that hangs or crashes on an answer is tried on a known good answer: if
it fails there too, the check is broken and says nothing; otherwise the answer is invalid."""

from __future__ import annotations

import time
from collections import Counter

from coterie.core.lru import LruCache
from coterie.obs.log import log

# a check that was found broken is not asked again for this long
RETRY_S = 30.0
# the newest answer that a command accepted quickly is kept, if it is not longer
MAX_KEPT = 20_000
MAX_CHECKS = 256

# (validator, argument) -> a good answer; without the argument: (argument, a good answer)
GOOD_CODE = {
    "bash": "echo hello", "c": "int x;", "cpp": "int x;", "go": "package main",
    "java": "class A { }", "javascript": "let x = 1;", "python": "x = 1", "rust": "fn a() {}",
    "sql": "SELECT a FROM t;", "tsx": "let x = 1;", "typescript": "let x = 1;", "": "x",
}  # fmt: skip
GOOD_ANSWERS = {
    "json": ("", "{}"),
    "json_schema": ("{}", "{}"),
    "pattern": ("a", "a"),
    "grammar": ("stop", "a"),
    "generic": ("", "a"),
    "python": ("", GOOD_CODE["python"]),
}


def good_answer(validator: str, argument: str) -> tuple[str, str]:
    """(argument, answer) of a built-in validator: it must accept the answer. A schema and a pattern
    are a caller's and a package's: the validator is tried with its own."""
    if validator == "code":
        return argument, GOOD_CODE.get(argument, GOOD_CODE[""])
    return GOOD_ANSWERS[validator]


class CheckHealth:
    """For one event loop. Answers that it keeps are in memory only."""

    def __init__(self) -> None:
        # by check: answers that it was too broken to judge
        self.broken: Counter[str] = Counter()
        self._accepted: LruCache[str, str] = LruCache(MAX_CHECKS)
        # by check: time.monotonic() from which it is asked again
        self._again_at: dict[str, float] = {}

    def accepted(self, check: str, text: str | None) -> None:
        """`text` is kept as a good answer; None = it is no good example."""
        if text is not None and len(text) <= MAX_KEPT:
            self._accepted.put(check, text)
        self._again_at.pop(check, None)

    def last_accepted(self, check: str) -> str | None:
        return self._accepted.get(check)

    def rests(self, check: str) -> bool:
        """Whether the check was found broken just now. Counts the answer that it does not judge."""
        if time.monotonic() >= self._again_at.get(check, 0.0):
            return False
        self.broken[check] += 1
        return True

    def is_broken(self, check: str, reason: str) -> None:
        self.broken[check] += 1
        self._again_at[check] = time.monotonic() + RETRY_S
        log("validator_broken", level="error", reason=f"{check}: {reason}")
