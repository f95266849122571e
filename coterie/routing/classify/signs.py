"""Signs in a text that tell similar requests apart: which units an amount is to be written in,
relative dates, time zones, statements that change data, refusals, material without a request.

Each is true or false. The text has a limited length, and no pattern takes more than linear time.
"""

from __future__ import annotations

import re

from coterie.routing.features.instruction import PromptInstruction, words

# length read at each end of a text: a request is before its material or after it
_HEAD_CHARS, _TAIL_CHARS = 300, 150
_MAX_WORDS = 100
_DIGIT = re.compile(r"\d")
# unit -> (dimension, power of ten)
_METRIC = {
    name: (dimension, power)
    for dimension, powers in {
        "length": {"km": 3, "m": 0, "dm": -1, "cm": -2, "mm": -3},
        "mass": {"t": 6, "kg": 3, "g": 0, "mg": -3},
        "volume": {"hl": 2, "l": 0, "dl": -1, "cl": -2, "ml": -3},
        "time": {"h": 3, "min": 1, "s": 0, "ms": -3},
        "power": {"kw": 3, "w": 0, "mw": -3},
        "data": {"tb": 12, "gb": 9, "mb": 6, "kb": 3},
    }.items()
    for name, power in powers.items()
}
_SPELT = {
    "kilomet": "km", "centimet": "cm", "millimet": "mm", "decimet": "dm", "met": "m",
    "kilogram": "kg", "milligram": "mg", "gram": "g", "kilo": "kg", "tonne": "t", "ton": "t",
    "millilit": "ml", "centilit": "cl", "decilit": "dl", "hectolit": "hl", "lit": "l",
    "millisecond": "ms", "second": "s", "minute": "min", "hour": "h",
    "kilowatt": "kw", "milliwatt": "mw", "watt": "w",
}  # fmt: skip
_UNIT = re.compile(
    r"(\d\s?)?\b(?P<long>kilomet|centimet|millimet|decimet|met|kilogram|milligram|gram|tonne|ton"
    r"|millilit|centilit|decilit|hectolit|lit|millisecond|second|minute|hour|kilowatt|milliwatt"
    r"|watt|kilo)(?:er|re|me)?s?\b"
    r"|(\d\s?)(?P<near>km|cm|mm|dm|m|kg|mg|g|t|ml|cl|dl|hl|l|ms|min|s|h|kw|mw|w|tb|gb|mb|kb)\b"
    r"|(?:\bin(?:to)?|\bto|->|→|=|\bas|\bmany|\bmuch|unit:?)\s{0,3}\??\s?(?:the )?"
    r"(?P<far>km|cm|mm|dm|m|kg|mg|g|ml|cl|dl|hl|l|ms|min|s|h|kw|mw|w|tb|gb|mb|kb)\b"
)
_FOREIGN_UNIT = re.compile(
    r"\b(?:inch(?:es)?|feet|foot|ft|yards?|yd|miles?|mph|pounds?|lbs?|ounces?|oz|gallons?|pints?"
    r"|cups?|stones?|acres?|fahrenheit|celsius|kelvin|knots?|teaspoons?|tablespoons?|tsp|tbsp"
    r"|dollars?|euros?|usd|eur|gbp|yen|francs?|km/h|m/s|calories|joules?)\b|°|[$€£¥]"
)
_RELATIVE = re.compile(
    r"\b(?:yesterday|tomorrow|today|ago|from now|weekdays?|day of the week|how long|how old"
    r"|(?:days?|weeks?|months?|years?) (?:after|before|between|later|earlier|until|since|left)"
    r"|(?:minus|plus|add|subtract)|next|between)\b"
)
_ZONE = re.compile(
    r"\b(?:utc|gmt|cet|est|pst|edt|time ?zones?|daylight|unix|epoch|timestamp"
    r"|(?:tokyo|london|paris|berlin|york|local|eastern|pacific) time|time in)\b"
)
_HALF_DAY = re.compile(r"\b(?:am ?/ ?pm|am or pm|12[- ]?h(?:our|r)?|in words|a\.m\./p\.m\.)\b")
_CHANGES = re.compile(
    r"\b(?:insert|inserts|update|updates|delete|deletes|drop|drops|alter|truncate|rename|renames"
    r"|grant|revoke|trigger|index|indexes|migration|create (?:a )?(?:table|view|index)"
    r"|add (?:a |the )?(?:\w+ )?column|raise|procedure)\b"
)
_REFUSES = re.compile(
    r"\b(?:no|not|don'?t|do not|without|instead of|rather than|forget|ignore|skip|never mind"
    r"|leave)\b"
)
_REPLIES = re.compile(
    r"\b(?:reply|respond|response|answer (?:this|the|it|him|her|them)|draft|rewrite|rephrase"
    r"|translate|summari[sz]e|explain|correct|proofread|improve|review this|check)\b"
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# For each pattern: words of which every match has at least one as a whole run of letters. Most
# texts have none of them, and need no search.
_RUN = re.compile(r"[a-z]+")
_UNIT_WORDS = frozenset(
    (
        *(
            name + ending + s
            for name in _SPELT
            for ending in ("", "er", "re", "me")
            for s in ("", "s")
        ),
        *_METRIC,
        # "in km" may be written "inkm"
        *(start + name for start in ("in", "into", "to", "as", "many", "much") for name in _METRIC),
    )
)
_FOREIGN_WORDS = _words(
    "inch inches feet foot ft yard yards yd mile miles mph pound pounds lb lbs ounce ounces oz "
    "gallon gallons pint pints cup cups stone stones acre acres fahrenheit celsius kelvin knot "
    "knots teaspoon teaspoons tablespoon tablespoons tsp tbsp dollar dollars euro euros usd eur "
    "gbp yen franc francs km m calories joule joules"
)
_FOREIGN_MARK = re.compile(r"[°$€£¥]")
_RELATIVE_WORDS = _words(
    "yesterday tomorrow today ago from weekday weekdays day how days week weeks month months year "
    "years minus plus add subtract next between"
)
_ZONE_WORDS = _words(
    "utc gmt cet est pst edt time timezone timezones daylight unix epoch timestamp tokyo london "
    "paris berlin york local eastern pacific"
)
_HALF_DAY_WORDS = _words("am h hour hr words m")
_CHANGE_WORDS = _words(
    "insert inserts update updates delete deletes drop drops alter truncate rename renames grant "
    "revoke trigger index indexes migration create add raise procedure"
)
_REFUSAL_WORDS = _words("no not don dont do without instead rather forget ignore skip never leave")
_REPLY_WORDS = _words(
    "reply respond response answer draft rewrite rephrase translate summarise summarize explain "
    "correct proofread improve review check"
)
NAMES = (
    "smaller unit", "larger unit", "foreign unit", "relative date", "time zone", "half day",
    "changes data", "refuses", "other work", "no request",
)  # fmt: skip


def signs(text: str, request: PromptInstruction) -> tuple[bool, ...]:
    """One for each of NAMES. `request` is the instruction of the text."""
    ends = _ends(text)
    lowered = ends.lower()
    # in ASCII the words that the sketch has read are the same runs, digits and marks
    runs = words(text) if ends is text and text.isascii() else _RUN.findall(lowered)
    lacks = set(runs).isdisjoint
    tokens = request.words[:_MAX_WORDS]
    changes = not _CHANGE_WORDS.isdisjoint(tokens)
    replies = not _REPLY_WORDS.isdisjoint(tokens)
    wish = " ".join(tokens) if changes or replies else ""
    is_foreign = not lacks(_FOREIGN_WORDS) or _FOREIGN_MARK.search(lowered) is not None
    bare = request.opening == "other" and not request.material and "?" not in text
    return (
        *_directions(lowered, has_unit=not lacks(_UNIT_WORDS) or "unit" in lowered),
        is_foreign and _FOREIGN_UNIT.search(lowered) is not None,
        not lacks(_RELATIVE_WORDS) and _RELATIVE.search(lowered) is not None,
        not lacks(_ZONE_WORDS) and _ZONE.search(lowered) is not None,
        not lacks(_HALF_DAY_WORDS) and _HALF_DAY.search(lowered) is not None,
        changes and _CHANGES.search(wish) is not None,
        not lacks(_REFUSAL_WORDS) and _REFUSES.search(lowered) is not None,
        replies and _REPLIES.search(wish) is not None,
        bare and ":" not in text,
    )


def _ends(text: str) -> str:
    if len(text) <= _HEAD_CHARS + _TAIL_CHARS:
        return text
    return f"{text[:_HEAD_CHARS]}\n{text[-_TAIL_CHARS:]}"


def _directions(lowered: str, has_unit: bool = True) -> tuple[bool, bool]:
    """Whether an amount is to be written in a smaller unit, and in a larger one."""
    if not has_unit or _DIGIT.search(lowered) is None:
        return False, False
    given: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for match in _UNIT.finditer(lowered):
        long = match["long"]
        unit = _SPELT[long] if long else match["near"] or match["far"]
        dimension, power = _METRIC[unit]
        has_amount = match["near"] is not None or (long is not None and match[1] is not None)
        (given if has_amount else wanted).setdefault(dimension, power)
    both = given.keys() & wanted.keys()
    smaller = any(wanted[name] < given[name] for name in both)
    return smaller, any(wanted[name] > given[name] for name in both)
