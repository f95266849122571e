"""Values to put into sentences: people, places, names of things, numbers, addresses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from examples.expert_data.base import made_up, pick, words

_FIRST = words(
    """
    Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga Peter Rosa
    Simon Tanja Viktor Wendy Yusuf Zara Amir Bella Carlos Diana Emil
    """
)
_LAST = words(
    """
    Keller Novak Rossi Schmidt Larsen Moreau Ivanov Silva Tanaka Weber Costa Jensen Kowalski Baker
    Murphy Haddad Okafor Lind Petrov Garcia
    """
)
_ADJECTIVES = words(
    """
    Silver Golden Broken Quiet Hidden Northern Little Great Wild Royal Crimson Green Lucky Empty
    First Distant Wooden Bright Frozen Open
    """
)
_NOUNS = words(
    """
    Lake Owls Garden Tower River Foxes Lantern House Mountain Road Dream Theatre Palace Kitchen Wolf
    Harbor Bridge Stone Echo Room Arena Mill
    """
)
_CITIES = words(
    """
    Berlin Madrid Oslo Vienna Dublin Prague Athens Warsaw Helsinki Rome Boston Denver Toronto Sydney
    Lyon Porto Seville Munich
    """
)


def name(draw: random.Random) -> str:
    if draw.random() < 0.25:
        return f"{made_up(draw).title()} {made_up(draw).title()}"
    return (
        f"{pick(draw, _FIRST)} {pick(draw, _LAST)}" if draw.random() < 0.7 else pick(draw, _FIRST)
    )


def proper(draw: random.Random) -> str:
    return made_up(draw).title()


def title(draw: random.Random) -> str:
    """A name of two or three words, as bands, houses and ships have them."""
    front = "The " if draw.random() < 0.25 else ""
    first = pick(draw, _ADJECTIVES) if draw.random() < 0.7 else made_up(draw).title()
    return f"{front}{first} {pick(draw, _NOUNS)}"


def brand(draw: random.Random) -> str:
    return proper(draw) + draw.choice(("", "", " Ltd", " Group", "tech", " & Sons"))


def money(draw: random.Random) -> float:
    return round(draw.randint(2, 400) + draw.choice((0.5, 0.25, 0.99, 0.75, 0.1)), 2)


def mail(draw: random.Random) -> str:
    return f"{made_up(draw)}@{made_up(draw)}.{draw.choice(('com', 'org', 'net'))}"


def phone(draw: random.Random) -> str:
    return f"{draw.randint(200, 999)}-{draw.randint(1000, 9999)}"


def clock(draw: random.Random) -> str:
    return f"{draw.randint(7, 20)}:{draw.choice(('00', '15', '30', '45'))}"


def city(draw: random.Random) -> str:
    return pick(draw, _CITIES) if draw.random() < 0.7 else proper(draw)


def whole(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda draw: draw.randint(low, high)


def of(values: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda draw: pick(draw, values)
