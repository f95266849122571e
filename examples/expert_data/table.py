"""Every expert by name: its training data, its held-out items, and the shape of its adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from examples.expert_data import (
    by_hand,
    commit,
    dates,
    dates_held_out,
    intent,
    json_extract,
    json_extract_held_out,
    sentiment,
    slug,
    slug_held_out,
    sql,
    sql_held_out,
)
from examples.expert_data.base import Example, Item
from examples.expert_training.modules import Shape


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    shape: Shape
    metric: str
    source: Callable[[], Iterator[Example]]
    held_out: Callable[[], list[Item]]
    # the rate with the lowest loss on unseen examples of `source` is used
    rates: tuple[float, ...]
    steps: int
    count: int = 20_000

    def examples(self, count: int | None = None) -> list[Example]:
        """The first `count`, or all; without duplicates."""
        return list(dict.fromkeys(islice(self.source(), count or self.count)))


_LABEL_TEXT = (
    "Read the text. Decide which label fits best: positive, negative or neutral. A text that only "
    "states facts is neutral. Answer with the label alone."
)

EXPERTS = {
    recipe.name: recipe
    for recipe in (
        Recipe("json-extract", Shape("lora"), "json_fields", json_extract.examples,
               json_extract_held_out.items, (1e-3,), 700),
        Recipe("text-to-sql", Shape("dora", rank=3, alpha=6), "sql_result", sql.examples,
               sql_held_out.items, (1e-3,), 700),
        Recipe("sentiment", Shape("soft_prompt", text=_LABEL_TEXT), "label", sentiment.examples,
               by_hand.sentiment_items, (3e-3, 1e-2), 400),
        Recipe("intent", Shape("ia3"), "label", intent.examples,
               by_hand.intent_items, (3e-3, 1e-2), 400),
        Recipe("iso-values", Shape("dora", rank=3, alpha=6), "exact", dates.examples,
               dates_held_out.items, (1e-3,), 700),
        Recipe("commit-header", Shape("lora"), "commit_header", commit.examples,
               by_hand.commit_items, (7e-4,), 600),
        Recipe("url-slug", Shape("lora"), "exact", slug.examples,
               slug_held_out.items, (1e-3,), 600),
    )
}  # fmt: skip
