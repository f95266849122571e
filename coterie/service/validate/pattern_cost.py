"""How long a regular expression may take at most, from its form.

`re` tries one way after the other. A pattern without repeats inside of repeats has at most `n` ways
for each repeat, where `n` is the length of the text; a repeat inside of one may have exponentially
many, unless a character that occurs nowhere else in it separates its rounds, as in `\\w+(-\\w+)*`.
What is not understood here counts as slow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

# a step takes some nanoseconds
MAX_STEPS = 300_000
_SINGLE = frozenset((ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT))
_REPEATS = frozenset((ops.MAX_REPEAT, ops.MIN_REPEAT))
_MAX_FACTOR = 1e6


class PatternCost(NamedTuple):
    """At most `factor * n ** power` ways through a text of length n; `size` items in each."""

    power: int = 0
    factor: float = 1.0
    size: int = 1


SLOW = PatternCost(factor=math.inf)


def is_fast(pattern: str, text: str) -> bool:
    """Whether it certainly takes less than about a millisecond."""
    power, factor, size = cost_of(pattern)
    return factor * float(max(len(text), 1)) ** power * size <= MAX_STEPS


@lru_cache(maxsize=512)
def cost_of(pattern: str) -> PatternCost:
    try:
        return _sequence(_parser.parse(pattern))
    except (re.error, OverflowError, RecursionError):
        return SLOW


def _sequence(items: Iterable[tuple[Any, Any]]) -> PatternCost:
    power, factor, size = 0, 1.0, 0
    for operation, argument in items:
        cost = _item(operation, argument)
        power, factor, size = power + cost.power, factor * cost.factor, size + cost.size
    return PatternCost(power, factor, size) if factor <= _MAX_FACTOR else SLOW


def _item(operation: Any, argument: Any) -> PatternCost:
    if operation in _SINGLE:
        return PatternCost()
    if operation is ops.SUBPATTERN:
        return _sequence(argument[3])
    if operation is ops.BRANCH:
        parts = [_sequence(part) for part in argument[1]]
        return PatternCost(
            max(part.power for part in parts),
            sum(part.factor for part in parts),
            sum(part.size for part in parts),
        )
    if operation in _REPEATS:
        return _repeat(*argument)
    return SLOW


def _repeat(least: int, most: int, body: Any) -> PatternCost:
    inner = _sequence(body)
    ways = most - least + 1
    if len(body) == 1 and body[0][0] in _SINGLE:
        # the body of a repeat is a single character
        return PatternCost(1) if most is ops.MAXREPEAT else PatternCost(0, float(ways))
    if most == 1:
        return PatternCost(inner.power, inner.factor + 1, inner.size)
    # with one repeat in it, a round between two separators can be read in one way only
    if most is ops.MAXREPEAT and inner.power <= 1 and inner.factor == 1 and _is_separated(body):
        return PatternCost(inner.power + 1, 1.0, inner.size)
    if inner.power or most is ops.MAXREPEAT or most * math.log(inner.factor + 1) > 30:
        return SLOW
    return PatternCost(0, ways * inner.factor**most, inner.size * most)


def _is_separated(body: Any) -> bool:
    """Whether each round begins with a character that nothing else in it matches."""
    items = _inside(body)
    (operation, separator), *others = items
    if operation is not ops.LITERAL:
        return False
    for operation, argument in others:
        if operation in _REPEATS:
            least, _, repeated = argument
            if least < 1 or len(repeated) != 1:
                return False
            ((operation, argument),) = repeated
        if not _excludes(operation, argument, separator):
            return False
    return True


def _inside(body: Any) -> list[tuple[Any, Any]]:
    """The items of a body, which may be in a group of its own."""
    items = list(body)
    while len(items) == 1 and items[0][0] is ops.SUBPATTERN:
        items = list(items[0][1][3])
    return items


def _excludes(operation: Any, argument: Any, character: int) -> bool:
    """Whether an item of one character certainly does not match this one."""
    if operation is ops.LITERAL:
        return bool(argument != character)
    if operation is not ops.IN:
        return False
    for kind, value in argument:
        if kind is ops.LITERAL and value != character:
            continue
        if kind is ops.RANGE and not value[0] <= character <= value[1]:
            continue
        return False
    return True
