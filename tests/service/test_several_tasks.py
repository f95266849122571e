"""What judges an answer to two tasks: the check of one expert does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from coterie.core.events import ValidationResult
from coterie.core.plan import RoutePlan
from coterie.core.settings import ValidatorSettings
from coterie.core.snapshot import EnsembleConfig
from coterie.routing.router import Router, Specialist
from coterie.service.finish import answer_context
from coterie.service.plan import RequestRun
from coterie.service.snapshot import ServingSnapshot
from coterie.service.validate.command import ValidatorCommands
from coterie.service.validate.validators import AnswerValidators
from tests.helpers.adapters.profiles import BASE, Answers, Fleet, Matched, asking, profile

JSON, MOOD = (
    profile("json", capabilities=("task:json_parsing",)),
    profile("mood", capabilities=("task:classification",)),
)
ANSWER = '{"name": "Ada"}\n\npositive'


def planned(*matches: Matched) -> tuple[Router, RoutePlan]:
    router = Router(
        [Specialist("base", fingerprint=BASE)], Fleet([JSON, MOOD], Answers([*matches]))
    )
    return router, router.plan(asking("some prompt"))


def judged(router: Router, plan: RoutePlan) -> ValidationResult | None:
    command = ValidatorSettings("strict", ("/bin/false",), experts=("json", "mood"))

    async def main() -> ValidationResult | None:
        commands = ValidatorCommands((command,))
        snapshot = ServingSnapshot(EnsembleConfig(), router, commands)
        # who serves it is not read
        run = RequestRun(asking("some prompt"), plan, cast(Any, None), 0.0, 0.0, snapshot)
        validators = AnswerValidators()
        try:
            return await validators.validate(ANSWER, answer_context(run, "stop"), commands)
        finally:
            await validators.close()

    return asyncio.run(main())


def test_a_check_of_one_expert_does_not_judge_an_answer_to_two_tasks() -> None:
    router, plan = planned(Matched(JSON, 0.8, 0.8, 0.9), Matched(MOOD, 0.3, 0.3, 0.9))
    assert len(plan.adapters) == 2 and plan.trace is not None and plan.trace.has_several_tasks
    found = judged(router, plan)
    assert found == replace(cast(ValidationResult, found), valid=True, validator="generic")


@pytest.mark.parametrize("part", [0.0, 0.9])
def test_it_judges_the_answer_of_that_expert_alone(part: float) -> None:
    router, plan = planned(Matched(JSON, 0.8, 0.8, part), Matched(MOOD, 0.3, 0.3, 0.1))
    assert len(plan.adapters) == 1 and plan.trace is not None
    found = judged(router, plan)
    assert found is not None and not found.valid and found.validator in ("json", "strict")
