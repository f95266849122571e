"""The held-out prompts are what their page says, and the evaluation counts correctly."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import pytest

from benchmarks.routing.held_out_specialists import (
    GENERAL,
    KINDS,
    SPECIALISTS,
    Choice,
    HeldOutPrompt,
    evaluate,
    keywords,
    lines_of,
    read_held_out,
    report,
)

MAX_OVERLAP = 0.8
# a Japanese or Chinese character counts as a word
WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_]+")


def words(prompt: str) -> frozenset[str]:
    return frozenset(WORD.findall(unicodedata.normalize("NFKC", prompt).casefold()))


def test_the_set_is_large_and_covers_every_specialist():
    prompts = read_held_out()
    counts = Counter(p.specialist for p in prompts)
    assert len(prompts) >= 880
    assert set(counts) == set(SPECIALISTS)
    assert {p.kind for p in prompts} == set(KINDS)
    assert all(counts[name] >= 65 for name in SPECIALISTS)
    none_meant = [p for p in prompts if p.specialist == GENERAL and not p.task]
    assert 2 * sum(p.kind == "near_miss" for p in none_meant) >= len(none_meant) >= 300
    assert all(p.prompt.strip() == p.prompt and p.prompt for p in prompts)


def test_no_two_prompts_are_nearly_the_same():
    sets = sorted((words(p.prompt) for p in read_held_out()), key=len)
    close = []
    for index, smaller in enumerate(sets):
        assert smaller
        for larger in sets[index + 1 :]:
            if len(smaller) < MAX_OVERLAP * len(larger):
                break  # the sets to come are larger still
            shared = len(smaller & larger)
            if shared > MAX_OVERLAP * (len(smaller) + len(larger) - shared):
                close.append((smaller, larger))
    assert not close


def test_figures_of_a_small_case():
    result = report(
        [
            Choice(GENERAL, GENERAL, 0.95, "plain"),
            Choice(GENERAL, "intent", 0.55, "near_miss"),
            Choice("intent", "intent", 0.95, "plain"),
            Choice("intent", GENERAL, 0.95, "noisy"),
        ]
    )
    assert (result.top1.right, result.top1.n) == (2, 4)
    assert result.top1.low == pytest.approx(0.150, abs=0.001)
    assert result.specialists["intent"].precision.share == 0.5
    assert result.specialists["intent"].recall.share == 0.5
    assert result.false_accepts.share == 0.5
    assert result.false_rejects.share == 0.5
    assert result.kinds["plain"].share == 1.0
    assert [b.n for b in result.bins] == [1, 3]
    # one at 0.55 and wrong; three at 0.95, two of them right
    assert result.calibration_error == pytest.approx((0.55 + 3 * (0.95 - 2 / 3)) / 4)
    assert result.confusions == [(GENERAL, "intent", 1), ("intent", GENERAL, 1)]


def test_a_perfect_router_has_no_confusions_and_keywords_are_not_enough():
    prompts = read_held_out()
    labels = {p.prompt: p.specialist for p in prompts}
    perfect = evaluate(lambda prompt: (labels[prompt], 1.0), prompts)
    assert perfect.top1.share == 1.0
    assert perfect.calibration_error == 0.0
    assert perfect.confusions == []
    baseline = evaluate(keywords, prompts)
    assert baseline.top1.share < 0.75
    assert any("near_miss" in line for line in lines_of(baseline))


@pytest.mark.parametrize("answer", [("sql", 0.5), (GENERAL, 1.5), (GENERAL, float("nan"))])
def test_an_answer_outside_the_interface_is_an_error(answer):
    with pytest.raises(ValueError, match="the router"):
        evaluate(lambda prompt: answer, [HeldOutPrompt("Hello", GENERAL, "plain")])
