"""service/plan.py: what of a stack fits, who goes first, and what a caller is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.core.adapters import AdapterCard, AdapterProfile
from coterie.core.errors import CoterieError
from coterie.core.plan import AdapterChoice, Candidate, RoutePlan, RouteTrace
from coterie.core.request import AdapterHint, Sampling
from coterie.service.pipeline import Pipeline
from coterie.service.plan import AdapterLimits, LeftOutAdapter, left_out, with_left_out
from tests.helpers.serving.routed_pipeline import PROMPTS, answer, ask, install, serving
from tests.helpers.serving.server_process import own_home


def profile(
    name: str, nbytes: int, soft: int = 0, requires: tuple[str, ...] = ()
) -> AdapterProfile:
    card = AdapterCard(name, "1.0.0", f"digest-{name}", "lora", (), soft, nbytes, 0.0)
    return AdapterProfile(card, requires=requires)


def plan_of(*chosen: tuple[AdapterProfile, float]) -> RoutePlan:
    """Composed in this order, scored as told; a score of 0 = nobody scored it."""
    cards = [(item.card, score) for item, score in chosen]
    candidates = tuple(
        Candidate(f"{card.name}@1.0.0", card.digest, 0.5, 0.5, 0.5, score, 0.9, True, "chosen")
        for card, score in cards
        if score
    )
    return RoutePlan(
        request_id="r",
        specialist="tiny",
        adapters=tuple(AdapterChoice(f"{card.name}@1.0.0", card.digest) for card, _ in cards),
        sampling=Sampling(),
        confidence=1.0,
        reasons=(),
        trace=RouteTrace("conversation", "en", candidates=candidates),
    )


def dropped(room: AdapterLimits, *chosen: tuple[AdapterProfile, float]) -> list[str]:
    known = {item.card.digest: item for item, _ in chosen}
    left = left_out(plan_of(*chosen), room, known.get)
    return [item.adapter.name.partition("@")[0] for item in left]


def test_the_lowest_scored_go_first() -> None:
    a, b, c = profile("a", 40), profile("b", 40), profile("c", 40)
    assert dropped(AdapterLimits(120, 100), (a, 0.9), (b, 0.2), (c, 0.5)) == []
    assert dropped(AdapterLimits(119, 100), (a, 0.9), (b, 0.2), (c, 0.5)) == ["b"]
    assert dropped(AdapterLimits(79, 100), (a, 0.2), (b, 0.3), (c, 0.5)) == ["a", "b"]
    assert dropped(AdapterLimits(39, 100), (a, 0.2), (b, 0.3), (c, 0.5)) == ["a", "b", "c"]
    # nobody was scored: who was named first stays
    assert dropped(AdapterLimits(80, 100), (a, 0), (b, 0), (c, 0)) == ["c"]


def test_one_that_is_too_large_takes_nobody_with_it() -> None:
    small, huge = profile("small", 10), profile("huge", 1000)
    assert dropped(AdapterLimits(100, 100), (small, 0.1), (huge, 0.9)) == ["huge"]


def test_what_is_required_stays_with_who_requires_it() -> None:
    needs, base = profile("needs", 40, requires=("base@1.0.0",)), profile("base", 40)
    other = profile("other", 40)
    assert dropped(AdapterLimits(80, 100), (base, 0.0), (needs, 0.9), (other, 0.5)) == ["other"]
    assert dropped(AdapterLimits(79, 100), (base, 0.0), (needs, 0.9), (other, 0.5)) == [
        "base",
        "needs",
    ]


def test_soft_prompts_leave_room_to_answer() -> None:
    soft, plain = profile("soft", 10, soft=30), profile("plain", 10)
    assert dropped(AdapterLimits(100, 32), (soft, 0.9), (plain, 0.5)) == []
    assert dropped(AdapterLimits(100, 31), (soft, 0.9), (plain, 0.5)) == ["soft"]


def test_the_sizes_that_are_told_do_not_fit() -> None:
    """One part in fp32 makes the others fp32: told is the stack as it would be composed."""

    def narrow(name: str, nbytes: int, narrow_bytes: int) -> AdapterProfile:
        return replace(profile(name, nbytes), device_bytes=nbytes, narrow_bytes=narrow_bytes)

    def whys(room: int, *chosen: tuple[AdapterProfile, float]) -> list[str]:
        known = {item.card.digest: item for item, _ in chosen}
        left = left_out(plan_of(*chosen), AdapterLimits(room, 100), known.get)
        return [f"{item.adapter.name}: {item.why}" for item in left]

    lora = narrow("lora", 4_000_000, 2_000_000)
    other = narrow("other", 3_000_000, 1_500_000)
    # it has no narrow form
    ia3 = narrow("ia3", 100_000, 0)
    assert whys(4_000_000, (lora, 0.9), (other, 0.5)) == []
    assert whys(4_000_000, (lora, 0.9), (other, 0.5), (ia3, 0.2)) == [
        "ia3@1.0.0: with it the stack's 7.1 MB do not fit in 4.0 MB (3.5 MB without it)"
    ]
    assert whys(4_000_000, (lora, 0.9), (ia3, 0.95)) == [
        "lora@1.0.0: with it the stack's 4.1 MB do not fit in 4.0 MB (0.1 MB without it)"
    ]
    # sizes that are nearly equal have enough decimals, and one that is too large alone says so
    assert whys(1_999_900, (lora, 0.9)) == ["lora@1.0.0: its 2.0000 MB do not fit in 1.9999 MB"]


def test_a_plan_says_what_was_left_out() -> None:
    a, b = profile("a", 40), profile("b", 40)
    plan = plan_of((a, 0.9), (b, 0.5))
    said = with_left_out(plan, [LeftOutAdapter(plan.adapters[1], "its 9 MB do not fit")])
    assert said.trace is not None and said.trace.degraded == (
        "dropped b@1.0.0: its 9 MB do not fit",
    )
    kept, gone = said.trace.candidates
    assert kept.chosen and not gone.chosen and gone.why == "does not fit: its 9 MB do not fit"
    assert with_left_out(plan, []) is plan


@pytest.fixture
def small_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_HOME", str(own_home(tmp_path / "home")))
    return tmp_path


@pytest.mark.full
def test_a_server_with_little_room_answers_with_fewer(small_home: Path) -> None:
    """59 KB each: two do not fit; by name and by content, and an expert larger than all room."""

    async def prepare(pipeline: Pipeline) -> None:
        await install(pipeline, small_home, "half", seed=3, options={"dtype": "float16", "r": 10})
        await install(pipeline, small_home, "sql", seed=0)
        await install(pipeline, small_home, "haiku", seed=1)
        await install(pipeline, small_home, "dates", seed=2, options={"r": 16})
        await pipeline._fleet.catalog.settled()

    async def test() -> None:
        # what is larger than all room is refused at its installation: there was more room then
        async with serving(**{"adapters.device_bytes": "1MB"}) as pipeline:
            await prepare(pipeline)
        async with serving(**{"adapters.device_bytes": "100KB"}) as pipeline:
            await pipeline._fleet.catalog.settled()
            both = {"adapters": (AdapterHint("haiku"), AdapterHint("sql"))}
            done = await answer(pipeline, ask(hints=both))
            assert done.experts == ["haiku"] and done.end.adapters == done.plan.adapters
            assert done.plan.trace is not None
            (said,) = done.plan.trace.degraded
            assert said.startswith(
                "dropped sql@1.0.0: with it the stack's 0.11 MB do not fit in 0.10"
            )
            # its template, format and values go with it: the plan is that of whoever is left
            assert done.plan.sampling.seed == 1
            large = await answer(pipeline, ask(PROMPTS["dates"]))
            assert large.experts == [] and large.plan.trace is not None
            assert "dropped dates@1.0.0" in large.plan.trace.degraded[0]
            (seen,) = [c for c in large.plan.trace.candidates if c.name == "dates@1.0.0"]
            assert not seen.chosen and seen.why.startswith("does not fit")
            forced = await answer(pipeline, ask(hints={"adapters": (AdapterHint("dates"),)}))
            assert forced.experts == [] and forced.text
            assert "dropped dates@1.0.0" in forced.plan.reasons[-1]
            # small enough in its file; in fp32, as it is computed, it is not
            half = await answer(pipeline, ask(hints={"adapters": (AdapterHint("half"),)}))
            assert half.experts == [] and half.text
            assert 'coterie_degraded_total{model_name="tiny"} 4' in pipeline.metrics_text()
            # a vendor's dialect has no place to say so: exactly what was named, or a refusal
            exact = {"adapters": (AdapterHint("dates"),), "tune": False}
            with pytest.raises(CoterieError, match="room"):
                await answer(pipeline, ask(hints=exact))
            # one that fits is only waited for, while others run on what there is
            names = ["sql", "haiku"] * 4
            many = await asyncio.gather(*(answer(pipeline, ask(PROMPTS[name])) for name in names))
            assert [item.experts for item in many] == [[name] for name in names]
            assert all(item.plan.trace and not item.plan.trace.degraded for item in many)

    asyncio.run(test())
