"""What an adapter is worth for a prompt: similarity, success so far, room in memory, weighted.

    score = w_sim * similarity + w_succ * success + w_mem * memory + 0.1 * (priority - 0.5)

Pure arithmetic over values; decides nothing.
"""

from __future__ import annotations

from coterie.core.adapters import AdapterProfile
from coterie.core.pipeline_settings import RoutingSettings
from coterie.routing.protocols import Outcomes

# verdicts that a prior counts for
PRIOR_VERDICTS = 20
# between an author's priority of 0 and of 1
PRIORITY_SPAN = 0.1


class Scorer:
    """Of one request: `budget_bytes` is the room for adapters, `usual_quality` stands for what a
    package without figures would reach."""

    def __init__(
        self, settings: RoutingSettings, outcomes: Outcomes, usual_quality: float, budget_bytes: int
    ) -> None:
        self._settings, self._outcomes = settings, outcomes
        self._usual, self._budget = usual_quality, budget_bytes

    def worth(self, profile: AdapterProfile, similarity: float) -> tuple[float, float, float]:
        """(success, memory, score)."""
        settings, card = self._settings, profile.card
        prior = self._usual if profile.quality is None else profile.quality
        valid, judged = self._outcomes.rate(card.digest)
        success = smoothed(valid, judged, prior)
        memory = room_left(card.nbytes, self._budget)
        score = (
            settings.similarity_weight * similarity
            + settings.success_weight * success
            + settings.memory_weight * memory
            + PRIORITY_SPAN * (profile.priority - 0.5)
        )
        return success, memory, score


def smoothed(valid: int, judged: int, prior: float) -> float:
    """A rate that begins at `prior` and moves with every verdict: a new adapter is neither buried
    by one failure nor favoured by one success."""
    return (valid + PRIOR_VERDICTS * prior) / (judged + PRIOR_VERDICTS)


def room_left(nbytes: int, budget_bytes: int) -> float:
    """Share of the budget that stays free beside the adapter, 0 where it does not fit."""
    if nbytes >= budget_bytes:
        return 0.0
    return 1.0 - max(nbytes, 0) / budget_bytes
