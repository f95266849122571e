"""service/ensemble.py over real engines: a demotion, its shadows, recovery, and a restart."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coterie.core.config import SpecialistSettings, load
from coterie.core.errors import Conflict, InvalidRequest, NotFound, Overloaded, Saturated
from coterie.core.events import Event, Finished
from coterie.core.request import (
    AdapterHint,
    Chat,
    InferenceRequest,
    Limits,
    Message,
    ResponseFormat,
    RouteHints,
    Sampling,
)
from coterie.core.snapshot import EnsembleConfig
from coterie.routing.classify.traffic import read_traffic
from coterie.routing.match.embed import static
from coterie.service.adapters.admin import InstallName
from coterie.service.build import build
from coterie.service.ensemble import EnsembleService, steer_request
from coterie.service.pipeline import Pipeline
from coterie.service.slo.evidence import whole
from coterie.service.submit.reservations import RetryReservation
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.app_with_experts import adapter
from tests.helpers.serving.server_process import own_home

COUNT = itertools.count()
JSON = ResponseFormat("json_schema", '{"type": "integer", "minimum": 1, "maximum": 9}')
SETTINGS = """
[engine]
kv_bytes = "8MB"
threads = 1
[server]
allow_unsigned = true
[ensemble]
min_judged = 4
breach_s = 0.0
recovery_s = 0.0
shadow_sample = 1.0
fresh_shadow = {fresh}
max_shadows = {shadows}
[[intents]]
name = "query"
[[tenants]]
name = "open"
keep_prompts = true
[[specialists]]
name = "sql"
model = "{model}"
checks = ["json"]
fallback = "spare"
intents = ["query"]
[specialists.slo]
correctness = 0.9
[[specialists]]
name = "spare"
model = "{model}"
checks = ["{check}"]
"""


def config_file(folder: Path, *, fresh: float = 0.0, shadows: int = 2, check: str = "json") -> Path:
    file = folder / "coterie.toml"
    model = tiny_checkpoint("llama")
    file.write_text(SETTINGS.format(model=model, fresh=fresh, shadows=shadows, check=check))
    return file


@pytest.fixture
def ensemble_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of its own, with the compiled kernels of the common home. It goes when all
    tests have ended: the thread that learns experts' probes may still write to it."""
    path = own_home(temporary_folder("coterie-home-"))
    monkeypatch.setenv("COTERIE_HOME", str(path))
    return path


@asynccontextmanager
async def serving(file: Path) -> AsyncIterator[Pipeline]:
    pipeline = build(load(file), inproc=True)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()


def request(*, valid: bool, model: str | None = None, **options: Any) -> InferenceRequest:
    """Tokens of a tiny model are no JSON, unless a schema holds them to it."""
    base = InferenceRequest(
        id=f"ensemble-{next(COUNT)}",
        prompt=Chat((Message("user", "How many users are there?"),)),
        sampling=Sampling(temperature=0.0),
        limits=Limits(max_tokens=None if valid else 4, ignore_eos=not valid, stop=("\n\n\n",)),
        hints=RouteHints(model),
        response_format=JSON if valid else None,
        session=None,
        tenant="open",
        arrived_at=time.monotonic(),
    )
    return replace(base, **options)


async def answered(pipeline: Pipeline, asked: InferenceRequest) -> tuple[str, Finished]:
    """(who answered, the end)."""
    plans: list[Any] = []
    events: list[Event] = [event async for event in pipeline.handle(asked, on_plan=plans.append)]
    assert isinstance(events[-1], Finished)
    return plans[-1].specialist, events[-1]


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def run(test: Awaitable[None]) -> None:
    async def whole() -> None:
        await test

    asyncio.run(whole())


def counts(pipeline: Pipeline, name: str) -> dict[str, float]:
    """The series of a metric, by labels."""
    found = {}
    for line in pipeline.metrics_text().splitlines():
        if line.startswith(name + "{"):
            labels, _, value = line.partition(" ")
            found[labels[len(name) :]] = float(value)
    return found


