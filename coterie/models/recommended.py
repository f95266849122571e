"""Finds what the authors of a model recommend: the table is in recommended.toml.

A model is known by what its files say it is: `general.name`, the base model's name and the like in
a GGUF file, `_name_or_path` in config.json, or the repository that it was fetched from. The name
of a file or folder, which anybody may choose, does not count.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from coterie.core.sampling import NO_RECOMMENDATION, ModelRecommendation
from coterie.weights.files import read_json
from coterie.weights.sources.source import SOURCE_FILE

TABLE = Path(__file__).with_name("recommended.toml")

# how GGUF files name a model; the last ones say what it was made from
_GGUF_NAMES = ("general.name", "general.base_model.0.name", "general.base_model.0.repo_url")
# which together are a name as well
_GGUF_PARTS = ("general.basename", "general.size_label", "general.finetune")


@dataclass(frozen=True, slots=True)
class RecommendedModel:
    """One entry of the table."""

    match: re.Pattern[str]
    recommendation: ModelRecommendation


@cache
def recommended_models() -> tuple[RecommendedModel, ...]:
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["models"]
    return tuple(
        RecommendedModel(re.compile(entry.pop("match")), ModelRecommendation(**entry))
        for entry in entries
    )


def recommended_for(names: Iterable[str]) -> ModelRecommendation:
    """For the first name that the table has."""
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower())
        for model in recommended_models():
            if model.match.search(plain):
                return model.recommendation
    return NO_RECOMMENDATION


def gguf_names(path: Path, metadata: Mapping[str, Any]) -> list[str]:
    own, *bases = (_text(metadata.get(key)) for key in _GGUF_NAMES)
    parts = " ".join(filter(None, (_text(metadata.get(key)) for key in _GGUF_PARTS)))
    return [own, parts, *fetched_from(path.parent), *bases]


def directory_names(path: Path) -> list[str]:
    config = path / "config.json"
    named = read_json(config).get("_name_or_path") if config.exists() else ""
    return [_text(named), *fetched_from(path)]


def fetched_from(folder: Path) -> list[str]:
    """The repository or package that `coterie pull` fetched this folder's model from."""
    file = folder / SOURCE_FILE
    return [_text(read_json(file).get("source"))] if file.exists() else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
