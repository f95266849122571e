"""packages/profile.py: what a manifest says becomes a profile, and junk becomes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.adapters import MAX_STACK, AdapterCard, AdapterProfile
from coterie.core.request import ResponseFormat
from coterie.packages.manifest import from_document
from coterie.packages.profile import MAX_EXAMPLE_CHARS, MAX_TEXTS, profile_of, read_profile
from tests.packages.made import document

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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=5,
)  # fmt: skip
NAMES = st.sampled_from(
    ["keywords", "examples", "router_hint", "priority", "template", "requires", "max_chain",
     "load_order", "incompatible_with", "expert", "decoding", "temperature", "score", "type"]
)  # fmt: skip
SECTIONS = ("routing", "constraints", "evaluation", "training", "quality_metrics")


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(SECTIONS), st.dictionaries(NAMES, JSON)), JSON, JSON)
def test_any_manifest_has_a_profile(sections: dict[str, Any], decoding: Any, form: Any) -> None:
    found = read(**sections, decoding=decoding, response_format=form)
    assert 0.0 <= found.priority <= 1.0 and 0 <= found.max_chain <= MAX_STACK
    assert len(found.keywords) <= MAX_TEXTS and all(isinstance(k, str) for k in found.keywords)
    assert found.quality is None or 0.0 <= found.quality <= 1.0
    assert all(isinstance(value, float) for value in found.decoding.values())
