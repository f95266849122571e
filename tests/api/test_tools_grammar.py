"""The grammar of a request's tools, asked token by token what it lets a model write."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from coterie.api.tools.base import Tool, ToolSet, tool_of
from coterie.api.tools.grammar import (
    MAX_GRAMMAR,
    answer_behind_thought,
    enforced_schema,
    tool_constraint,
)
from coterie.api.tools.read import blamed
from coterie.core.errors import InvalidRequest
from coterie.core.request import ResponseFormat
from coterie.models.grammar.grammar import GrammarVocabulary
from coterie.models.text.tokenizer import Tokenizer, load_tokenizer
from coterie.models.text.tool_format import FORMATS, ToolSupport
from tests.helpers.models.tiny import tiny_checkpoint

CITY = {
    "properties": {"city": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (
    tool_of("get", "", CITY, strict=False, where="tools.0"),
    tool_of("get_more", None, None, strict=True, where="tools.1"),
)
HERMES = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris", "n": 3}}\n</tool_call>'
MORE = '<tool_call>\n{"name": "get_more", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "get", "parameters": {"city": "Paris"}}'
LLAMA_MORE = '{"name": "get_more", "parameters": {}}'
JSON = ResponseFormat(
    "json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load_tokenizer(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def toolbox(tools: tuple[Tool, ...] = TOOLS, **fields: Any) -> ToolSet:
    return ToolSet(tools, frozenset(tool.name for tool in tools), **fields)


def follows(matcher: Any, tokenizer: Tokenizer, text: str) -> str:
    """As much of `text` as the grammar lets through, with a . when it may end there."""
    ids = tokenizer.encode(text, special=False)
    number = matcher.try_consume_tokens(ids)
    return tokenizer.decode(ids[:number]) + ("." if matcher.is_accepting() else "")


# (required, parallel, thought, answer) and texts with what of them passes (None = all, and may end)
CASES: list[tuple[str, dict[str, Any], bool | None, Any, list[tuple[str, str | None]]]] = [
    (
        "hermes",
        {"required": True},
        None,
        None,
        [(HERMES, None), (f"{HERMES}\n{MORE}\n{HERMES}", None), ("hello", ""), ("", "")],
    ),
    (
        "hermes",
        {"required": True, "parallel": False},
        None,
        None,
        [(HERMES, None), (f"{HERMES}\n{MORE}", HERMES + ".")],
    ),
    (
        "hermes",
        {},
        None,
        None,
        [
            (HERMES, None),
            (f"Well.\n{MORE}\n{HERMES}", None),
            ("any words, <tool or <tool_cal\x00\x7f é", None),
            (f"{HERMES} and then", HERMES + "."),
            ("<tool_call>{", "<tool_call>"),
            ('<tool_call>\n{"name": "other', '<tool_call>\n{"name": "'),
        ],
    ),
    (
        "hermes",
        {},
        True,
        None,
        [(f"a {MORE} b</think>\n\n{HERMES}", None), (f"a {MORE} b", None), ("b</think>ok", None)],
    ),
    (
        "hermes",
        {"required": True},
        False,
        None,
        [
            (HERMES, None),
            (f"<think>\n{MORE}\n</think>\n\n{HERMES}", None),
            ("<think>a", "<think>a"),
        ],
    ),
    ("hermes", {}, None, JSON, [(HERMES, None), ('{"a": 3}', None), ("hello", "")]),
    (
        "llama",
        {"required": True},
        None,
        None,
        [(LLAMA, None), (f"{LLAMA}; {LLAMA_MORE}", None), ("hi", "")],
    ),
    (
        "llama",
        {},
        None,
        None,
        [
            (LLAMA, None),
            (f"{LLAMA}; {LLAMA_MORE}", None),
            (LLAMA_MORE.replace(" ", ""), None),
            (f"Well. <|python_tag|>{LLAMA}", None),
            ('{"name": "Alice", "parameters": 3}', None),
            (f"I say {LLAMA} then", None),
        ],
    ),
]


@pytest.mark.parametrize(("style", "fields", "thought", "answer", "texts"), CASES)
def test_what_a_model_may_write(
    tokenizer: Tokenizer,
    vocabulary: GrammarVocabulary,
    style: str,
    fields: dict[str, Any],
    thought: bool | None,
    answer: ResponseFormat | None,
    texts: list[tuple[str, str | None]],
) -> None:
    tokenizer.tool_support = ToolSupport(FORMATS[style], native=True)
    tokenizer.reasoning = None if thought is None else ("<think>", "</think>")
    wanted = tool_constraint(toolbox(**fields), tokenizer, thought, answer)
    start = vocabulary.compile(wanted)
    for text, passes in texts:
        passed = follows(start.deep_copy(), tokenizer, text)
        assert passed == (f"{text}." if passes is None else passes)


@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_before_a_call_every_token_is_as_free_as_ever(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary, style: str
) -> None:
    """Half characters, bytes that are no text and special tokens too."""
    tokenizer.tool_support = ToolSupport(FORMATS[style], native=True)
    matcher = vocabulary.compile(tool_constraint(toolbox(), tokenizer, None, None)).deep_copy()
    drawn = np.random.default_rng(5).permutation(tokenizer.vocab_size)
    for token in drawn:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size]
        assert bits.all(), np.flatnonzero(bits == 0)
        if token not in tokenizer.eos_ids:
            assert matcher.consume_token(int(token))


def test_a_mark_that_is_a_special_token(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary
) -> None:
    """It is drawn by its id; its letters are mere words."""
    turn = tokenizer.special_ids["<|turn|>"]
    tokenizer.special_ids["<tool_call>"] = turn
    matcher = vocabulary.compile(tool_constraint(toolbox(), tokenizer, None, None))
    body = tokenizer.encode(MORE.removeprefix("<tool_call>"), special=False)
    ids = [*tokenizer.encode("Well. <tool_call> ", special=False), turn, *body]
    copy = matcher.deep_copy()
    assert copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()
    assert matcher.deep_copy().try_consume_tokens([turn, turn]) == 1


def test_a_format_behind_a_thought(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    tokenizer.reasoning = ("<think>", "</think>")
    for thought, text in ((True, "so</think>\n"), (False, "<think>so</think>\n"), (False, "")):
        start = vocabulary.compile(answer_behind_thought(JSON, tokenizer, thought))
        assert follows(start.deep_copy(), tokenizer, text + '{"a": 3}') == text + '{"a": 3}.'
        assert follows(start.deep_copy(), tokenizer, text + "[3") == text


def test_unknown_properties_are_not_made_up() -> None:
    """Unless the schema speaks of them, or its parts could name each other's."""
    named: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"title": "A", "type": "string"}},
    }
    held = json.loads(enforced_schema(named, strict=False))
    assert held["additionalProperties"] is False
    assert held["properties"] == {"a": {"type": "string"}}
    deep = {"properties": {"properties": named, "items": {"type": "array", "items": named}}}
    inner = json.loads(enforced_schema(deep, strict=False))["properties"]
    assert set(inner) == {"properties", "items"}
    assert inner["properties"]["additionalProperties"] is False
    assert inner["items"]["items"]["additionalProperties"] is False
    for open_ in (
        named | {"additionalProperties": {"type": "integer"}},
        named | {"required": ["b"]},
        named | {"patternProperties": {"x": {}}},
        named | {"allOf": [{"properties": {"b": {}}}]},
        named | {"anyOf": [{"properties": {"b": {}}}]},
        {"type": "object"},
    ):
        kept = json.loads(enforced_schema(open_, strict=False))
        assert kept.get("additionalProperties") != False  # noqa: E712
        jsonschema.Draft202012Validator.check_schema(kept)
    # not a schema at all: the engine says so
    assert json.loads(enforced_schema(named | {"required": [{}]}, strict=False))["required"] == [{}]


