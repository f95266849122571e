"""Short names of models, such as `qwen3:4b`: the table is in names.toml.

A name stands for a source (`hf:` or `pypi:`). Says before anything is fetched whether this version
can open what the name stands for.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from coterie.core.errors import WeightsError

TABLE = Path(__file__).with_name("names.toml")

# what Ollama's clients add to a name that has no tag
_LATEST = "latest"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One entry of the table. What is empty or 0 is not known before the hub was asked."""

    # FAMILY:TAG
    name: str
    source: str
    architecture: str
    file: str = ""
    nbytes: int = 0
    licence: str = ""
    # what this version lacks to open it
    needs: str = ""
    # share of the weights that one token reads
    active: float = 1.0

    @property
    def can_open(self) -> bool:
        """Whether GGUF files of this architecture can be opened by this version."""
        from coterie.weights.formats.gguf_config import ARCHITECTURES

        return self.architecture in ARCHITECTURES


@dataclass(frozen=True, slots=True)
class _NameTable:
    models: dict[str, NamedModel]
    # family -> the name that it means alone
    defaults: dict[str, str]
    better: tuple[NamedModel, ...]


@cache
def _read() -> _NameTable:
    tree = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    models = {entry["name"]: _entry(entry) for entry in tree["models"]}
    defaults = {family: f"{family}:{tag}" for family, tag in tree["defaults"].items()}
    return _NameTable(models, defaults, tuple(models[name] for name in tree["better"]))


def _entry(entry: dict[str, Any]) -> NamedModel:
    return NamedModel(nbytes=entry.pop("bytes", 0), **entry)


def named_models() -> tuple[NamedModel, ...]:
    """The table, in its order."""
    return tuple(_read().models.values())


def better_models() -> tuple[NamedModel, ...]:
    """Models to offer in place of the default one, best first."""
    return _read().better


def find_named(text: str) -> NamedModel | None:
    """The model of a short name; None for any other text."""
    table, name = _read(), text.strip().lower().removesuffix(f":{_LATEST}")
    return table.models.get(table.defaults.get(name, name))


def short_name(source: str) -> str:
    """The short name of a source, with or without the version that was fetched; "" if it has
    none."""
    bare = source.partition("==")[0]
    return next((model.name for model in named_models() if model.source == bare), "")


def close_names(text: str) -> list[str]:
    """Names that were probably meant, the likeliest first."""
    table = _read()
    known = [*table.defaults, *table.models]
    return difflib.get_close_matches(text.strip().lower(), known, n=3, cutoff=0.6)


def source_of(text: str) -> str:
    """The source that a short name stands for; any other text as it is. A WeightsError for a model
    that cannot be opened: nothing of it is fetched."""
    model = find_named(text)
    if model is None:
        return text
    if not model.can_open:
        raise WeightsError(cannot_open(model))
    return model.source


def cannot_open(model: NamedModel) -> str:
    lacks = f", which needs {model.needs}" if model.needs else ""
    return (
        f"{model.name}: this version cannot open the architecture {model.architecture!r}{lacks}. "
        "Nothing was fetched. Choose another: coterie list --names."
    )