def has_count(pipeline: Pipeline, series: str, count: int) -> bool:
    return counts(pipeline, "coterie_shadows_total").get(series) == count


def has_shadows(pipeline: Pipeline) -> bool:
    """Whether any runs or waits."""
    shadows = pipeline.ensemble.status()["shadows"]
    return bool(shadows["running"] or shadows["waiting"])


async def bad_answers(pipeline: Pipeline, count: int = 4) -> None:
    """A validator does not judge an answer that the caller's limit cut, so there is none here."""
    for _ in range(count):
        asked = request(valid=False)
        limits = replace(asked.limits, max_tokens=None, context_size=48)
        await answered(pipeline, replace(asked, limits=limits))


def test_a_bad_specialist_is_replaced_shadowed_and_comes_back(ensemble_home: Path) -> None:
    file = config_file(ensemble_home)

    async def first() -> None:
        async with serving(file) as pipeline:
            control = pipeline.ensemble.control
            for _ in range(5):
                assert (await answered(pipeline, request(valid=True, model="spare")))[0] == "spare"
            assert control.watches["spare"].is_known(control.now)
            await bad_answers(pipeline)
            assert control.watches["sql"].breaker.state == "shadow_only"
            planned = pipeline.plan(request(valid=True))
            assert (planned.plan.specialist, planned.plan.shadow) == ("spare", "sql")
            assert "in place of sql" in planned.plan.reasons[-1]
            planned.lease.__exit__(None, None, None)
            # named, it answers
            who, _ = await answered(pipeline, request(valid=True, model="sql"))
            assert who == "sql"

    async def second() -> None:
        """A restart keeps the state; the shadows' answers are good now."""
        async with serving(file) as pipeline:
            control = pipeline.ensemble.control
            assert control.watches["sql"].is_demoted
            shown = {item["specialist"]: item for item in pipeline.ensemble.report()}
            assert shown["sql"]["correctness"]["judged"] >= 4
            assert shown["spare"]["ttft"]["count"] == 5
            before = shown["spare"]["requests"]
            served = 0
            while control.watches["sql"].is_demoted:
                assert served < 20
                who, _ = await answered(pipeline, request(valid=True))
                served += 1
                assert who == "spare"
                await until(lambda: not has_shadows(pipeline))
            assert (await answered(pipeline, request(valid=True)))[0] == "sql"
            shadows = counts(pipeline, "coterie_shadows_total")
            assert shadows['{model_name="sql",result="agreed"}'] >= 3
            # a shadow is in no figure of what callers got
            shown = {item["specialist"]: item for item in pipeline.ensemble.report()}
            assert shown["spare"]["requests"] == before + served
            assert shown["sql"]["ttft"]["count"] <= 8
            kinds = [item["kind"] for item in await pipeline.ensemble.audit(50)]
            assert kinds[:2] == ["breaker_reset", "breaker_tripped"]
            header = pipeline.ensemble.slo_header("sql")
            assert "ttft_p95=" in header and "correctness=" in header

    run(first())
    run(second())


async def disagreed(
    pipeline: Pipeline, tenant: str, number: int, checked: ResponseFormat = JSON
) -> None:
    """The `number`th request whose primary's answer is said to be bad, by its check `checked`, and
    whose shadow's is good."""
    asked = request(valid=True, tenant=tenant)
    asked = replace(asked, hints=replace(asked.hints, intent="query"))
    planned = pipeline.plan(asked)
    planned.run.plan = replace(planned.plan, shadow="spare")
    planned.run.outcome, planned.run.response_format = False, checked
    planned.lease.__exit__(None, None, None)
    pipeline.ensemble.answered(planned.run, planned.vendor)
    await until(partial(has_count, pipeline, '{model_name="spare",result="disagreed"}', number))


