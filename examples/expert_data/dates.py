"""Training data: dates, times of day and metric amounts in many forms, with their ISO and SI
forms."""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal

from examples.expert_data.base import Example, pick, words

MONTHS = words(
    """
    January February March April May June July August September October November December
    """
)
# used only in the held-out items
HELD_OUT_YEARS = (1987, 1994, 2003, 2011, 2018, 2026)
_DATE_FORMS = (
    "{d} {month} {y}", "{month} {d}, {y}", "{d}{th} {month} {y}", "the {d}{th} of {month} {y}",
    "{mon} {d} {y}", "{d} {mon} {y}", "{month} {d}{th}, {y}", "{y} {month} {d}", "{d}.{m}.{y}",
    "{dd}.{mm}.{y}", "{d}-{mon}-{y}", "{y}/{mm}/{dd}", "{mon}. {d}, {y}", "{day}, {d} {month} {y}",
    "{MON} {dd} {y}", "{month} {y}, the {d}{th}", "{day} {month} {d}{th} {y}",
)  # fmt: skip
_TIME_FORMS = (
    "{h}:{mm} {ap}", "{h}.{mm} {ap}", "{h}:{mm}{ap}", "{hh}:{mm} {AP}", "{h} {mm} {ap}",
    "{h}:{mm} {part}", "{h}.{mm} {part}", "{mm} past {h} {ap}", "{h}:{mm} {a}. m.",
)  # fmt: skip
_DATE_ASKS = (
    "Date in ISO form: {}", "Write {} as YYYY-MM-DD.", "{}\nISO date?", "ISO 8601 date for {}",
    "Convert to an ISO date: {}", "Normalise the date {}",
    "The form says {}. Give the date as YYYY-MM-DD and nothing else.",
    "She was born on {}. What is that in ISO notation?", "We met on {}. Date, please, as ISO.",
)  # fmt: skip
_TIME_ASKS = (
    "24-hour time: {}", "Write {} as HH:MM.", "{}\n24-hour clock?", "Convert {} to 24-hour time.",
    "Normalise the time {}", "The shop closes at {}. Give the time as HH:MM, 24 hours.",
    "We start at {}. What is that on the 24-hour clock?",
)  # fmt: skip
_UNIT_ASKS = (
    "{} in {}", "Convert {} to {}.", "How many {1} is {0}?", "{}, as {}", "Give {} in {}.",
    "The box shows {}. Write that in {}, number and unit.", "It took {}. How much is it in {}?",
)  # fmt: skip
# unit, its names, base unit, its name, factor
UNITS = (
    ("km", ("km", "kilometres", "kilometers"), "m", "metres", 1000),
    ("cm", ("cm", "centimetres", "centimeters"), "mm", "millimetres", 10),
    ("m", ("m", "metres", "meters"), "cm", "centimetres", 100),
    ("kg", ("kg", "kilograms", "kilos"), "g", "grams", 1000),
    ("l", ("l", "litres", "liters"), "ml", "millilitres", 1000),
    ("t", ("t", "tonnes"), "kg", "kilograms", 1000),
    ("kW", ("kW", "kilowatts"), "W", "watts", 1000),
    ("s", ("s", "seconds"), "ms", "milliseconds", 1000),
)
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def examples(seed: int = 12) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        chance = draw.random()
        make = _date if chance < 0.5 else _time if chance < 0.72 else _unit
        yield make(draw)


def nth(day: int) -> str:
    if day in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def _date(draw: random.Random) -> Example:
    year = draw.choice([y for y in range(1930, 2040) if y not in HELD_OUT_YEARS])
    month, day = draw.randint(1, 12), draw.randint(1, 28 + draw.randint(0, 2))
    day = min(day, 28) if month == 2 else day
    name = MONTHS[month - 1]
    form = pick(draw, _DATE_FORMS)
    text = form.format(
        d=day, dd=f"{day:02}", m=month, mm=f"{month:02}", y=year, th=nth(day), month=name,
        mon=name[:3], MON=name[:3].upper(), day=pick(draw, _DAYS),
    )  # fmt: skip
    return Example(pick(draw, _DATE_ASKS).format(text), f"{year}-{month:02}-{day:02}")


def _time(draw: random.Random) -> Example:
    hour, minute = draw.randint(0, 23), draw.randint(0, 59)
    shown, half = hour % 12 or 12, "am" if hour < 12 else "pm"
    part = "at night" if hour > 20 else "in the evening" if hour > 17 else "in the afternoon"
    text = pick(draw, _TIME_FORMS).format(
        h=shown, hh=f"{shown:02}", mm=f"{minute:02}", ap=half, AP=half.upper(), a=half[0],
        part=part if hour > 11 else "in the morning",
    )  # fmt: skip
    if draw.random() < 0.15:
        minute, text = 0, f"{shown} {half}"
    return Example(pick(draw, _TIME_ASKS).format(text), f"{hour:02}:{minute:02}")


def scaled(value: Decimal, factor: int) -> str:
    text = format((value * factor).normalize(), "f")
    return text


def _unit(draw: random.Random) -> Example:
    _, names, small, small_name, factor = pick(draw, UNITS)
    digits = draw.choice((0, 1, 1, 2, 2, 3))
    value = Decimal(draw.randint(1, 10 ** draw.choice((2, 3, 3, 4)))).scaleb(-digits)
    amount = f"{format(value.normalize(), 'f')} {pick(draw, names)}"
    wanted = small if draw.random() < 0.5 else small_name
    return Example(
        pick(draw, _UNIT_ASKS).format(amount, wanted), f"{scaled(value, factor)} {small}"
    )
