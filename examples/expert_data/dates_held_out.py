"""Held-out dates, times and amounts: other years and other sentences than in the training data."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal

from examples.expert_data.base import Item, pick
from examples.expert_data.dates import HELD_OUT_YEARS, MONTHS, UNITS, nth, scaled

_DATES = (
    "{month} the {d}{th} {y}", "{d} of {month}, {y}", "{d}{th} {mon}, {y}", "{month} {dd}, {y}",
    "{day} the {d}{th} of {month} {y}", "{y}, {d} {month}", "{d}/{mon}/{y}", "{month}-{d}-{y}",
)  # fmt: skip
_DATE_ASKS = (
    'A letter is dated "{}". Reply only with that date in YYYY-MM-DD form.',
    "Which ISO 8601 calendar date (YYYY-MM-DD) is meant by {}?",
    "The contract was signed on {}. Rewrite just the date as year-month-day, digits only.",
)
_TIMES = ("{h}:{mm} {a}.m.", "{h}:{mm} in the {part}", "{mm} minutes past {h} {a}m")
_TIME_ASKS = (
    "The train leaves at {} sharp. Tell me the departure on a 24-hour clock, HH:MM only.",
    "My alarm rings at {}; how is that written in HH:MM with 24 hours?",
)
_UNIT_ASKS = (
    "The label says {}. Rewrite the amount in {} with the unit sign.",
    "A recipe or plan gives {}; express this in {} (number and unit symbol only).",
)
_PARTS = {"morning": range(1, 12), "afternoon": range(12, 18), "evening": range(18, 23)}


def items(seed: int = 908) -> list[Item]:
    draw = random.Random(seed)
    unique: dict[str, Item] = {}
    makers: tuple[Callable[[random.Random], Item], ...] = (_date, _date, _time, _unit)
    while len(unique) < 180:
        item = makers[len(unique) % 4](draw)
        unique.setdefault(item.prompt, item)
    return list(unique.values())


def _date(draw: random.Random) -> Item:
    year, month, day = pick(draw, HELD_OUT_YEARS), draw.randint(1, 12), draw.randint(1, 28)
    name = MONTHS[month - 1]
    text = pick(draw, _DATES).format(
        d=day, dd=f"{day:02}", y=year, th=nth(day), month=name, mon=name[:3],
        day=pick(draw, ("Tuesday", "Friday", "Sunday")),
    )  # fmt: skip
    return Item(pick(draw, _DATE_ASKS).format(text), f"{year}-{month:02}-{day:02}", 24)


def _time(draw: random.Random) -> Item:
    part = pick(draw, tuple(_PARTS))
    hour, minute = draw.choice(_PARTS[part]), draw.randint(1, 59)
    text = pick(draw, _TIMES).format(
        h=hour % 12 or 12, mm=f"{minute:02}", a="a" if hour < 12 else "p", part=part
    )
    return Item(pick(draw, _TIME_ASKS).format(text), f"{hour:02}:{minute:02}", 24)


def _unit(draw: random.Random) -> Item:
    _, names, small, small_name, factor = pick(draw, UNITS)
    value = Decimal(draw.randint(11, 899)).scaleb(-draw.choice((1, 2)))
    amount = f"{format(value.normalize(), 'f')} {names[-1]}"
    return Item(
        pick(draw, _UNIT_ASKS).format(amount, small_name), f"{scaled(value, factor)} {small}", 24
    )
