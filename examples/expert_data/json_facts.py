"""Texts in which any noun can be a key: clauses that each say one fact, put together at random."""

from __future__ import annotations

import random
from typing import Any

from examples.expert_data.base import pick, words
from examples.expert_data.json_values import city, clock, mail, money, name, proper, title, whole

_PEOPLE = words(
    """
    manager captain seller buyer tenant coach singer painter witness judge author host driver pilot
    cook client nurse editor founder chairman inventor widow partner assistant speaker sponsor
    """
)
_PLACES = words("city port village district airport destination station campus region border")
_NAMED = words(
    """
    ship album restaurant theatre club project school product brand game novel magazine shop farm
    street team prize journal company course
    """
)
_COUNTED = words(
    """
    rooms pages seats votes bottles boxes members chapters passengers copies trees goals steps
    guests employees horses questions floors tables shares hours points miles
    """
)
_SUMS = words("price fee cost salary rent fine budget discount deposit bonus")
_NUMBERED = words("gate platform seat locker page flight lane ticket order floor desk case")
_ABOUT_PEOPLE = (
    "the {k} is {v}", "{v} is the {k}", "{v} works as the {k}", "{v} was named {k}",
    "the {k}, {v}, was there", "{k} {v} agreed", "{v} acts as {k}", "we met {k} {v}",
)  # fmt: skip
_ABOUT_NAMES = (
    "the {k} is called {v}", "the {k} {v} is well known", "{v} is the name of the {k}",
    "the {k} is {v}", "everybody knows the {k} {v}", "it concerns the {k} {v}",
)  # fmt: skip
_ABOUT_PLACES = (
    "the {k} is {v}",
    "it happened in the {k} {v}",
    "{v} is the {k}",
    "the {k} of {v} is near",
)
_ABOUT_COUNTS = (
    "there are {v} {k}", "it has {v} {k}", "{v} {k} were counted", "a total of {v} {k}",
    "the {k} number {v}", "with {v} {k} in all",
)  # fmt: skip
_ABOUT_SUMS = (
    "the {k} is {v} dollars",
    "the {k} was {v}",
    "{v} euros as the {k}",
    "a {k} of {v}",
)
_ABOUT_NUMBERS = ("{k} {v}", "at {k} {v}", "please go to {k} {v}", "the {k} is {v}", "{k} no. {v}")
_OTHERS = (
    ("email", mail, ("the email is {v}", "write to {v}", "mail goes to {v}", "reachable at {v}")),
    ("time", clock, ("it starts at {v}", "the time is {v}", "be there by {v}", "{v} sharp")),
)
_JOINS = (". ", ". ", ", and ", "; ", ", while ", ". Also, ")


def facts(draw: random.Random) -> tuple[dict[str, Any], str]:
    """What is said, by key, and the text that says it."""
    values: dict[str, Any] = {}
    clauses: list[str] = []
    for _ in range(draw.choice((2, 3, 3, 4))):
        key, value, forms = _fact(draw)
        if key not in values and value not in values.values():
            values[key] = value
            clauses.append(pick(draw, forms).format(k=key, v=value))
    if len(values) < 2:
        return facts(draw)
    text = clauses[0]
    for clause in clauses[1:]:
        join = pick(draw, _JOINS)
        text += join + (clause[0].upper() + clause[1:] if join == ". " else clause)
    return values, text + "."


def _fact(draw: random.Random) -> tuple[str, Any, tuple[str, ...]]:
    kind = draw.randrange(7)
    if kind == 0:
        return pick(draw, _PLACES), city(draw), _ABOUT_PLACES
    if kind == 1:
        return (
            pick(draw, _NAMED),
            title(draw) if draw.random() < 0.7 else proper(draw),
            _ABOUT_NAMES,
        )
    if kind == 2:
        return pick(draw, _COUNTED), whole(2, 9000)(draw), _ABOUT_COUNTS
    if kind == 3:
        return pick(draw, _SUMS), money(draw), _ABOUT_SUMS
    if kind == 4:
        return pick(draw, _NUMBERED), whole(1, 999)(draw), _ABOUT_NUMBERS
    if kind == 5:
        key, make, forms = pick(draw, _OTHERS)
        return key, make(draw), forms
    return pick(draw, _PEOPLE), name(draw), _ABOUT_PEOPLE
