"""Runs of words that training data and held-out items have in common.

    python -m examples.expert_data.overlap

Words are lower-cased letters and digits; a prompt and its answer count together. Exits with 1 if
a held-out item shares a run of eight words with any training example.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

from examples.expert_data.table import EXPERTS, Recipe

RUN_WORDS = 8
_WORD = re.compile(r"[^\W_]+")

Run = tuple[str, ...]


def runs(text: str) -> Iterator[Run]:
    words = _WORD.findall(text.lower())
    return zip(*(words[at:] for at in range(RUN_WORDS)), strict=False)


def held_out(recipe: Recipe) -> set[Run]:
    texts = (f"{item.prompt} {_text_of(item.expected)}" for item in recipe.held_out())
    return {run for text in texts for run in runs(text)}


def _text_of(expected: object) -> str:
    if isinstance(expected, dict) and "sql" in expected:
        return str(expected["sql"])
    if isinstance(expected, dict) and "among" in expected:
        return str(expected["label"])
    return expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False)


def shared(count: int | None = None) -> dict[str, set[Run]]:
    """For each expert, the runs of its held-out items that occur in any expert's training data.

    `count`: use only the first `count` examples of each expert.
    """
    held_out_runs = {name: held_out(recipe) for name, recipe in EXPERTS.items()}
    anywhere = set().union(*held_out_runs.values())
    common: set[Run] = set()
    for recipe in EXPERTS.values():
        for example in recipe.examples(count):
            common.update(anywhere.intersection(runs(f"{example.prompt} {example.answer}")))
    return {name: own & common for name, own in held_out_runs.items()}


def main() -> int:
    bad = 0
    for name, own in shared().items():
        print(f"{name:15} {len(EXPERTS[name].held_out()):4} items, {len(own)} shared runs")
        for run in sorted(own)[:5]:
            print("   ", " ".join(run))
        bad += len(own)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
