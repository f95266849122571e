"""Held-out sentences: other facts, mostly other keys, and other names than in the training data."""

from __future__ import annotations

import random
from typing import Any

from examples.expert_data.base import Item, pick

_PEOPLE = (
    "Priya Raman", "Tom Whitfield", "Marisol Vega", "Henrik Dahl", "Chen Wei", "Fatima Noor",
    "Oliver Grant", "Sofia Marchetti", "Kwame Mensah", "Ingrid Holm", "Ravi Patel", "Louise Blanc",
    "Dmitri Volkov", "Aisha Bello", "Gareth Pryce", "Naomi Sato",
)  # fmt: skip
_PLACES = (
    "Lisbon", "Kyoto", "Nairobi", "Montreal", "Ghent", "Tallinn", "Valencia", "Bristol", "Lima",
    "Cork",
)  # fmt: skip
_SETS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"patient": _PEOPLE, "doctor": _PEOPLE, "room": range(101, 499)}, (
        "Dr. {doctor} will see {patient} in room {room} after lunch.",
        "Please bring {patient} to room {room}, where doctor {doctor} is waiting.")),
    ({"sender": _PEOPLE, "recipient": _PEOPLE, "weight": range(2, 40)}, (
        "A parcel weighing {weight} kilos went from {sender} to {recipient} this morning.",
        "{recipient} just picked up the {weight} kg box that {sender} had posted.")),
    ({"band": ("Iron Larks", "Velvet Moth", "The Quarrymen", "Blue Parade", "Night Ferry"),
      "venue": ("Apollo Hall", "Red Barn", "Union Chapel", "Harbour Stage"),
      "tickets": range(150, 9000)}, (
        "Fans bought {tickets} tickets to hear {band} play the {venue}.",
        "With {tickets} tickets gone, {band} are ready for their night at {venue}.")),
    ({"teacher": _PEOPLE, "subject": ("algebra", "Latin", "biology", "woodwork", "geography"),
      "students": range(8, 35)}, (
        "This term {teacher} is teaching {subject} to a class of {students} students.",
        "There are {students} students enrolled in {subject}, taught by {teacher}.")),
    ({"film": ("Glass Harbour", "The Long Drive", "Ember", "Paper Kings", "Northbound"),
      "director": _PEOPLE, "length": range(75, 190)}, (
        "{director} directed {film}, which runs for {length} minutes.",
        "Critics loved {film}: {length} minutes of tension from director {director}.")),
    ({"guest": _PEOPLE, "hotel": ("Hotel Aurora", "The Lakeside", "Grand Meridian", "Inn Nova"),
      "nights": range(2, 15)}, (
        "We have booked {guest} into {hotel} for {nights} nights.",
        "{hotel} confirms a stay of {nights} nights for {guest}.")),
    ({"name": _PEOPLE, "age": range(19, 80), "city": _PLACES}, (
        "Our newest member, {name}, joined from {city} shortly after turning {age}.",
        "Born in {city} some {age} years ago, {name} still loves the sea.")),
    ({"name": _PEOPLE, "email": ("info@larkspur.io", "hello@bluefin.dev", "desk@oakmont.co.uk",
                                  "support@tinwhistle.app", "press@marlowe.fm"),
      "phone": ("555-0142", "555-0178", "555-0103", "555-0199", "555-0161")}, (
        "For press questions ask {name} ({email}, mobile {phone}).",
        "If the line {phone} is busy, mail {email} and {name} will answer.")),
    ({"item": ("kayaks", "tents", "lanterns", "sleeping bags", "ropes"), "quantity": range(2, 40),
      "price": (12.5, 89.99, 45.25, 150.75, 7.1, 33.5)}, (
        "Our club needs {quantity} {item}, and the quote says {price} dollars apiece.",
        "Could you reserve {quantity} {item}? We saw them for {price} online.")),
)  # fmt: skip
_ASKS = (
    "Pull the following out of the message below and reply with one JSON object only: {keys}.\n\n"
    "Message: {text}",
    "{text}\n\nRepresent this as a JSON object whose keys are {keys}, nothing more.",
)


def items(seed: int = 1909) -> list[Item]:
    draw = random.Random(seed)
    unique: dict[str, Item] = {}
    while len(unique) < 180:
        fields, templates = _SETS[len(unique) % len(_SETS)]
        values = {key: pick(draw, pool) for key, pool in fields.items()}
        if len(set(values.values())) < len(values):
            continue
        text = pick(draw, templates).format(**values)
        keys = draw.sample(sorted(values), len(values))
        keys = keys if draw.random() < 0.6 else keys[:2]
        asked = pick(draw, _ASKS).format(keys=" / ".join(keys), text=text)
        unique.setdefault(text, Item(asked, {key: values[key] for key in keys}, 72))
    return list(unique.values())