def test_the_tool_at_fault_is_named(tokenizer: Tokenizer, vocabulary: GrammarVocabulary) -> None:
    wrong = {"properties": {"a": {"type": "string", "format": "no-such-format"}}}
    loose = toolbox((*TOOLS, tool_of("loose", "", wrong, strict=False, where="")))
    vocabulary.compile(tool_constraint(loose, tokenizer, None, None))
    box = toolbox((*TOOLS, tool_of("tight", "", wrong, strict=True, where="")))
    grammar = tool_constraint(box, tokenizer, None, None)
    with pytest.raises(InvalidRequest) as caught:
        vocabulary.compile(grammar)
    error = blamed(caught.value.message, box, grammar)
    assert error.param == "tools.2"
    assert "'tight' cannot be enforced: Unknown format: no-such-format" in error.message
    assert blamed("all is wrong", box, grammar).param == "tools"


def test_the_format_beside_tools_is_named(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary
) -> None:
    box = toolbox(TOOLS)
    grammar = tool_constraint(box, tokenizer, None, ResponseFormat("regex", "(a"))
    with pytest.raises(InvalidRequest) as caught:
        vocabulary.compile(grammar)
    assert blamed(caught.value.message, box, grammar, "guided_regex").param == "guided_regex"


def test_schemas_that_are_too_large_together(tokenizer: Tokenizer) -> None:
    schema = {"properties": {f"p{i}": {"enum": ["x" * 100]} for i in range(400)}}
    tools = tuple(tool_of(f"f{i}", "", schema, strict=False, where="") for i in range(5))
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR)) as caught:
        tool_constraint(toolbox(tools), tokenizer, None, None)
    assert caught.value.param == "tools"
