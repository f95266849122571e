"""The routing set is what its README says, and the shipped experts are found on its dev part."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.routing import questions as routing_set
from benchmarks.routing.accuracy import cross_validated, routed, router_of, scored
from benchmarks.routing.catalogs import shipped
from benchmarks.routing.questions import Item
from coterie.routing.match.probes import ordinary_prompts


@pytest.fixture(scope="module")
def dev() -> list[Item]:
    return routing_set.read(routing_set.FOLDER / "dev.jsonl")


@pytest.fixture(scope="module")
def near() -> list[Item]:
    return routing_set.read(routing_set.FOLDER / "near_miss_dev.jsonl")


def test_there_is_enough_of_everything(dev: list[Item]) -> None:
    counts = Counter(item.expert for item in dev)
    names = {profile.card.name for profile in shipped()}
    assert counts.keys() == {*names, None}
    assert counts[None] >= 250 and all(counts[name] >= 30 for name in names)
    assert len({(item.prompt, item.body) for item in dev}) == len(dev)


@pytest.mark.parametrize("name", ["dev", "near_miss_dev", "held_out", "near_miss_held_out"])
def test_nothing_of_it_is_learnt_from(name: str) -> None:
    learnt = set(ordinary_prompts())
    for profile in shipped():
        learnt.update(profile.examples, profile.counterexamples)
    items = routing_set.read(routing_set.FOLDER / f"{name}.jsonl")
    asked = {item.prompt for item in items}
    asked |= {f"{item.prompt}\n\n{item.body}" for item in items if item.body}
    assert len(items) >= 270 and not learnt & asked


def test_packages_say_much_about_when_to_use_them() -> None:
    assert len(shipped()) == 7
    for profile in shipped():
        assert len(profile.examples) >= 300 and len(profile.counterexamples) >= 450
        assert profile.decoding == {"temperature": 0.0}


def test_near_misses_are_many_and_of_every_expert(near: list[Item], dev: list[Item]) -> None:
    counts = Counter(item.expert for item in near)
    assert counts.keys() == {*(profile.card.name for profile in shipped()), None}
    assert counts[None] >= 200 and min(counts.values()) >= 15
    learnt = set(ordinary_prompts()) | {item.prompt for item in dev}
    for profile in shipped():
        learnt.update(profile.examples, profile.counterexamples)
    assert not learnt & {item.prompt for item in near}


def test_the_dev_part_is_routed_well(dev: list[Item], near: list[Item]) -> None:
    router, matcher = router_of(shipped())
    plain, missed = cross_validated(scored(matcher, dev), scored(matcher, near))
    found = routing_set.quality_of(plain)
    assert found["related"]["share"] >= 0.96
    assert found["false_activation"]["share"] <= 0.01
    assert found["calibration_error"] <= 0.045
    close = routing_set.quality_of(missed)
    assert close["right"]["share"] >= 0.96
    assert close["wrong_route_confidence"] < 0.72
    # a further expert joins nobody here
    assert routing_set.quality_of(routed(router, [*near, *dev[::2]]))["with_further_experts"] == 0
    whole = routing_set.quality_of(routed(router, dev[::4]))
    assert whole["related"]["share"] >= 0.96
    assert whole["false_activation"]["share"] <= 0.03
