"""The calibration log: requests on which a primary and its shadow disagreed, labelled with the
specialist whose answer one and the same check found valid. `coterie router train` reads it.

One JSON object a line, bounded in size: the older half is removed when it is full. Holds the
classifier's features; the text of a prompt only if its tenant allows that. A prompt is labelled
only while the primary is healthy. Faults are noticed late, so a line may also say from when to when
a specialist was unhealthy: training refuses the labels of that time.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.plan import RoutePlan
from coterie.core.private_files import private_folder
from coterie.core.receipt import CLOSED
from coterie.core.request import Chat, InferenceRequest, Text
from coterie.core.snapshot import EnsembleConfig
from coterie.routing.classify.features import encoded
from coterie.routing.classify.traffic import ONE_CHECK
from coterie.routing.classify.trained import REJECT
from coterie.service.shadow.policy import SAMPLE
from coterie.service.slo.correctness import wilson

if TYPE_CHECKING:
    from coterie.service.breaker.watch import SpecialistWatch
    from coterie.service.plan import RequestRun
    from coterie.service.shadow.dispatch import ShadowTask

MAX_BYTES = 64 * 10**6
# characters of a prompt that is kept
MAX_PROMPT = 20_000


class CalibrationLog:
    """One thread uses it at a time."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        lines = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        private_folder(self.path.parent)
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


# a specialist that promises nothing is healthy if this share of its answers is valid
USUAL_FLOOR = 0.5
# newest answers of a specialist that are remembered, to find when it became unhealthy
MAX_REMEMBERED = 500


class SpecialistHealth:
    """How the newest judged answers of one specialist were: at least `least` of them must be known,
    and `floor` is the share of them that must be valid."""

    def __init__(self, floor: float, least: int) -> None:
        self.configure(floor, least)
        # (seconds since 1970, valid), oldest first
        self._answers: deque[tuple[float, bool]] = deque(maxlen=MAX_REMEMBERED)
        self._was_bad = False

    def configure(self, floor: float, least: int) -> None:
        self._floor, self._least = floor or USUAL_FLOOR, min(least, MAX_REMEMBERED)

    def add(self, at: float, valid: bool) -> bool:
        """Note an answer. Returns whether it made clear that the specialist is unhealthy."""
        self._answers.append((at, valid))
        newest = self._newest()
        _, highest = wilson(sum(newest), len(newest))
        is_bad = len(newest) == self._least and highest < self._floor
        became_bad, self._was_bad = is_bad and not self._was_bad, is_bad
        return became_bad

    @property
    def is_bad(self) -> bool:
        """Whether its newest answers are certainly below the floor."""
        return self._was_bad

    def is_healthy(self) -> bool:
        """Whether enough of its answers are known, and the newest reach the floor."""
        newest = self._newest()
        return len(newest) == self._least and sum(newest) >= self._floor * len(newest)

    def bad_since(self, now: float) -> float:
        """When its answers became as bad as they are: the time from which on the number of valid
        ones is furthest below the floor. 0 = before all that is remembered."""
        missing = most = 0.0
        since, count = now, 0
        for number, (at, valid) in enumerate(reversed(self._answers), 1):
            missing += self._floor - valid
            if missing > most:
                most, since, count = missing, at, number
        return 0.0 if count and count == len(self._answers) else since

    def _newest(self) -> list[bool]:
        return [valid for _, valid in islice(reversed(self._answers), self._least)]


class CalibrationLabels:
    """Decides which disagreements become labels. `add` takes a line for the log; times are in
    seconds since 1970."""

    def __init__(self, add: Callable[[dict[str, Any]], None]) -> None:
        self._add = add
        # by specialist; empty after a restart, and nothing is labelled until it is filled again
        self._health: dict[str, SpecialistHealth] = {}

    def judged(self, watch: SpecialistWatch, valid: bool, least: int, at: float) -> None:
        """An answer of the specialist was judged by its own checks."""
        floor = watch.settings.slo.correctness
        health = self._health.setdefault(watch.name, SpecialistHealth(floor, least))
        health.configure(floor, least)
        if health.add(at, valid):
            self._add(unhealthy_time(watch.name, health.bad_since(at), at))

    def is_healthy(self, watch: SpecialistWatch, at: float) -> bool:
        """Whether its next fault says something about a prompt: its breaker is closed, and its
        newest answers are as good as promised."""
        health = self._health.get(watch.name)
        return watch.state(at) == CLOSED and health is not None and health.is_healthy()

    def is_bad(self, watch: SpecialistWatch, at: float) -> bool:
        health = self._health.get(watch.name)
        return watch.state(at) != CLOSED or (health is not None and health.is_bad)

    def demoted(self, specialist: str, at: float) -> None:
        """Its breaker has opened."""
        health = self._health.get(specialist)
        self._add(unhealthy_time(specialist, health.bad_since(at) if health else 0.0, at))

    def labelled(
        self, run: RequestRun, task: ShadowTask, at: float, *, primary_is_healthy: bool
    ) -> str:
        """Label the request of a disagreement, if that is sound. Returns what became of it. `at`:
        when the primary had answered."""
        if not task.one_check:
            return "other_checks"
        if not primary_is_healthy:
            return "unhealthy"
        row = disagreement(run, task.target, at)
        if row is None:
            return "not_kept"
        self._add(row)
        return "written"


def unhealthy_time(specialist: str, since: float, until: float) -> dict[str, Any]:
    """The line that makes training refuse labels of this time."""
    # times of labels are rounded to milliseconds
    since, until = round(max(since - 0.001, 0.0), 3), round(until + 0.001, 3)
    return {"unhealthy": specialist, "since": since, "until": until}


def disagreement(run: RequestRun, shadow: str, at: float) -> dict[str, Any] | None:
    """The row for a request of which either the primary's answer was valid or its shadow's, by one
    check. The one whose answer was valid is the right specialist for the prompt. None if it teaches
    nothing, or if nothing of the prompt may be kept."""
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
        # both answers were judged by one check, and the primary was healthy
        "judged": ONE_CHECK,
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
