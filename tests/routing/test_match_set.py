"""The routing set is what its README says, and the shipped experts are found: on its dev part, for
their tasks, and for no near miss. Learning them takes long: as a server does,
these tests keep what was learnt, by a digest of the texts and of the code that learns."""

from __future__ import annotations

import time
from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from benchmarks.routing import questions as routing_set
from benchmarks.routing.accuracy import (
    cross_validated,
    experts_of,
    request,
    routed,
    router_of,
    scored,
)
from benchmarks.routing.catalogs import shipped
from benchmarks.routing.questions import Item
from coterie.routing.match.learn import cached_matcher
from coterie.routing.match.matcher import Matcher
from coterie.routing.match.probes import ordinary_prompts
from coterie.weights.home import home

# apart from what servers of other tests learn, of which the newest few stay
LEARNT = home() / "routing" / "shipped"


@pytest.fixture(scope="module")
def dev() -> list[Item]:
    return routing_set.read(routing_set.FOLDER / "dev.jsonl")


@pytest.fixture(scope="module")
def near() -> list[Item]:
    return routing_set.read(routing_set.FOLDER / "near_miss_dev.jsonl")


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return cached_matcher(shipped(), LEARNT)


def test_there_is_enough_of_everything(dev: list[Item]) -> None:
    counts = Counter(item.expert for item in dev)
    names = {profile.card.name for profile in shipped()}
    assert counts.keys() == {*names, None}
    assert counts[None] >= 250 and all(counts[name] >= 30 for name in names)
    assert len({(item.prompt, item.body) for item in dev}) == len(dev)


@pytest.mark.parametrize("name", ["dev", "near_miss_dev", "held_out", "near_miss_held_out"])
def test_nothing_of_it_is_learnt_from(name: str) -> None:
    learnt = learnt_texts()
    items = routing_set.read(routing_set.FOLDER / f"{name}.jsonl")
    asked = {item.prompt for item in items}
    asked |= {f"{item.prompt}\n\n{item.body}" for item in items if item.body}
    assert len(items) >= 270 and not learnt & asked


def learnt_texts() -> set[str]:
    learnt = set(ordinary_prompts())
    for profile in shipped():
        learnt.update(profile.examples, profile.counterexamples)
    return learnt


def test_two_tasks_are_of_every_pair_and_nothing_of_them_is_learnt_from() -> None:
    parts = [
        routing_set.read_two_tasks(routing_set.FOLDER / f"two_tasks_{name}.jsonl")
        for name in ("held_out", "dev")
    ]
    names = {profile.card.name for profile in shipped()}
    pairs = [frozenset(pair) for pair in combinations(sorted(names), 2)]
    for items, least in zip(parts, (60, 63), strict=True):
        counts = Counter(item.experts for item in items)
        assert sum(counts[pair] for pair in pairs) == least and all(counts[pair] for pair in pairs)
        assert sum(counts[frozenset({name})] for name in names) >= 15 and counts[frozenset()] >= 20
        assert len({(item.prompt, item.body) for item in items}) == len(items)
        assert not learnt_texts() & {item.prompt for item in items}
    held_out, dev = ({item.prompt for item in items} for items in parts)
    assert not held_out & dev


def test_packages_say_much_about_when_to_use_them() -> None:
    assert len(shipped()) == 7
    for profile in shipped():
        assert len(profile.examples) >= 300 and len(profile.counterexamples) >= 450
        assert profile.decoding == {"temperature": 0.0}


def test_near_misses_are_many_and_of_every_expert(near: list[Item], dev: list[Item]) -> None:
    counts = Counter(item.expert for item in near)
    assert counts.keys() == {*(profile.card.name for profile in shipped()), None}
    assert counts[None] >= 200 and min(counts.values()) >= 15
    learnt = learnt_texts() | {item.prompt for item in dev}
    assert not learnt & {item.prompt for item in near}


