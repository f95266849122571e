"""The calibration log: requests on which a primary and its shadow disagreed, labelled with the
specialist whose answer was valid. `coterie router train` reads it.

One JSON object a line, bounded in size: the older half is removed when it is full. Holds the
classifier's features; the text of a prompt only if its tenant allows that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.plan import RoutePlan
from coterie.core.request import Chat, InferenceRequest, Text
from coterie.core.snapshot import EnsembleConfig
from coterie.routing.classify.features import encoded
from coterie.routing.classify.trained import REJECT
from coterie.service.shadow.policy import SAMPLE

if TYPE_CHECKING:
    from coterie.service.plan import RequestRun

MAX_BYTES = 64 * 10**6
# characters of a prompt that is kept
MAX_PROMPT = 20_000


class CalibrationLog:
    """One thread uses it at a time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        lines = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(handle, "ab") as file:
            file.write(lines[-self._max_bytes :] if len(lines) > self._max_bytes else lines)
            size = file.tell()
        if size > self._max_bytes:
            self._drop_older_half()

    def _drop_older_half(self) -> None:
        data = self.path.read_bytes()
        start = data.find(b"\n", len(data) - self._max_bytes // 2) + 1
        smaller = self.path.with_suffix(".new")
        handle = os.open(smaller, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(handle, "wb") as file:
            file.write(data[start:])
        os.replace(smaller, self.path)


def disagreement(run: RequestRun, shadow: str, at: float) -> dict[str, Any] | None:
    """The row for a request of which either the primary's answer was valid or its shadow's. The
    one whose answer was valid is the right specialist for the prompt. None if it teaches nothing,
    or if nothing of the prompt may be kept."""
    plan, primary = run.plan, bool(run.outcome)
    if primary and run.shadow_why == SAMPLE:
        # a demoted specialist's faults say nothing about who the prompt is for
        return None
    row: dict[str, Any] = {
        "specialist": _label(plan.specialist if primary else shadow, plan, run.snapshot.config),
        "group": "shadow",
        "intent_routed": plan.intent,
        "primary": plan.specialist,
        "primary_valid": primary,
        "shadow": shadow,
        "confidence": plan.confidence,
        "at": round(at, 3),
    }
    if run.tenant is not None and run.tenant.keep_prompts:
        row |= prompt_text(run.request)
    elif plan.trace is not None and plan.trace.classified is not None:
        # numbers and hashes of words in place of the text
        row["input"] = encoded(plan.trace.classified)
    return row if "prompt" in row or "input" in row else None


def _label(right: str, plan: RoutePlan, config: EnsembleConfig) -> str:
    """The router's label for this specialist: an intent that it serves, or its name."""
    if right == next(iter(config.specialists)):
        return REJECT
    settings = config.specialists.get(right)
    intents = () if settings is None else settings.intents
    return plan.intent if plan.intent in intents else next(iter(intents), right)


def prompt_text(request: InferenceRequest) -> dict[str, str]:
    """The caller's instruction and document, as the router's training reads them."""
    hints, prompt = request.hints, request.prompt
    text = hints.instruction
    if not text and isinstance(prompt, Chat):
        text = next((m.content for m in reversed(prompt.messages) if m.role == "user"), "")
    if not text and isinstance(prompt, Text):
        text = prompt.text
    if not text:
        return {}
    body = {"body": hints.document[:MAX_PROMPT]} if hints.document else {}
    return {"prompt": text[:MAX_PROMPT]} | body
