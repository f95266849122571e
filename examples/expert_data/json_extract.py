"""Training data: sentences and their facts as JSON. Any subset of the facts may be requested."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from examples.expert_data.base import Example, made_up, pick, words

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
_CITIES = words(
    """
    Berlin Madrid Oslo Vienna Dublin Prague Athens Warsaw Helsinki Rome Boston Denver Toronto Sydney
    Lyon Porto Seville Munich
    """
)
_THINGS = words(
    """
    lamps chairs notebooks mugs blankets pencils shirts tables batteries cables plates spoons
    umbrellas hats candles bricks
    """
)
_TOPICS = ("the budget", "hiring", "the new logo", "sales figures", "the office move", "security")
_WEEK = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_ROLES = words(
    """
    engineer nurse teacher plumber lawyer driver chemist editor baker pilot
    """
)
_ANIMALS = ["cat", "dog", "parrot", "rabbit", "hamster", "turtle", "horse", "goat"]
_DISHES = ("lentil soup", "apple pie", "fried rice", "mushroom risotto", "bean stew", "pancakes")
_SKIES = ["sunny", "rainy", "cloudy", "windy", "snowy", "foggy"]


def _name(draw: random.Random) -> str:
    if draw.random() < 0.25:
        return f"{made_up(draw).title()} {made_up(draw).title()}"
    return (
        f"{pick(draw, _FIRST)} {pick(draw, _LAST)}" if draw.random() < 0.7 else pick(draw, _FIRST)
    )


def _proper(draw: random.Random) -> str:
    return made_up(draw).title()


def _brand(draw: random.Random) -> str:
    return _proper(draw) + draw.choice(("", "", " Ltd", " Group", "tech", " & Sons"))


def _money(draw: random.Random) -> float:
    return round(draw.randint(2, 400) + draw.choice((0.5, 0.25, 0.99, 0.75, 0.1)), 2)


def _mail(draw: random.Random) -> str:
    return f"{made_up(draw)}@{made_up(draw)}.{draw.choice(('com', 'org', 'net'))}"


def _phone(draw: random.Random) -> str:
    return f"{draw.randint(200, 999)}-{draw.randint(1000, 9999)}"


def _clock(draw: random.Random) -> str:
    return f"{draw.randint(7, 20)}:{draw.choice(('00', '15', '30', '45'))}"


def _city(draw: random.Random) -> str:
    return pick(draw, _CITIES) if draw.random() < 0.7 else _proper(draw)


def _whole(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda draw: draw.randint(low, high)


def _of(values: list[str] | tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda draw: pick(draw, values)


Maker = Callable[[random.Random], Any]
_DOMAINS: tuple[tuple[dict[str, Maker], tuple[str, ...]], ...] = (
    ({"name": _name, "age": _whole(18, 90), "city": _city}, (
        "{name} is {age} years old and lives in {city}.",
        "Meet {name}, aged {age}, from {city}.",
        "In {city} we talked to {name}, who has just turned {age}.",
        "At {age}, {name} moved to {city}.")),
    ({"item": _of(_THINGS), "quantity": _whole(2, 60), "price": _money}, (
        "I would like {quantity} {item} for {price} dollars.",
        "Please send {quantity} {item}; the total is {price} euros.",
        "The shop sold {quantity} {item} at {price} each.",
        "{price} was paid for {quantity} {item}.")),
    ({"topic": _of(_TOPICS), "day": _of(_WEEK), "time": _clock}, (
        "On {day} at {time} we discuss {topic}.",
        "The meeting about {topic} is on {day}, {time}.",
        "{day} {time}: talk on {topic}.",
        "Let us meet at {time} next {day} because of {topic}.")),
    ({"airline": _brand, "origin": _city, "destination": _city}, (
        "{airline} flies from {origin} to {destination}.",
        "The flight to {destination} with {airline} starts in {origin}.",
        "Leaving {origin}, the {airline} plane lands in {destination}.")),
    ({"title": _proper, "author": _name, "year": _whole(1850, 2020)}, (
        "{author} wrote {title} in {year}.",
        "The novel {title} by {author} came out in {year}.",
        "In {year} the book {title} made {author} famous.")),
    ({"name": _name, "role": _of(_ROLES), "company": _brand}, (
        "{name} works as a {role} at {company}.",
        "{company} hired {name} as {role}.",
        "The {role} at {company} is called {name}.")),
    ({"city": _city, "temperature": _whole(1, 39), "condition": _of(_SKIES)}, (
        "It is {condition} in {city} with {temperature} degrees.",
        "{city}: {temperature} degrees, {condition}.",
        "Today {city} has {condition} weather at {temperature} degrees.")),
    ({"pet": _proper, "species": _of(_ANIMALS), "owner": _name}, (
        "{owner} has a {species} called {pet}.",
        "{pet} is the {species} of {owner}.",
        "The {species} {pet} belongs to {owner}.")),
    ({"name": _name, "email": _mail, "phone": _phone}, (
        "Write to {name} at {email} or call {phone}.",
        "{name} can be reached under {phone} and {email}.",
        "Contact: {name}, {email}, {phone}.")),
    ({"dish": _of(_DISHES), "servings": _whole(1, 12), "minutes": _whole(5, 180)}, (
        "This {dish} takes {minutes} minutes and serves {servings}.",
        "For {servings} people, cook the {dish} for {minutes} minutes.",
        "{dish}: {servings} servings, ready in {minutes} minutes.")),
    ({"winner": _proper, "loser": _proper, "points": _whole(1, 120)}, (
        "{winner} beat {loser} by {points} points.",
        "{loser} lost to {winner}, who scored {points}.",
        "With {points} points {winner} won against {loser}.")),
    ({"customer": _name, "invoice": _whole(1000, 99999), "amount": _money}, (
        "Invoice {invoice} for {customer} is {amount} dollars.",
        "{customer} still owes {amount} on invoice {invoice}.",
        "We billed {customer} {amount} under number {invoice}.")),
    ({"street": _proper, "rooms": _whole(1, 9), "rent": _whole(300, 4000)}, (
        "The flat on {street} Street has {rooms} rooms and costs {rent} a month.",
        "{rooms} rooms on {street} Street for {rent}.",
        "Rent is {rent} for the {rooms} rooms at {street} Street.")),
    ({"brand": _brand, "model": _proper, "speed": _whole(20, 300)}, (
        "The {model} by {brand} reaches {speed} km/h.",
        "{brand} says that its {model} drives {speed}.",
        "At {speed} km/h the {brand} {model} is quick.")),
)  # fmt: skip
_NOISE = ("", "", "", "", " Thanks!", " See you.", " That is all.", " More soon.")
_ASKS = (
    "Extract {keys} as JSON.\n{text}",
    "{text}\nGive {keys} as JSON.",
    "JSON with {keys}: {text}",
    "Read: {text}\nJSON keys: {keys}",
    "Find {keys}. Answer in JSON.\n{text}",
    '"{text}" Return JSON with {keys}.',
    "Look at this note and fill in {keys}. Write a JSON object and no other words.\nNote: {text}",
    "{text}\n\nWhat are {keys} here? Put them in a JSON object.",
    "Here is a text: {text}\nTurn it into JSON; the fields are {keys}.",
)


def examples(seed: int = 13) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        makers, templates = pick(draw, _DOMAINS)
        values = {key: make(draw) for key, make in makers.items()}
        text = pick(draw, templates).format(**values) + pick(draw, _NOISE)
        keys = draw.sample(sorted(values), draw.choice((2, 3, 3, 3)))
        asked = pick(draw, _ASKS).format(keys=_listed(draw, keys), text=text[0].upper() + text[1:])
        yield Example(asked, json.dumps({key: values[key] for key in keys}, ensure_ascii=False))


def _listed(draw: random.Random, keys: list[str]) -> str:
    if draw.random() < 0.5:
        return draw.choice((", ", ", ", "; ", " + ")).join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]
