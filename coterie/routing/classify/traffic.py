"""Labelled prompts, one JSON object a line: `{"prompt": "...", "specialist": "..."}`.

`intent` may stand in place of `specialist`; `reject`, `none` and `general` mean that none of the
others should answer. `body` is the prompt's document, `group` its author or source. In place of
`prompt` a line may have `input`, the features that a receipt or the calibration log holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError, InvalidRequest
from coterie.core.plan import ClassifierInput
from coterie.routing.classify.features import decoded, prompt_input
from coterie.routing.classify.trained import REJECT
from coterie.routing.match.embed import Embedder

REJECT_NAMES = (REJECT, "none", "general")
MAX_LINES = 1_000_000
MAX_LINE_CHARS = 1_000_000
_MAX_LABEL = 64


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    given: ClassifierInput
    label: str
    # identifies the prompt: equal prompts have equal hashes
    hash: int
    # author or source; "" = not known
    group: str = ""


def read_traffic(paths: Iterable[Path], embedder: Embedder) -> list[LabelledPrompt]:
    """Refuses a file with a line that is not a labelled prompt, and names the line."""
    found: list[LabelledPrompt] = []
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        found.append(_labelled(line, f"{path.name}:{number}", embedder))
                    if len(found) > MAX_LINES:
                        raise ConfigError(f"more than {MAX_LINES} prompts", param="data")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}", param="data") from None
    return found


def labels_of(items: Sequence[LabelledPrompt]) -> tuple[str, ...]:
    """`reject`, then the others in order."""
    return (REJECT, *sorted({item.label for item in items} - {REJECT}))


def _labelled(line: str, place: str, embedder: Embedder) -> LabelledPrompt:
    try:
        fields = json.loads(line) if len(line) <= MAX_LINE_CHARS else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: this is no JSON object of reasonable length", param="data")
    label = _label(fields, place)
    group = str(fields.get("group") or "")
    stored = fields.get("input")
    if isinstance(stored, str):
        try:
            given = decoded(stored)
        except InvalidRequest as error:
            raise ConfigError(f"{place}: {error.message}", param="data") from None
        return LabelledPrompt(given, label, input_hash(given), group)
    prompt, body = fields.get("prompt"), fields.get("body") or ""
    if not isinstance(prompt, str) or not isinstance(body, str) or not (prompt or body):
        raise ConfigError(f"{place}: `prompt` must be a text", param="data")
    given = prompt_input(prompt, body, embedder)
    return LabelledPrompt(given, label, input_hash(given), group)


def _label(fields: dict[str, Any], place: str) -> str:
    label = fields.get("specialist", fields.get("intent"))
    if not isinstance(label, str) or not 0 < len(label) <= _MAX_LABEL:
        raise ConfigError(
            f'{place}: `specialist` or `intent` must be a name; "{REJECT}" = none of them',
            param="data",
        )
    return REJECT if label in REJECT_NAMES else label


def input_hash(given: ClassifierInput) -> int:
    data = given.meaning + given.words
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
