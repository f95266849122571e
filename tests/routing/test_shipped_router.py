"""The router of this release: what it is trained on, and how often it is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.routing import questions
from benchmarks.routing.specialists import routing_set
from coterie.core.config import load
from coterie.routing.classify.decide import ServedIntents, decide
from coterie.routing.classify.evaluate import evaluate
from coterie.routing.classify.features import prompt_input
from coterie.routing.classify.trained import TrainedRouter
from coterie.routing.classify.versions import SHIPPED, RouterVersions, saw
from coterie.routing.match.embed import static
from examples.router_data.make import HERE, REJECT, lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def router() -> TrainedRouter:
    current = RouterVersions(SHIPPED).current()
    assert current is not None
    return current


def test_it_is_small_and_for_the_eight(router: TrainedRouter) -> None:
    [name] = RouterVersions(SHIPPED).names()
    assert name == router.version and (SHIPPED / f"{name}.npz").stat().st_size < 10**6
    config = load(ROOT / "examples" / "eight.toml")
    assert config.ensemble.router == "shipped"
    first, *others = (item.name for item in config.specialists)
    assert router.labels == (REJECT, *sorted(others)) and first == "general"


def test_nothing_that_is_held_out_was_learnt(router: TrainedRouter) -> None:
    for name in ("dev", "near_miss_dev", "held_out", "near_miss_held_out"):
        assert not any(saw(router, item) for item in routing_set(name))
    asked = {
        item.prompt
        for name in ("dev", "near_miss_dev", "held_out", "near_miss_held_out")
        for item in questions.read(questions.FOLDER / f"{name}.jsonl")
    }
    known = lines()
    assert not asked & {line.prompt for line in known if not line.body}
    assert sum(router.record.trained_on.values()) == pytest.approx(len(known), abs=20)
    text = (HERE / "written.jsonl").read_text(encoding="utf-8")
    own = [json.loads(line) for line in text.splitlines()]
    assert len({item["group"] for item in own}) >= 13 and len(own) > 900


def test_it_is_right(router: TrainedRouter) -> None:
    found = evaluate(router, routing_set("dev")[::2])
    assert found["right"]["share"] >= 0.97 and found["related"]["share"] >= 0.96
    assert found["calibration_error"] <= 0.06
    assert evaluate(router, routing_set("near_miss_dev")[::2])["right"]["share"] >= 0.94


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
        ("What is JSON?", "general"),
        ("Delete all ponds from ponds(name, depth), SQL please", "general"),
        ("Convert 6 feet 2 inches to centimetres.", "general"),
        ("Do slugs have teeth?", "general"),
        ("Erzähl mir einen Witz.", "general"),
        ("", "general"),
    ],
)
def test_who_answers(router: TrainedRouter, text: str, name: str) -> None:
    names = ("general", *router.labels[1:])
    served = ServedIntents.of((item, ()) for item in names)
    decision = decide(prompt_input(text, "", static()), served, router)
    assert decision.specialist == name and decision.confidence > 0.4
    assert len(decision.alternates) == 3
