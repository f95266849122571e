"""Who a text is for, from packages' hints alone: what they say, how it is learnt, many adapters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.routing.catalogs import made_up, shipped
from coterie.core.adapters import AdapterProfile
from coterie.routing.features.features import extract
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from coterie.routing.match.matcher import MAX_HINTED, Matcher
from coterie.routing.match.probes import (
    AGAINST,
    FOR,
    FRAMES,
    BackgroundPrompts,
    ProbeExamples,
    near_misses,
    probes,
)
from coterie.routing.match.sketch import SketchRows, sketch
from tests.helpers.adapters.profiles import brief, profile

EMBEDDER = EMBEDDERS[DEFAULT]()


@pytest.fixture(scope="module")
def known() -> list[AdapterProfile]:
    return shipped()


@pytest.fixture(scope="module")
def briefly_known(known: list[AdapterProfile]) -> list[AdapterProfile]:
    """A tenth of the texts, for tests that do not ask how good the probes are."""
    return [brief(profile) for profile in known]


def test_counterexamples_hold_back() -> None:
    hints: dict[str, Any] = {
        "examples": tuple(f"Bake a cake with {x}" for x in ("nuts", "figs", "rum", "milk", "oats"))
    }
    plain = profile("plain", **hints)
    careful = profile("careful", counterexamples=("Who invented cake with nuts?",), **hints)
    text = "Who invented cake with figs?"
    first = Matcher.build([plain], EMBEDDER).match(text)[0]
    second = Matcher.build([careful], EMBEDDER).match(text)[0]
    assert second.probability < first.probability


def test_a_package_without_examples_is_found_by_what_it_says() -> None:
    haiku = profile("haiku", keywords=("haiku", "syllables", "poem"))
    tax = profile("tax-forms", keywords=("tax", "income", "form"))
    found = Matcher.build([tax, haiku], EMBEDDER).match("haiku poem with the right syllables")
    assert found[0].profile.card.name == "haiku"


@pytest.mark.full
@pytest.mark.parametrize("exact_rows", [50_000, 20])
def test_of_many_only_the_likely_are_asked(
    briefly_known: list[AdapterProfile], exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.routing.match.matcher.MAX_EXACT_ROWS", exact_rows)
    matcher = Matcher.build([*made_up(8), *briefly_known], EMBEDDER)
    found = matcher.match("Make a URL slug: Why Geese Fly", k=3)
    assert len(found) == 3 and found[0].profile.card.name == "url-slug"
    chances = [item.probability for item in found]
    assert chances == sorted(chances, reverse=True)


def test_words_of_a_prompt_add_candidates() -> None:
    """Of many packages, those whose keyword or capability a prompt names are considered too."""
    near = tuple(f"Bake a cake with {x} for the guests" for x in ("nuts", "figs", "rum", "milk"))
    many = [profile(f"cakes-{number}", examples=near) for number in range(12)]
    far = profile("tables", keywords=("pivot",), examples=("Sum the rows of this sheet",))
    code = profile("queries", capabilities=("tech:sql",), examples=("Which rows are newest?",))
    matcher = Matcher.build([*many, far, code], EMBEDDER)
    text = "Bake a cake with figs for the guests, a pivot and some SQL"
    nearest = {item.profile.card.name for item in matcher.match(text, k=4)}
    assert len(nearest) == 4 and not nearest & {"tables", "queries"}
    found = matcher.match(text, extract(text), k=4)
    assert nearest | {"tables", "queries"} == {item.profile.card.name for item in found}
    chances = [item.probability for item in found]
    assert chances == sorted(chances, reverse=True)
    # a word that many packages share adds a few of them
    shared = [replace(item, keywords=("guests",)) for item in many]
    matcher = Matcher.build([*shared, far, code], EMBEDDER)
    assert len(matcher.match(text, extract(text), k=1)) == 1 + MAX_HINTED


def test_what_did_not_change_is_not_learnt_again(briefly_known: list[AdapterProfile]) -> None:
    known = briefly_known
    first, second = probes(known[:3], EMBEDDER), probes(known[:3], EMBEDDER)
    assert all(a is b for a, b in zip(first, second, strict=True))
    # the same weights, packed again with other hints
    other = replace(known[0], examples=known[0].examples[:20])
    assert probes([other, *known[1:3]], EMBEDDER)[0] is not first[0]


def test_a_probe_is_the_ridge_regression_over_all_rows() -> None:
    ordinary = [f"Tell me about {x} and {y}" for x in ("cats", "war", "tea") for y in ("art", "me")]
    pro = [sketch(f"Slug for {x}", EMBEDDER) for x in ("A Day Out", "Two Men", "New Roads")]
    con = [sketch("What is a slug?", EMBEDDER)]
    probe = BackgroundPrompts(ordinary, EMBEDDER).fit(ProbeExamples(pro, con))
    rows = [*pro, *con, *(sketch(text, EMBEDDER) for text in ordinary)]
    worth = np.array([FOR] * 3 + [AGAINST] + [1.0] * len(ordinary))
    wanted = np.array([1.0] * 3 + [-1.0] * (1 + len(ordinary)))
    table = SketchRows(rows)
    shares = np.linalg.solve(table.alike(rows) + 1.0 + np.diag(0.1 / worth), wanted)
    for text in ("Slug for Old Men", "Tell me about slugs", "What?"):
        asked = sketch(text, EMBEDDER)
        direct = float((table.alike([asked]) + 1.0)[0] @ shares)
        said = probe.words[asked.grams] @ asked.weights * probe.scale
        sides = np.append(1.0, asked.form), np.append(1.0, asked.meaning)
        assert float(sides[0] @ probe.joint @ sides[1] + said) == pytest.approx(direct, abs=0.02)


def test_a_copy_under_another_name_takes_nothing_from_the_original(
    briefly_known: list[AdapterProfile],
) -> None:
    known = briefly_known
    original = known[-1]
    card = replace(original.card, name="another-name")
    texts = ("Make a URL slug: Why Geese Fly", "How do slugs breathe?")
    for copy in (
        replace(original, card=card),
        replace(original, card=card, examples=original.examples[:40]),
    ):
        beside = Matcher.build([*known, copy], EMBEDDER)
        alone = Matcher.build(known, EMBEDDER)
        for text in texts:
            before, after = (
                next(m for m in each.match(text) if m.profile is original)
                for each in (alone, beside)
            )
            assert after.similarity == pytest.approx(before.similarity, abs=0.01)


def test_near_misses_are_made_of_any_package() -> None:
    said = tuple(f"Bake a plum cake with {x}" for x in ("nuts", "figs", "rum", "milk"))
    made = near_misses(("cake",), said, Counter())
    assert "Write a poem about plum cake." in made or "Write a poem about cake." in made
    assert len(made) == 2 * len(FRAMES) and near_misses((), (), Counter()) == []
