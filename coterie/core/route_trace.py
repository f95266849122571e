"""Why a request was routed as it was: features, candidates and scores, as values that can be told.

Knows no index and no weights; the router fills it in, the API and `coterie router explain` show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Candidate:
    """One adapter that was looked at, and what became of it."""

    # name@version
    name: str
    digest: str
    # each 0 to 1: of the prompt with the adapter, its rate of valid answers, room left in memory
    similarity: float
    success: float
    memory: float
    # weighted sum, and the calibrated chance that this adapter is the right one
    score: float
    probability: float
    chosen: bool
    # "chosen", "below threshold", "incompatible with x", "excluded", "does not fit" ...
    why: str


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """One decision, told. Times are milliseconds, by stage."""

    task_type: str
    # ISO 639-1, or "und"
    language: str
    # named features that are not texts of the caller: has_json, has_code, code_language, length ...
    features: Mapping[str, str | float | bool] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    threshold: float = 0.0
    # what could not be done as wished: "dropped x: ..." ; told to the caller
    degraded: tuple[str, ...] = ()
    timings_ms: Mapping[str, float] = field(default_factory=dict)
