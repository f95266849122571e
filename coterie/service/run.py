"""One request on its road: what was asked, who answers, and when each stage began."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coterie.core.plan import RoutePlan
from coterie.core.request import InferenceRequest, ResponseFormat

if TYPE_CHECKING:
    from coterie.service.roster import ServedSpecialist


@dataclass(slots=True)
class RequestRun:
    request: InferenceRequest
    plan: RoutePlan
    served: ServedSpecialist
    # time.monotonic() when the plan was there, and what deciding took
    routed_at: float
    router_s: float
    # what the answer is held to: the caller's, or that of the adapter alone
    response_format: ResponseFormat | None = None
    # what checking it took
    grammar_s: float = 0.0
    # most tokens of a choice, once the prompt was counted
    max_tokens: int | None = None
    # the prompt as it runs
    prompt_ids: tuple[int, ...] = ()
    # of the first choice, as it came; only where somebody may judge it
    texts: list[str] = field(default_factory=list)

    @property
    def task_type(self) -> str:
        return "" if self.plan.trace is None else self.plan.trace.task_type

    @property
    def may_be_judged(self) -> bool:
        """Some validator may know what the answer must look like."""
        plan = self.plan
        known = self.response_format is not None or plan.trace is not None
        return known or bool(plan.adapters)


def lowered(plan: RoutePlan, asked: int, allowed: int) -> RoutePlan:
    """`plan` that says at which priority it runs, and why."""
    said = f"priority {asked} lowered to {allowed}: this key has no right to more"
    return replace(plan, lowered_priority=allowed, reasons=(*plan.reasons, said))
