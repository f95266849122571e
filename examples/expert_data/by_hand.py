"""Held-out items written by hand: label, text, and the question around it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from examples.expert_data import commit, intent, sentiment
from examples.expert_data.base import Item, pick

_HERE = Path(__file__).parent
_SENTIMENT = (
    'How does the customer feel in "{}"? Reply with exactly one of these: {}.',
    "{}\n\nDecide on the tone of the comment above. Say only {}.",
)
_INTENT = (
    'A customer writes: "{}" Reply with the fitting category only, which is one of {}.',
    "{}\n\nSort the above customer mail into a category (allowed: {}). Category:",
)
_COMMIT = (
    "Summarise the change below as one Conventional Commits line, form type(scope): subject, "
    "in which type is {}.\n\n{}",
    "Allowed types are {}. Formulate the single-line message type(scope): subject matching this "
    "work log entry: {}",
)


def sentiment_items(seed: int = 911) -> list[Item]:
    return _labelled("sentiment", _SENTIMENT, sentiment.LABELS, random.Random(seed))


def intent_items(seed: int = 912) -> list[Item]:
    return _labelled("intent", _INTENT, intent.LABELS, random.Random(seed))


def _labelled(
    name: str, asks: Sequence[str], labels: Sequence[str], draw: random.Random
) -> list[Item]:
    return [
        Item(
            pick(draw, asks).format(text, _either(draw, labels)),
            {"label": label, "among": list(labels)},
            16,
        )
        for label, text in _lines(name, draw)
    ]


def commit_items(seed: int = 913) -> list[Item]:
    draw = random.Random(seed)
    return [
        Item(
            pick(draw, _COMMIT).format(_either(draw, commit.TYPES), text),
            {"type": kind, "scope": scope},
            40,
        )
        for kind, scope, text in _lines("commit", draw)
    ]


def _lines(name: str, draw: random.Random) -> list[list[str]]:
    lines = (_HERE / f"{name}_held_out.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines]
    draw.shuffle(rows)
    return rows


def _either(draw: random.Random, labels: tuple[str, ...]) -> str:
    order = draw.sample(labels, len(labels))
    return ", ".join(order[:-1]) + " or " + order[-1]
