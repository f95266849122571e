"""Shared runs of words between what is learnt and what is held out.

    python -m examples.expert_data.overlap

Words are lower-cased letters and digits; a prompt and its answer count together. Exits with 1 when
a held-out item shares a run of eight words with any training example.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable

from examples.expert_data.table import EXPERTS, Recipe

RUN_WORDS = 8
_WORD = re.compile(r"[^\W_]+")

Run = tuple[str, ...]


def runs(text: str) -> set[Run]:
    words = _WORD.findall(text.lower())
    return {tuple(words[at : at + RUN_WORDS]) for at in range(len(words) - RUN_WORDS + 1)}


def learnt(recipe: Recipe) -> set[Run]:
    return set().union(*(runs(f"{e.prompt} {e.answer}") for e in recipe.examples()))


def held_out(recipe: Recipe) -> set[Run]:
    return set().union(
        *(runs(f"{item.prompt} {_said(item.expected)}") for item in recipe.held_out())
    )


def _said(expected: object) -> str:
    if isinstance(expected, dict) and "sql" in expected:
        return str(expected["sql"])
    if isinstance(expected, dict) and "among" in expected:
        return str(expected["label"])
    return expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False)


def shared(names: Iterable[str] = EXPERTS) -> dict[str, set[Run]]:
    """Per expert, the runs of its held-out items that any expert learns from."""
    recipes = [EXPERTS[name] for name in names]
    wanted = {recipe.name: held_out(recipe) for recipe in recipes}
    found: dict[str, set[Run]] = {recipe.name: set() for recipe in recipes}
    for other in EXPERTS.values():
        seen = learnt(other)
        for name, own in wanted.items():
            found[name] |= own & seen
    return found


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
