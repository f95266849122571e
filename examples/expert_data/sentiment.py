"""Training data: short reviews and whether they are positive, negative or neutral."""

from __future__ import annotations

import random
from collections.abc import Iterator

from examples.expert_data.base import Example, pick, words

LABELS = ("positive", "negative", "neutral")
_THINGS = words(
    """
    phone soup hotel movie jacket keyboard taxi salad camera book lamp pizza museum sofa printer
    bakery concert headset backpack dentist cafe blender train course app watch
    """
)
_PARTS = words(
    """
    battery price service taste screen staff sound quality room design size color handle speed menu
    support packaging smell
    """
)
_GOOD = words(
    """
    excellent wonderful superb fantastic lovely great perfect delightful amazing brilliant reliable
    tasty comfortable friendly beautiful
    """
)
_BAD = words(
    """
    terrible awful horrible broken rude dirty disappointing useless noisy bland ugly slow overpriced
    cheap faulty
    """
)
_PLAIN = words(
    """
    blue square new wooden medium-sized standard square-shaped second local grey round two-part
    weekly regular printed
    """
)
_POSITIVE = (
    "The {t} was {g} and the {p} is {g2}.", "I love this {t}, the {p} is {g}.",
    "What a {g} {t}! I will come back.", "{G} {p}, very happy with the {t}.",
    "Best {t} I have had, truly {g}.", "The {p} made my day, a {g} {t}.",
    "I can only recommend the {t}; {g} {p}.", "Never had a problem with this {t}. {G}!",
    "Not bad at all, the {t} turned out {g}.", "My family enjoyed every minute of the {t}.",
    "The {t} works like a charm and the {p} is {g}.", "So glad that I chose this {t}.",
)  # fmt: skip
_NEGATIVE = (
    "The {t} was {b} and the {p} is {b2}.", "I hate this {t}, the {p} is {b}.",
    "What a {b} {t}! Never again.", "{B} {p}, I want my money back for the {t}.",
    "Worst {t} I have had, truly {b}.", "The {p} ruined my day, a {b} {t}.",
    "Stay away from the {t}; {b} {p}.", "Nothing but problems with this {t}. {B}!",
    "Not good at all, the {t} turned out {b}.", "We regretted every minute of the {t}.",
    "The {t} stopped working after a day and the {p} is {b}.", "I wish I had not chosen this {t}.",
)  # fmt: skip
_NEUTRAL = (
    "The {t} is {n} and has a {n2} {p}.", "I bought the {t} on Monday.",
    "This {t} comes in a {n} box.", "The {t} opens at nine and closes at five.",
    "The {p} of the {t} is {n}.", "They moved the {t} to the second floor.",
    "There is one {t} next to the {n} door.", "The {t} arrived on Tuesday with a {n} manual.",
    "It is a {t} with a {n} {p}.", "My sister has the same {t}.",
    "The {t} costs twenty euros and is {n}.", "We used the {t} in the afternoon.",
)  # fmt: skip
_ASKS = (
    "Sentiment (positive, negative, neutral)?\n{}",
    "{}\nPositive, negative or neutral?",
    "Is this review negative, neutral or positive? {}",
    "Classify as neutral, positive or negative: {}",
    'Review: "{}" Answer with one word: positive, neutral or negative.',
    "Somebody wrote: {} Which mood is it, neutral, negative or positive?",
    "What does the writer think? Options are negative, positive, neutral.\n\n{}",
)
_BY_LABEL = dict(zip(LABELS, (_POSITIVE, _NEGATIVE, _NEUTRAL), strict=True))


def examples(seed: int = 15) -> Iterator[Example]:
    draw = random.Random(seed)
    while True:
        label = pick(draw, LABELS)
        text = _sentence(draw, label)
        if draw.random() < 0.3:
            text += " " + _sentence(draw, label if draw.random() < 0.5 else "neutral")
        yield Example(pick(draw, _ASKS).format(text), label)


def _sentence(draw: random.Random, label: str) -> str:
    good, bad, plain = draw.sample(_GOOD, 2), draw.sample(_BAD, 2), draw.sample(_PLAIN, 2)
    return pick(draw, _BY_LABEL[label]).format(
        t=pick(draw, _THINGS), p=pick(draw, _PARTS), g=good[0], g2=good[1], b=bad[0], b2=bad[1],
        n=plain[0], n2=plain[1], G=good[1].capitalize(), B=bad[1].capitalize(),
    )  # fmt: skip
