"""routing/features/rules.py: router_hint, read and matched; nonsense is refused, not run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.routing.features.features import PromptFeatures, extract
from coterie.routing.features.rules import MAX_DEPTH, MAX_TOKENS, HintError, compiled, parse

PROMPT = extract('Extract the name and the date of birth as JSON from: {"a": 1}')


@pytest.mark.parametrize(
    ("hint", "holds"),
    [
        ("json", True),
        ("JSON and name", True),
        ("xml", False),
        ("xml or json", True),
        ("not xml", True),
        ("!xml && (json || csv)", True),
        ('"date of birth"', True),
        ("'of birth as'", True),
        ('"birth of date"', False),
        # words, not letters
        ("nam", False),
        ('"ate of birth"', False),
        ("has_json", True),
        ("has_json == true", True),
        ("has_json = false", False),
        ("has_code", False),
        ("task_type == json_parsing", True),
        ("task = extraction", False),
        ("task != extraction", True),
        ("lang=en AND intent=extract", True),
        ("language: de", False),
        ("num_characters < 100", True),
        ("length >= 100", False),
        ("tech=neo4j", False),
        ("format=json", True),
        ('contains("date of birth") and not contains(sql)', True),
        # `and` binds closer than `or`, `not` closest
        ("json or xml and csv", True),
        ("(json or xml) and csv", False),
        ("not xml and not csv", True),
        ("not (json and name)", False),
        ("not not json", True),
    ],
)
def test_expressions(hint: str, holds: bool) -> None:
    assert parse(hint)(PROMPT) is holds


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ("", "missing"),
        ("and json", "missing"),
        ("json and", "missing"),
        ("(json", r"'\)' is missing"),
        ("json)", "not expected"),
        ("json xml", "not expected"),
        ("task_type", "compared"),
        ("colour == red", "no feature 'colour'"),
        ("length > long", "no number"),
        ("intent > 3", "no number"),
        ("json ; import", "character 5"),
        ("__import__('os')", "character 1"),
        ('""', "empty"),
        ("(" * (MAX_DEPTH + 2) + "json" + ")" * (MAX_DEPTH + 2), "nested"),
        ("not " * (MAX_DEPTH + 2) + "json", "nested"),
        ("json or " * MAX_TOKENS + "json", f"more than {MAX_TOKENS}"),
    ],
)
def test_what_cannot_be_read_is_refused_and_holds_nothing_back(hint: str, words: str) -> None:
    with pytest.raises(HintError, match=words):
        parse(hint)
    assert compiled(hint) is None


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abj(=)&|!<>\"' :notrdexl_5.", max_size=60))
def test_any_text_is_read_or_refused(hint: str) -> None:
    rule = compiled(hint)
    assert rule is None or rule(PROMPT) in (True, False)


def test_random_expressions_mean_what_python_means() -> None:
    rng = random.Random(11)
    words = ["ant", "bee", "cat", "dog"]

    def made(depth: int) -> tuple[str, str]:
        """The same expression here and in Python."""
        kind = rng.choice(("word", "word", "not", "and", "or") if depth else ("word",))
        if kind == "word":
            word = rng.choice(words)
            return word, f"({word!r} in said)"
        if kind == "not":
            inner, python = made(depth - 1)
            return f"not ({inner})", f"(not {python})"
        parts = [made(depth - 1) for _ in range(rng.randint(2, 3))]
        joined = f" {kind} ".join(f"({part})" for part, _ in parts)
        return joined, "(" + f" {kind} ".join(python for _, python in parts) + ")"

    for _ in range(300):
        hint, python = made(3)
        said = frozenset(word for word in words if rng.random() < 0.5)
        expected = eval(python, {"said": said})
        assert parse(hint)(PromptFeatures(words=said, text=" ".join(said))) is expected, hint