def test_the_dev_part_is_routed_well(dev: list[Item], near: list[Item], matcher: Matcher) -> None:
    router = router_of(shipped(), matcher)
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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Extract brand and price as JSON: the Asus costs 800 euros", "json-extract"),
        ("Table ponds(name, depth). Which pond is deepest? Write SQL.", "text-to-sql"),
        ("Is this comment positive or negative? I want to hug whoever made this.", "sentiment"),
        ("Which support category fits: my parcel went to the wrong city", "intent"),
        ("Write May 6th 2016 as YYYY-MM-DD", "iso-values"),
        ("Conventional commit header for: the clock widget shows seconds", "commit-header"),
        ("Turn this headline into a URL slug: Ducks Stop Traffic", "url-slug"),
    ],
)
def test_a_task_finds_its_expert(matcher: Matcher, text: str, name: str) -> None:
    best, second = matcher.match(text)[:2]
    assert best.profile.card.name == name
    assert best.probability >= matcher.threshold > second.probability
    assert 0.0 <= second.similarity < best.similarity <= 1.0


@pytest.mark.parametrize(
    "text",
    [
        "What is JSON?",
        "Explain SQL joins",
        "When was the treaty signed?",
        "Write a poem about a commit",
        "Is this review helpful to write?",
        "Who invented the refund?",
        "Do slugs have teeth?",
        "",
        "😀",
        "Erzähl mir einen Witz.",
    ],
)
def test_a_near_miss_is_for_nobody(matcher: Matcher, text: str) -> None:
    assert matcher.match(text)[0].probability < matcher.threshold


def test_the_same_text_gives_the_same_matches(matcher: Matcher) -> None:
    again = cached_matcher(shipped(), LEARNT)
    text = "Make a slug of this title: Rain"
    assert matcher.match(text) == matcher.match(text) == again.match(text)


def test_a_long_document_is_not_read_to_its_end(matcher: Matcher) -> None:
    wish, tail = "Sentiment, positive or negative? " + "It broke at once. " * 60, "Bye. " * 80
    begun = time.thread_time()
    long = matcher.match(wish + "word " * 400_000 + tail)
    assert time.thread_time() - begun < 0.5
    assert long == matcher.match(wish + "other " * 400_000 + tail)


def pairs_found(matcher: Matcher, name: str, every: int = 1) -> dict[str, Any]:
    items = routing_set.read_two_tasks(routing_set.FOLDER / f"{name}.jsonl")[::every]
    router = router_of(shipped(), matcher)
    chosen = [experts_of(router, Item(item.prompt, item.body, None)) for item in items]
    return routing_set.two_tasks_quality(items, chosen)


def test_a_prompt_with_two_tasks_gets_both_experts(matcher: Matcher) -> None:
    held_out = pairs_found(matcher, "two_tasks_held_out")
    assert held_out["both"]["n"] == 60 and held_out["both"]["count"] >= 48
    assert held_out["two_for_one_task"]["share"] <= 0.05
    dev = pairs_found(matcher, "two_tasks_dev")
    assert dev["both"]["share"] >= 0.95 and dev["two_for_one_task"]["share"] <= 0.02


def test_plain_prompts_and_near_misses_do_not_get_two(matcher: Matcher) -> None:
    router = router_of(shipped(), matcher)
    for name in ("held_out", "near_miss_held_out"):
        items = routing_set.read(routing_set.FOLDER / f"{name}.jsonl")[::2]
        found = routing_set.quality_of(routed(router, items))
        assert found["with_further_experts"] <= 0.02 * len(items)


def test_each_of_two_tasks_is_told(matcher: Matcher) -> None:
    text = "Make a slug of: Rain in June. Also, is this positive or negative: it broke at once."
    plan = router_of(shipped(), matcher).plan(request(Item(text, "", None)))
    assert {choice.name.partition("@")[0] for choice in plan.adapters} == {"url-slug", "sentiment"}
    assert plan.trace is not None
    chosen = [item for item in plan.trace.candidates if item.chosen]
    assert {item.why for item in chosen} == {"chosen for a part of the prompt"}
    assert all(item.part >= matcher.threshold for item in chosen)
    assert all(item.part == 0 for item in plan.trace.candidates if not item.chosen)
    # the answer has the form of neither task alone
    assert plan.trace.task_type == "transformation" and plan.trace.has_several_tasks
    timings = plan.trace.timings_ms
    assert 0 < timings["features.embedding"] < timings["features"] < timings["total"]
