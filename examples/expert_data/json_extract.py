"""Sentences and the JSON of what they say, to learn from. Any subset of the facts may be asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from examples.expert_data.base import Example, pick, words
from examples.expert_data.json_facts import facts
from examples.expert_data.json_values import (
    brand,
    city,
    clock,
    mail,
    money,
    name,
    of,
    phone,
    proper,
    whole,
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

Maker = Callable[[random.Random], Any]
_DOMAINS: tuple[tuple[dict[str, Maker], tuple[str, ...]], ...] = (
    ({"name": name, "age": whole(18, 90), "city": city}, (
        "{name} is {age} years old and lives in {city}.",
        "Meet {name}, aged {age}, from {city}.",
        "In {city} we talked to {name}, who has just turned {age}.",
        "At {age}, {name} moved to {city}.")),
    ({"item": of(_THINGS), "quantity": whole(2, 60), "price": money}, (
        "I would like {quantity} {item} for {price} dollars.",
        "Please send {quantity} {item}; the total is {price} euros.",
        "The shop sold {quantity} {item} at {price} each.",
        "{price} was paid for {quantity} {item}.")),
    ({"topic": of(_TOPICS), "day": of(_WEEK), "time": clock}, (
        "On {day} at {time} we discuss {topic}.",
        "The meeting about {topic} is on {day}, {time}.",
        "{day} {time}: talk on {topic}.",
        "Let us meet at {time} next {day} because of {topic}.")),
    ({"airline": brand, "origin": city, "destination": city}, (
        "{airline} flies from {origin} to {destination}.",
        "The flight to {destination} with {airline} starts in {origin}.",
        "Leaving {origin}, the {airline} plane lands in {destination}.")),
    ({"title": proper, "author": name, "year": whole(1850, 2020)}, (
        "{author} wrote {title} in {year}.",
        "The novel {title} by {author} came out in {year}.",
        "In {year} the book {title} made {author} famous.")),
    ({"name": name, "role": of(_ROLES), "company": brand}, (
        "{name} works as a {role} at {company}.",
        "{company} hired {name} as {role}.",
        "The {role} at {company} is called {name}.")),
    ({"city": city, "temperature": whole(1, 39), "condition": of(_SKIES)}, (
        "It is {condition} in {city} with {temperature} degrees.",
        "{city}: {temperature} degrees, {condition}.",
        "Today {city} has {condition} weather at {temperature} degrees.")),
    ({"pet": proper, "species": of(_ANIMALS), "owner": name}, (
        "{owner} has a {species} called {pet}.",
        "{pet} is the {species} of {owner}.",
        "The {species} {pet} belongs to {owner}.")),
    ({"name": name, "email": mail, "phone": phone}, (
        "Write to {name} at {email} or call {phone}.",
        "{name} can be reached under {phone} and {email}.",
        "Contact: {name}, {email}, {phone}.")),
    ({"dish": of(_DISHES), "servings": whole(1, 12), "minutes": whole(5, 180)}, (
        "This {dish} takes {minutes} minutes and serves {servings}.",
        "For {servings} people, cook the {dish} for {minutes} minutes.",
        "{dish}: {servings} servings, ready in {minutes} minutes.")),
    ({"winner": proper, "loser": proper, "points": whole(1, 120)}, (
        "{winner} beat {loser} by {points} points.",
        "{loser} lost to {winner}, who scored {points}.",
        "With {points} points {winner} won against {loser}.")),
    ({"customer": name, "invoice": whole(1000, 99999), "amount": money}, (
        "Invoice {invoice} for {customer} is {amount} dollars.",
        "{customer} still owes {amount} on invoice {invoice}.",
        "We billed {customer} {amount} under number {invoice}.")),
    ({"street": proper, "rooms": whole(1, 9), "rent": whole(300, 4000)}, (
        "The flat on {street} Street has {rooms} rooms and costs {rent} a month.",
        "{rooms} rooms on {street} Street for {rent}.",
        "Rent is {rent} for the {rooms} rooms at {street} Street.")),
    ({"brand": brand, "model": proper, "speed": whole(20, 300)}, (
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
    "{text}\nMake a JSON object of it with the fields {keys} and no others.",
    "I need {keys} from the next lines, as JSON, without any comment.\n\n{text}",
    "Fill a JSON object (keys {keys}) from: {text}",
    "Text: {text}\nAnswer with JSON only. Fields wanted: {keys}. Nothing else.",
)


def examples(seed: int = 13) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        if draw.random() < 0.45:
            values, text = facts(draw)
        else:
            makers, templates = pick(draw, _DOMAINS)
            values = {key: make(draw) for key, make in makers.items()}
            text = pick(draw, templates).format(**values) + pick(draw, _NOISE)
        keys = draw.sample(sorted(values), min(len(values), draw.choice((2, 3, 3, 3, 4))))
        asked = pick(draw, _ASKS).format(keys=_listed(draw, keys), text=text[0].upper() + text[1:])
        yield Example(asked, json.dumps({key: values[key] for key in keys}, ensure_ascii=False))


def _listed(draw: random.Random, keys: list[str]) -> str:
    if draw.random() < 0.5:
        return draw.choice((", ", ", ", "; ", " + ")).join(keys)
    return ", ".join(keys[:-1]) + " and " + keys[-1]