def test_disagreements_become_labelled_prompts(ensemble_home: Path) -> None:
    """One check finds the primary's answer invalid and its shadow's valid, while the primary is
    healthy: only tenants that allow it have their prompts kept."""
    file = config_file(ensemble_home, fresh=1.0, check="json")

    async def test() -> None:
        async with serving(file) as pipeline:
            # both fresh: each request of sql is shadowed by spare; both are valid
            await answered(pipeline, request(valid=True))
            await until(lambda: counts(pipeline, "coterie_shadows_total"))
            assert counts(pipeline, "coterie_shadows_total") == {
                '{model_name="spare",result="agreed"}': 1.0
            }
            # too little is known of the primary: its faults teach nothing yet
            await disagreed(pipeline, "open", 1)
            # a fault of a healthy primary is a label; only the first tenant's prompt may stay
            for number, tenant in enumerate(("open", "closed"), 2):
                for _ in range(4):
                    await answered(pipeline, request(valid=True, model="sql"))
                await disagreed(pipeline, tenant, number)
            # the check that found the primary's answer invalid finds its shadow's invalid too
            for _ in range(4):
                await answered(pipeline, request(valid=True, model="sql"))
            await disagreed(pipeline, "open", 4, ResponseFormat("json_schema", '{"type": "null"}'))
            assert counts(pipeline, "coterie_calibration_labels_total") == {
                '{model_name="sql",result="unhealthy"}': 1.0,
                '{model_name="sql",result="written"}': 2.0,
                '{model_name="sql",result="other_checks"}': 1.0,
            }
            await pipeline.ensemble.keep_changes()

    run(test())
    [path] = ensemble_home.rglob("calibration.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept, hashed = (line for line in lines if "specialist" in line)
    assert kept["specialist"] == "spare" and kept["primary"] == "sql"
    assert kept["prompt"] == "How many users are there?"
    assert "prompt" not in hashed and "users" not in json.dumps(hashed) and hashed["input"]
    assert path.stat().st_mode & 0o077 == 0
    # as `coterie router train` reads it
    items = read_traffic([path], static())
    assert [item.label for item in items] == ["spare", "spare"]


def test_a_caller_judges_what_no_check_judged(ensemble_home: Path) -> None:
    """An answer that was cut at its limit is not judged by a check; its caller may."""
    file = config_file(ensemble_home, shadows=0)

    async def test() -> None:
        async with serving(file) as pipeline:
            control, records = pipeline.ensemble.control, pipeline.records

            def known() -> tuple[int, int]:
                rate = control.watches["sql"].breaker.window.rate(control.now)
                return rate.valid, rate.judged

            def is_cut() -> InferenceRequest:
                """Under a limit that leaves room: a verdict under a lower one says little."""
                asked = request(valid=False)
                return replace(asked, limits=replace(asked.limits, max_tokens=16))

            cut, whole = is_cut(), request(valid=True)
            for asked in (cut, whole):
                assert (await answered(pipeline, asked))[0] == "sql"
            assert known() == (1, 1)
            # a verdict does not change what a check found
            await records.feedback(whole.id, "open", good=False)
            assert known() == (1, 1)
            with pytest.raises(NotFound):
                await records.feedback(cut.id, "another", good=False)
            await records.feedback(cut.id, "open", good=False)
            with pytest.raises(Conflict):
                await records.feedback(cut.id, "open", good=True)
            assert known() == (1, 2)
            for _ in range(4):
                await answered(pipeline, request(valid=True, model="spare"))
            low = request(valid=False)
            await answered(pipeline, low)
            await records.feedback(low.id, "open", good=False)
            assert known() == (1, 2)
            for _ in range(6):
                asked = is_cut()
                await answered(pipeline, asked)
                await records.feedback(asked.id, "open", good=False)
            assert control.watches["sql"].breaker.state == "shadow_only"

    run(test())


def test_primaries_come_first(ensemble_home: Path) -> None:
    """While a primary runs no shadow does; one that runs is aborted and starts again."""
    file = config_file(ensemble_home, fresh=1.0)

    async def test() -> None:
        async with serving(file) as pipeline:
            ensemble = pipeline.ensemble
            seen: list[int] = []
            shadows = ensemble._shadows
            assert shadows is not None
            asked = request(valid=False)
            asked = replace(asked, limits=replace(asked.limits, max_tokens=60))
            first = pipeline.handle(asked)
            async for _ in first:
                pass
            await until(lambda: shadows.num_running)
            # its own engine: the shadow has to go
            async for _ in pipeline.handle(request(valid=False)):
                seen.append(shadows.num_running)
            assert seen[-1] == 0
            await until(lambda: not shadows.num_running and not shadows.num_waiting)
            found = counts(pipeline, "coterie_shadows_total")
            assert sum(found.values()) == 2

    run(test())


@pytest.mark.full
def test_no_shadows_if_none_may_run(ensemble_home: Path) -> None:
    file = config_file(ensemble_home, fresh=1.0, shadows=0)

    async def test() -> None:
        async with serving(file) as pipeline:
            await answered(pipeline, request(valid=True))
            assert not counts(pipeline, "coterie_shadows_total")

    run(test())


@pytest.mark.full
def test_a_spike_lets_those_in_who_were_told_to_come(ensemble_home: Path) -> None:
    """The place that a 429 reserved is not refused by the third step of a spike, and is no way
    round it for more requests than there are places."""
    file = config_file(ensemble_home)

    async def test() -> None:
        async with serving(file) as pipeline:
            # what opens in the background is open before the server closes
            await pipeline.batches.page("open", "openai", None, 1)
            busy = pipeline.ensemble.control.watches["spare"].spike

            def may_come(tenant: str = "open") -> bool:
                # nobody waits for anything in here, so no tick looks at the load
                now = pipeline.ensemble.control.now
                busy.level, busy.load = 3, 2.0
                for _ in range(100):
                    busy.demand.add(9, "urgent", 1.0, now)
                asked = request(valid=True, model="spare", tenant=tenant)
                try:
                    pipeline.plan(asked).lease.__exit__(None, None, None)
                except Overloaded as refused:
                    assert refused.param == "priority"
                    return False
                return True

            assert not may_come()
            now = time.monotonic()
            book = pipeline.fleet.find("spare").replicas.shared.reservations
            priority = request(valid=True).limits.priority
            for key in (1, 2):
                place = RetryReservation(key, "e0r0", "open", priority, now - 1, now)
                assert book.add(place, now)
            assert not may_come("other")
            assert [may_come("open+salt"), may_come(), may_come()] == [True, True, False]

    run(test())


def test_the_operator(ensemble_home: Path) -> None:
    file = config_file(ensemble_home)

    async def test() -> None:
        async with serving(file) as pipeline:
            control = pipeline.ensemble.control
            control.demote("sql", "ann", "bad release")
            with pytest.raises(Conflict):
                control.demote("sql", "ann")
            # nothing is known about the fallback, and the base is the one that is demoted
            with pytest.raises(Saturated, match="no other specialist"):
                pipeline.plan(request(valid=True))
            for _ in range(4):
                await answered(pipeline, request(valid=True, model="spare"))
            assert (await answered(pipeline, request(valid=True)))[0] == "spare"
            control.restore("sql", "ann")
            assert (await answered(pipeline, request(valid=True)))[0] == "sql"
            spike = control.watches["sql"].spike
            # others, at the default priority, send much more than it can do
            spike.level, spike.load = 3, 1.5
            for _ in range(99):
                spike.demand.add(5, "others", 1.0, control.now)
            low = request(valid=True)
            low = replace(low, limits=replace(low.limits, priority=2))
            with pytest.raises(Overloaded):
                pipeline.plan(low)
            rejected = counts(pipeline, "coterie_rejections_total")
            assert rejected['{model_name="sql",code="overloaded"}'] == 1

    run(test())


def test_whether_a_version_can_be_judged_is_read_from_the_settings_of_now() -> None:
    """A reload gave its specialist checks, and no request came since: it must be a canary."""
    plain = SimpleNamespace(answer_pattern="", response_format=None)
    settings = {"sql": SpecialistSettings(checks=("json",))}
    fleet = SimpleNamespace(
        catalog=SimpleNamespace(profile=lambda card: plain),
        router=SimpleNamespace(fits=lambda card: ("sql",)),
        snapshot=SimpleNamespace(config=EnsembleConfig(specialists=settings)),
    )
    service = EnsembleService(cast(Any, fleet), cast(Any, None))
    assert service._is_judged(cast(Any, None))
    settings.clear()
    assert not service._is_judged(cast(Any, None))


def test_only_stacks_that_the_caller_did_not_choose_count_for_a_specialist(
    ensemble_home: Path,
) -> None:
    """A tenant that asks for a staged version, or for a stack of its own, or against an expert,
    says nothing about the specialist: not by its answers, nor by its verdicts on them."""
    file = config_file(ensemble_home, shadows=0)

    async def test() -> None:
        async with serving(file) as pipeline:
            control, records = pipeline.ensemble.control, pipeline.records
            for number in (1, 2):
                name = InstallName("dialect", f"{number}.0.0")
                await pipeline.adapters.install(adapter(seed=number), name, "sql")
            breaker = control.watches["sql"].breaker
            before = breaker.saved()
            stacks: list[dict[str, Any]] = [
                {"model": "dialect@2.0.0"},
                {"model": "sql:dialect"},
                {"hints": RouteHints("sql", (AdapterHint("dialect", 0.5),))},
                {"hints": RouteHints(None, exclude=("dialect",))},
                {"hints": RouteHints(None, max_adapters=0)},
            ]
            for stack in stacks:
                asked = request(valid=True, **stack)
                assert (await answered(pipeline, asked))[0] == "sql"
                cut = request(valid=False, **stack)
                cut = replace(cut, limits=replace(cut.limits, max_tokens=16))
                await answered(pipeline, cut)
                await records.feedback(cut.id, "open", good=False)
            assert breaker.saved() == before
            assert not pipeline.ensemble._labels._health
            await answered(pipeline, request(valid=True))
            await answered(pipeline, request(valid=True, model="sql"))
            assert breaker.window.rate(control.now).judged == 2

    run(test())


@pytest.mark.full
def test_a_canary_of_an_expert_becomes_current_by_itself(ensemble_home: Path) -> None:
    """Two versions of one adapter on a real engine: the second one answers nobody before it is
    promoted, and is a canary because the specialist has checks."""
    file = config_file(ensemble_home)
    folders = [adapter(seed=number) for number in (1, 2)]

    async def test() -> None:
        async with serving(file) as pipeline:
            admin, ensemble = pipeline.adapters, pipeline.ensemble
            for number, folder in enumerate(folders, 1):
                name = InstallName("dialect", f"{number}.0.0")
                await admin.install(folder, name, "sql")
            assert admin.current()["dialect"].version == "1.0.0"
            _, figures = await ensemble.promote("dialect", 0.5, "ann")
            assert figures is not None and figures["label"] == "dialect@2.0.0"
            assert admin.current()["dialect"].version == "1.0.0"
            ran: set[str] = set()
            for _ in range(400):
                asked = request(valid=True, model="dialect")
                planned = pipeline.plan(asked)
                [choice] = planned.plan.adapters
                ran.add(choice.name)
                planned.lease.__exit__(None, None, None)
                if len(ran) < 2:
                    await answered(pipeline, asked)
                ensemble.control.judged(planned.plan, whole(True), steer_request(planned.run))
                if not ensemble.control.canaries.figures():
                    break
            assert ran == {"dialect@1.0.0", "dialect@2.0.0"}
            await until(lambda: admin.current()["dialect"].version == "2.0.0")
            entries = await ensemble.audit(10)
            assert entries[0]["kind"] == "canary_promoted"
            assert entries[0]["details"]["evidence_not_worse"] >= 20
            # a refusal changes nothing
            with pytest.raises(InvalidRequest):
                await ensemble.start_canary("dialect@1.0.0", 0.9, "ann")
            with pytest.raises(NotFound):
                await ensemble.start_canary("dialect@3.0.0", 0.1, "ann")
            assert admin.current()["dialect"].version == "2.0.0"

    run(test())
