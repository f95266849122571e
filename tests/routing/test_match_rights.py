"""A tenant that may use some of the experts: its prompts are matched with these alone."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.routing.catalogs import Fleet, made_up
from coterie.core.adapters import AdapterProfile
from coterie.routing.features.features import extract
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from coterie.routing.match.matcher import AdapterMatch, Matcher
from coterie.routing.match.probe_store import LearntProbes
from coterie.routing.match.sketch import NUM_BUCKETS
from coterie.routing.router import Router, Specialist
from tests.helpers.adapters.profiles import asking

EMBEDDER = EMBEDDERS[DEFAULT]()
# two tasks
TEXT = "Summarise the report on llamas in one line. Then translate the invoice into French, please."
WORDS = replace(extract(TEXT, ""), words=frozenset({"llamas", "invoice"}))


def learnt(count: int) -> LearntProbes:
    """Of as many experts, at random: what matters is who is compared."""
    rng = np.random.default_rng(3)
    one = Matcher.build(made_up(1), EMBEDDER)
    wide, narrow = one._joint.shape[1], one._short.shape[1]
    return LearntProbes(
        (rng.standard_normal((count, wide)) * 0.3).astype(np.float32),
        (rng.standard_normal((count, narrow)) * 0.3).astype(np.float32),
        rng.integers(-20, 20, (NUM_BUCKETS, count)).astype(np.int8),
        np.full(count, 0.01, np.float32),
    )


def of(probes: LearntProbes, rows: np.ndarray) -> LearntProbes:  # type: ignore[type-arg]
    return LearntProbes(
        probes.joint[rows], probes.short[rows], probes.words[:, rows], probes.scales[rows]
    )


def seen(found: list[AdapterMatch]) -> list[tuple[str, float, float]]:
    return [(m.profile.card.name, round(m.probability, 5), round(m.part, 5)) for m in found]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.01, 0.0])
def test_what_a_tenant_may_not_use_is_not_compared(share: float) -> None:
    profiles, probes = made_up(400), learnt(400)
    profiles = [replace(p, keywords=(f"w{i}", "llamas")) for i, p in enumerate(profiles)]
    every, rng = Matcher(profiles, probes, EMBEDDER), np.random.default_rng(5)
    pairs = 0
    for _ in range(8):
        among = rng.random(400) < share
        rows = np.flatnonzero(among)
        found = every.match(TEXT, WORDS, 10, among)
        if not len(rows):
            assert found == []
            continue
        alone = Matcher([profiles[row] for row in rows], of(probes, rows), EMBEDDER)
        assert seen(found) == seen(alone.match(TEXT, WORDS, 10))
        pairs += any(m.part for m in found)
    # of two tasks each is found also if the likeliest expert of all is not the tenant's
    assert pairs >= 4 or share < 0.1


def fleet(count: int) -> tuple[Router, list[AdapterProfile]]:
    profiles = made_up(count)
    matcher = Matcher(profiles, learnt(count), EMBEDDER)
    return Router([Specialist("base")], Fleet(profiles, matcher)), profiles


def test_rights_cost_a_plan_little() -> None:
    router, profiles = fleet(3000)
    names = tuple(p.card.name for p in profiles)
    free, limited = asking(TEXT), asking(TEXT, allowed_experts=names[1::2])

    def median(request: object) -> float:
        took = []
        for _ in range(41):
            begun = time.thread_time()
            plan = router.plan(request)  # type: ignore[arg-type]
            took.append(time.thread_time() - begun)
        assert plan.trace is not None
        return sorted(took)[20]

    assert median(limited) < 3 * median(free)


def test_rights_are_those_of_the_request_and_of_the_newest_matcher() -> None:
    router, profiles = fleet(200)
    names = [p.card.name for p in profiles]

    def considered(allowed: list[str]) -> set[str]:
        trace = router.plan(asking(TEXT, allowed_experts=tuple(allowed))).trace
        assert trace is not None
        return {c.name.partition("@")[0] for c in trace.candidates}

    odd, even = names[1::2], names[::2]
    for _ in range(2):
        assert considered(odd) and considered(odd) <= set(odd)
        assert considered(even) and considered(even) <= set(even)
    # another expert in the same row
    catalog = Fleet(profiles[::-1], Matcher(profiles[::-1], learnt(200), EMBEDDER))
    router._catalog = catalog
    assert considered(odd) <= set(odd)
