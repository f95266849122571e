"""A training example, an evaluation item, and small helpers of the generators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Example:
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Item:
    """A held-out item. The expert's metric compares an answer with `expected`."""

    prompt: str
    expected: Any
    max_tokens: int = 32

    def record(self) -> dict[str, Any]:
        """A line of tests/eval.jsonl."""
        messages = [{"role": "user", "content": self.prompt}]
        return {"messages": messages, "expected": self.expected, "max_tokens": self.max_tokens}


def pick(draw: random.Random, values: Sequence[_T]) -> _T:
    return values[draw.randrange(len(values))]


def words(text: str) -> list[str]:
    return text.split()


_HEADS = words("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sl st t tr v w z")
_CORES = words("a e i o u ai ea ou io")
_TAILS = ("", *words("n r l s t x nd rk lm sk"), "")


def made_up(draw: random.Random) -> str:
    """A word that is in no list, so that the model learns to copy and not a vocabulary."""
    count = draw.choice((1, 2, 2, 3))
    return "".join(pick(draw, _HEADS) + pick(draw, _CORES) for _ in range(count)) + pick(
        draw, _TAILS
    )
