"""Which language a prompt is in, and that an expert is chosen only in those it serves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from coterie.routing.decide import languages_of
from coterie.routing.features.features import extract
from coterie.routing.features.language import detect
from coterie.routing.router import Router, Specialist
from tests.helpers.adapters.profiles import BASE, Answers, Fleet, Matched, asking, profile

SENTENCES = [
    tuple(line.split(" ", 1))
    for line in (Path(__file__).parent / "languages.txt").read_text("utf-8").splitlines()
]


def test_short_sentences_in_many_languages() -> None:
    counts = Counter(name for name, _ in SENTENCES)
    assert len(SENTENCES) >= 200 and len(counts) >= 20 and min(counts.values()) >= 10
    wrong = [(name, detect(text), text) for name, text in SENTENCES if detect(text) != name]
    assert len(wrong) <= 0.05 * len(SENTENCES), wrong


@pytest.mark.parametrize(
    ("prompt", "language"),
    [
        ('Translate "Wo ist mein Paket, und warum ist es nicht da?" into English.', "en"),
        ('Übersetze bitte ins Englische: "Where is the parcel that you sent to me?"', "de"),
        ("Is this review positive or negative: La comida estaba muy fría y el servicio", "en"),
    ],
)
def test_the_instruction_counts_and_not_its_material(prompt: str, language: str) -> None:
    assert extract(prompt).language == language


def test_an_expert_serves_what_its_package_says() -> None:
    assert languages_of(profile("a")) == ("en",)
    assert languages_of(profile("a", languages=("de", "fr"))) == ("de", "fr")
    spoken = ("Schreibe die Rechnung auf Deutsch.", "Wo ist die Rechnung, die ich suche?")
    assert languages_of(profile("a", examples=spoken)) == ("en", "de")


def test_a_prompt_in_another_language_goes_to_the_base() -> None:
    english, both = profile("slug"), profile("slug", languages=("en", "pl"))
    for known, chosen in ((english, 0), (both, 1)):
        fleet = Fleet([known], Answers([Matched(known, 0.9, 0.97)]))
        router = Router([Specialist("tiny", fingerprint=BASE)], fleet)
        plan = router.plan(asking("Gdzie jest moja paczka i dlaczego jej nie ma?"))
        assert len(plan.adapters) == chosen
        if not chosen:
            assert "serves en, the prompt is in pl" in plan.reasons[0]
        assert len(router.plan(asking("Where is my parcel and why is it late?")).adapters) == 1
