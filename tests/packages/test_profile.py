"""packages/profile.py: what a manifest says becomes a profile, and junk becomes nothing."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from coterie.core.adapters import MAX_STACK, AdapterCard, AdapterProfile
from coterie.core.request import ResponseFormat
from coterie.packages.manifest import from_document
from coterie.packages.profile import MAX_EXAMPLE_CHARS, MAX_TEXTS, profile_of, read_profile
from tests.helpers.adapters.package_files import document

CARD = AdapterCard("sql", "1.0.0", "d" * 64, "lora", (), 0, 1, 0.0)


def read(grammar: str = "", **sections: Any) -> AdapterProfile:
    return profile_of(CARD, from_document(document(**sections)), grammar)


def test_a_whole_manifest() -> None:
    found = read(
        routing={
            "keywords": ["sql", " query ", "sql"], "examples": ["How many users?"],
            "counterexamples": ["What is SQL?"], "router_hint": "sql or query", "priority": 0.8,
            "template": "Schema:\n{body}\n{prompt}",
        },
        constraints={
            "requires": ["base", "other@1.2.0"], "incompatible_with": ["poet"], "max_chain": 3,
            "load_order": -2,
        },
        capabilities=["task:query"],
        decoding={"temperature": 0.1, "top_k": 5, "stop": ["x"]},
        evaluation={"decoding": "greedy", "expert": {"score": 0.74}},
        grammar="root ::= [a-z]+",
    )  # fmt: skip
    assert found == AdapterProfile(
        CARD, ("sql", "query"), ("How many users?",), ("What is SQL?",), "sql or query", 0.8,
        ("task:query",), ("base", "other@1.2.0"), ("poet",), 3, -2,
        ResponseFormat("gbnf", "root ::= [a-z]+"), {"temperature": 0.1, "top_k": 5.0},
        "Schema:\n{body}\n{prompt}", 0.74,
    )  # fmt: skip
    assert read() == AdapterProfile(CARD)


@pytest.mark.parametrize(
    ("section", "value", "field", "expected"),
    [
        ("routing", {"keywords": "sql"}, "keywords", ()),
        ("routing", {"keywords": [1, None, "", "a" * 100, ["x"]]}, "keywords", ("a" * 64,)),
        ("routing", {"examples": ["e" * 9000]}, "examples", ("e" * MAX_EXAMPLE_CHARS,)),
        ("routing", {"router_hint": ["a"]}, "router_hint", ""),
        # a cut expression would mean something else
        ("routing", {"router_hint": "a or " * 500}, "router_hint", ""),
        ("routing", {"priority": 7}, "priority", 1.0),
        ("routing", {"priority": "high"}, "priority", 0.5),
        ("routing", {"priority": True}, "priority", 0.5),
        ("routing", {"template": "no place"}, "template", ""),
        ("routing", {"template": "{prompt}{body}" * 3}, "template", "{prompt}{body}" * 3),
        # a long document, three thousand times
        ("routing", {"template": "{prompt}" + "{body}" * 3_000}, "template", ""),
        ("constraints", {"requires": ["UPPER", "../x", "ok", "a@b@c", 3]}, "requires", ("ok",)),
        ("constraints", {"max_chain": -5}, "max_chain", 0),
        ("constraints", {"max_chain": 10**9}, "max_chain", MAX_STACK),
        ("constraints", {"load_order": 1.9}, "load_order", 1),
        ("training", {"decoding": {"temperature": 0.4}}, "decoding", {"temperature": 0.4}),
        ("decoding", {"temperature": 9, "top_p": 0, "min_p": "x"}, "decoding", {}),
        ("evaluation", {"decoding": "greedy"}, "decoding", {"temperature": 0.0}),
        ("evaluation", {"expert": {"score": 1.5}}, "quality", None),
        ("evaluation", {"expert": "good"}, "quality", None),
        ("quality_metrics", {"accuracy": 0.9}, "quality", 0.9),
        ("check", {"type": "regex", "text": "[a-z-]+"}, "answer_pattern", "[a-z-]+"),
        ("check", {"type": "regex", "text": "[a-z"}, "answer_pattern", ""),
        ("check", {"type": "magic", "text": "[a-z]"}, "answer_pattern", ""),
        ("capabilities", ["language:de", "language:", "language:../x"], "languages", ("de",)),
        ("response_format", {"type": "json_object"}, "response_format", "json_object"),
        ("response_format", {"type": "regex", "text": "[a-z]"}, "response_format", "regex"),
        ("response_format", {"type": "magic", "text": "x"}, "response_format", None),
        ("response_format", {"type": "lark"}, "response_format", None),
    ],
)
def test_junk_is_left_out(section: str, value: Any, field: str, expected: Any) -> None:
    found = getattr(read(**{section: value}), field)
    assert (found.kind if isinstance(found, ResponseFormat) else found) == expected


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for stated in (
        {"type": "json_schema", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ):
        found = read(response_format=stated, grammar="root ::= x").response_format
        assert found is not None and json.loads(found.text) == schema
    # what cannot be used does not hide the grammar
    assert read("root ::= x", response_format={"type": "?"}).response_format == ResponseFormat(
        "gbnf", "root ::= x"
    )


def test_a_grammar_that_came_along(tmp_path: Path) -> None:
    manifest = from_document(document())
    assert read_profile(CARD, manifest, tmp_path).response_format is None
    (tmp_path / "grammar.gbnf").write_text('root ::= "yes" | "no"\n')
    found = read_profile(CARD, manifest, tmp_path).response_format
    assert found == ResponseFormat("gbnf", 'root ::= "yes" | "no"\n')


NAMES = (
    "keywords", "examples", "router_hint", "priority", "template", "requires", "max_chain",
    "load_order", "incompatible_with", "expert", "decoding", "temperature", "score", "type", "text",
)  # fmt: skip
SECTIONS = ("routing", "constraints", "evaluation", "training", "quality_metrics")


def junk(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(NAMES): junk(rng, depth - 1) for _ in range(rng.randrange(4))}
    number, text = rng.choice((-1e300, -1, 0.5, 7, 2**62, math.inf)), rng.choice(NAMES) * 30
    return (None, rng.random() < 0.5, number, "{prompt}", text[: rng.randrange(400)], "regex")[kind]


@pytest.mark.parametrize("seed", range(5))
def test_any_manifest_has_a_profile(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        sections: dict[str, Any] = {
            section: {name: junk(rng) for name in NAMES if rng.random() < 0.5}
            for section in SECTIONS
        }
        found = read(**sections, decoding=junk(rng), response_format=junk(rng))
        assert 0.0 <= found.priority <= 1.0 and 0 <= found.max_chain <= MAX_STACK
        for texts in (found.keywords, found.examples, found.requires, found.incompatible_with):
            assert len(texts) <= MAX_TEXTS and all(isinstance(text, str) for text in texts)
        assert found.quality is None or 0.0 <= found.quality <= 1.0
        assert all(isinstance(value, float) for value in found.decoding.values())
        assert not found.template or "{prompt}" in found.template
        hash((found.keywords, found.router_hint, found.load_order, found.response_format))
