"""Held-out titles: headlines with other words and other patterns than in the training data."""

from __future__ import annotations

import random

from examples.expert_data.base import Item, pick, words
from examples.expert_data.slug import slug_of

_MOULDS = (
    "{n} Ways to {verb} Your {noun}",
    "What {name} Taught Us About {topic}",
    "{topic} vs. {topic2}: A Beginner's Guide",
    "How {name} Lost {n},000 Dollars on {topic}",
    "Is {topic} Dead? ({year} Edition)",
    "{name}'s {noun} and Other Stories",
    "Don't {verb} That {noun}!",
    "{topic} & {topic2} at Scale",
    "Inside {place}: the {noun} Nobody Sees",
    "{year} in Review -- {topic}, {topic2} and More",
    "{place} to {place2} by {noun}",
    "I Tried to {verb} a {noun} So You Needn't",
    "THE {noun} PROBLEM",
    "{topic} 101",
    "{place}: {n} Hours, {n2} Photos",
)
_VALUES = {
    "verb": words("Declutter Automate Outsmart Restore Photograph Rewire Insulate Debug Knit"),
    "noun": words("Backpack Spreadsheet Aquarium Balcony Motorcycle Podcast Chimney Treehouse"),
    "name": words("Beyoncé Einstein O'Connor Björk Nadal Curie Zoë Tolkien Noémi"),
    "topic": [
        "Remote Work", "Rust", "Kubernetes", "Sleep", "Open Source", "Mortgages", "Crossfit",
        "Machine Learning", "Pottery", "Wi-Fi", "Type Systems", "Beekeeping",
    ],
    "place": words("Reykjavík Bogotá Düsseldorf Lisbon Osaka Genève Kraków Nairobi"),
}  # fmt: skip
_ASKS = (
    'The article is called "{}". What would its URL slug be?',
    "Headline: {}\nReply with just the slug for its web address (lowercase words, hyphens).",
    "I need the hyphenated web slug of this headline, nothing else: {}",
)


def items(seed: int = 1907) -> list[Item]:
    draw = random.Random(seed)
    unique: dict[str, Item] = {}
    while len(unique) < 180:
        title = _title(draw, pick(draw, _MOULDS))
        unique.setdefault(title, Item(pick(draw, _ASKS).format(title), slug_of(title), 40))
    return list(unique.values())


def _title(draw: random.Random, pattern: str) -> str:
    topic, other = draw.sample(_VALUES["topic"], 2)
    place, second = draw.sample(_VALUES["place"], 2)
    return pattern.format(
        n=draw.randint(3, 48),
        n2=draw.randint(100, 999),
        year=draw.randint(2017, 2026),
        verb=pick(draw, _VALUES["verb"]),
        noun=pick(draw, _VALUES["noun"]),
        name=pick(draw, _VALUES["name"]),
        topic=topic,
        topic2=other,
        place=place,
        place2=second,
    )
