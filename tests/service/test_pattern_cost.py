"""Patterns of packages that are matched in the server: their time has a limit."""

from __future__ import annotations

import random
import re
import time

import pytest

from coterie.service.validate.pattern_cost import MAX_STEPS, SLOW, cost_of, is_fast

SHIPPED = (
    r"(feat|fix|docs|test|refactor|perf)\([a-z0-9_./-]+\): \S.{4,}",
    r"\d{4}-\d{2}-\d{2}|\d{2}:\d{2}|\d+(\.\d+)? ?[a-zA-Z]{1,3}",
    r"[a-z0-9]+(-[a-z0-9]+)*",
)
# exponential, or not understood
OTHERS = (
    r"(a+)+b", r"(a|aa)+b", r"(a*)*b", r"(\w+-?)+b", r"(-\w+|-a)*b", r"(-[a-z-]+)*b", r"(?=a)a",
    r"(a)\1+", r"(a+){20}b", r"(-[a-z]*)*(-[a-z]*)*b(", r"(-a*-)*b", r"(-a+a+)*b",
)  # fmt: skip


@pytest.mark.parametrize("pattern", SHIPPED)
def test_patterns_of_the_shipped_experts_are_fast(pattern: str) -> None:
    assert is_fast(pattern, "fix(parser): accept lines")


@pytest.mark.parametrize("pattern", OTHERS)
def test_what_may_take_long_is_slow(pattern: str) -> None:
    assert cost_of(pattern) is SLOW or not is_fast(pattern, "a")


def test_a_long_text_is_not_matched_here() -> None:
    assert is_fast(r"a+b+c", "a" * 100) and not is_fast(r"a+b+c", "a" * 1000)


def written(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(6 if depth else 2)
    if kind < 2:
        return rng.choice(("a", "b", "-", "[ab]", "[a-z]", ".", r"\w", "[^b]"))
    if kind == 2:
        return written(rng, depth - 1) + written(rng, depth - 1)
    if kind == 3:
        return f"({written(rng, depth - 1)}|{written(rng, depth - 1)})"
    suffix = rng.choice(("*", "+", "?", "{2,5}", "{3}", "+?"))
    return f"({written(rng, depth - 1)}){suffix}"


def test_random_patterns_that_are_fast_take_no_time() -> None:
    rng, num_fast = random.Random(), 0
    for _ in range(1500):
        pattern = written(rng, 5)
        text = "".join(rng.choice("ab-") for _ in range(rng.choice((5, 12, 30)))) + "!"
        if not is_fast(pattern, text):
            continue
        num_fast += 1
        began = time.thread_time()
        re.fullmatch(pattern, text)
        re.fullmatch(pattern, "a" * (len(text) - 1) + "!")
        # 100 ns for each step, for two texts
        assert time.thread_time() - began < MAX_STEPS * 2e-7 + 0.02, pattern
    assert num_fast > 200
