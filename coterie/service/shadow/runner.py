"""Runs the request of a shadow and judges its answer. Nothing of it reaches a caller, a receipt,
a quota or the latency figures of the specialist."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from coterie.core.errors import from_code
from coterie.core.events import Delta, Failed, Finished, Started
from coterie.core.request import AdapterHint, InferenceRequest, RouteHints
from coterie.models.grammar.check import GrammarCheck
from coterie.obs.metrics import MetricRegistry
from coterie.service.finish import Finisher
from coterie.service.fleet import Fleet
from coterie.service.meter import RouteMeter
from coterie.service.plan import RequestPlanner
from coterie.service.shadow.dispatch import ShadowTask
from coterie.service.slo.evidence import INVALID, VALID
from coterie.service.submit.submitter import Submitter, assignment

if TYPE_CHECKING:
    from coterie.service.plan import RequestRun
    from coterie.service.slo.evidence import JudgedAnswer

# the tenant of all shadows: they must not use up what a caller may run
SHADOW_TENANT = "shadow"
LOWEST_PRIORITY = 0
# of a shadow's answer; one that would be longer is cut
MAX_TOKENS = 512
# of a shadow's prompt in one step: a primary that comes waits for the step's end
STEP_TOKENS = 8


class ShadowRunner:
    def __init__(
        self, fleet: Fleet, submitter: Submitter, finisher: Finisher, grammars: GrammarCheck
    ) -> None:
        self._fleet, self._submitter = fleet, submitter
        self._finisher, self._grammars = finisher, grammars
        # decisions about shadows are not counted
        self._planner = RequestPlanner(fleet, RouteMeter(MetricRegistry()))

    async def run(self, task: ShadowTask) -> JudgedAnswer | None:
        """What is known about the answer; None if it did not end. Raises if there is none."""
        run = self._planner.plan(task.request, task.vendor, self._fleet.snapshot)
        with self._fleet.catalog.hold(run.plan.adapters) as lease:
            work = await assignment(run, lease.virtual_tokens, self._grammars)
            submitted = await self._submitter.enqueue(run.served, work, is_accepted=True)
            end: Finished | Failed | None = None
            try:
                while end is None:
                    for event in await submitted.events.take():
                        if isinstance(event, Delta):
                            run.read(event)
                        elif isinstance(event, Started):
                            lease.start()
                        else:
                            end = event
            finally:
                submitted.events.end()
                if end is None:
                    await submitted.abort()
        if isinstance(end, Failed):
            raise from_code(end.code, end.message)
        answer = await self._finisher.outcome(run, end)
        task.one_check = await self._is_told_by_one_check(task.primary, run, answer)
        return answer

    async def _is_told_by_one_check(
        self, primary: RequestRun | None, shadow: RequestRun, answer: JudgedAnswer | None
    ) -> bool:
        """Whether the checks that found one of the two answers invalid find the other valid: each
        specialist has checks of its own, and a broken one must not decide for the other."""
        if primary is None or primary.outcome is None:
            return False
        if answer is None or answer.kind not in (VALID, INVALID):
            return False
        is_valid = answer.kind == VALID
        if is_valid == primary.outcome:
            return False
        right, wrong = (shadow, primary) if is_valid else (primary, shadow)
        return await self._finisher.is_valid_for(wrong, "".join(right.texts))


def shadow_request(run: RequestRun, target: str) -> InferenceRequest:
    """The request of `run` for another specialist, as the server's own: at the lowest priority,
    without a deadline and a session."""
    request, plan = run.request, run.plan
    # the sample of a demoted specialist runs with the adapters that the router chose for it
    chosen = run.routed if run.routed is not None and run.routed.specialist == target else None
    adapters = () if chosen is None else chosen.adapters
    hints = RouteHints(
        target,
        tuple(AdapterHint(item.name, item.weight) for item in adapters),
        tune=request.hints.tune or plan.trace is not None,
        instruction=request.hints.instruction,
        document=request.hints.document,
    )
    most = min(run.max_tokens or MAX_TOKENS, MAX_TOKENS)
    limits = replace(
        request.limits,
        priority=LOWEST_PRIORITY,
        timeout_s=None,
        max_running=0,
        is_expected=False,
        step_tokens=STEP_TOKENS,
        max_tokens=most,
        min_tokens=min(request.limits.min_tokens, most),
    )
    # the KV of one tenant's prompts stays apart from that of others
    salt = blake2b(request.tenant.encode(), digest_size=8).hexdigest()
    return replace(
        request,
        id=f"{request.id}-shadow",
        hints=hints,
        limits=limits,
        sampling=replace(request.sampling, n=1, logprobs=None, prompt_logprobs=None),
        session=None,
        tenant=f"{SHADOW_TENANT}+{salt}",
        submitted_at=None,
    )
