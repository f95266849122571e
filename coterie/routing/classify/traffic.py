"""Labelled prompts, one JSON object a line: `{"prompt": "...", "specialist": "..."}`.

`intent` may stand in place of `specialist`; `reject`, `none` and `general` mean that none of the
others should answer. `body` is the prompt's document, `group` its author or source. In place of
`prompt` a line may have `input`, the features that a receipt or the calibration log holds.

Lines of a calibration log are labels that a server found itself. They are refused if one check did
not judge both answers, or if a line says that one of the two specialists was unhealthy then:
`{"unhealthy": "doctor", "since": 1.0, "until": 2.0}`, in seconds since 1970.
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


# what a server writes as `judged`
ONE_CHECK = "one_check"
# why a line is refused
UNHEALTHY, OTHER_CHECKS = "unhealthy", "other_checks"


@dataclass(frozen=True, slots=True)
class RefusedLabel:
    """A line of a calibration log that is not used."""

    # file:line
    place: str
    # one of the two reasons above
    reason: str
    # the specialist that was unhealthy, or that answered first
    specialist: str


@dataclass(frozen=True, slots=True)
class _UnhealthyTime:
    specialist: str
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class _FoundLabel:
    """What a line of a calibration log says about its label."""

    place: str
    primary: str
    shadow: str
    at: float
    judged: str


def read_traffic(paths: Iterable[Path], embedder: Embedder) -> list[LabelledPrompt]:
    """Refuses a file with a line that is not a labelled prompt, and names the line."""
    return read_labels(paths, embedder)[0]


def read_labels(
    paths: Iterable[Path], embedder: Embedder
) -> tuple[list[LabelledPrompt], list[RefusedLabel]]:
    """The same, and the lines that are left out."""
    found: list[tuple[LabelledPrompt, _FoundLabel | None]] = []
    times: list[_UnhealthyTime] = []
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        place = f"{path.name}:{number}"
                        fields = _fields(line, place)
                        if "unhealthy" in fields:
                            times.append(_unhealthy_time(fields, place))
                        else:
                            item = _labelled(fields, place, embedder)
                            found.append((item, _found_label(fields, place)))
                    if len(found) + len(times) > MAX_LINES:
                        raise ConfigError(f"more than {MAX_LINES} prompts", param="data")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}", param="data") from None
    used: list[LabelledPrompt] = []
    refused: list[RefusedLabel] = []
    for item, label in found:
        why = None if label is None else _refusal(label, times)
        if why is None:
            used.append(item)
        else:
            refused.append(why)
    return used, refused


def _refusal(label: _FoundLabel, times: Sequence[_UnhealthyTime]) -> RefusedLabel | None:
    for item in times:
        is_one = item.specialist in (label.primary, label.shadow)
        if is_one and item.since <= label.at <= item.until:
            return RefusedLabel(label.place, UNHEALTHY, item.specialist)
    if label.judged != ONE_CHECK:
        return RefusedLabel(label.place, OTHER_CHECKS, label.primary)
    return None


def _found_label(fields: dict[str, Any], place: str) -> _FoundLabel | None:
    """None for a line that a person wrote."""
    if "primary" not in fields or "shadow" not in fields:
        return None
    primary, shadow = str(fields["primary"]), str(fields["shadow"])
    at = _number(fields, "at", place)
    return _FoundLabel(place, primary, shadow, at, str(fields.get("judged") or ""))


def _unhealthy_time(fields: dict[str, Any], place: str) -> _UnhealthyTime:
    since, until = (_number(fields, name, place) for name in ("since", "until"))
    return _UnhealthyTime(str(fields["unhealthy"]), since, until)


def _number(fields: dict[str, Any], name: str, place: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{place}: `{name}` must be seconds since 1970", param="data")
    return float(value)


def labels_of(items: Sequence[LabelledPrompt]) -> tuple[str, ...]:
    """`reject`, then the others in order."""
    return (REJECT, *sorted({item.label for item in items} - {REJECT}))


def _fields(line: str, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line) if len(line) <= MAX_LINE_CHARS else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: this is no JSON object of reasonable length", param="data")
    return fields


def _labelled(fields: dict[str, Any], place: str, embedder: Embedder) -> LabelledPrompt:
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
