"""Fields of other servers that change what an answer may be: honoured, or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from coterie.api.anthropic.types import MessagesBody
from coterie.api.body_fields import IGNORED, ON_OPENAI_ALONE, REFUSED
from coterie.api.openai.types import ChatBody, CompletionBody
from coterie.api.responses.parse import NOT_HERE
from coterie.api.responses.types import ResponseBody
from coterie.core.errors import InvalidRequest
from coterie.core.receipt import reason_of
from tests.helpers.serving.server_process import KEYS, Served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}
GBNF = 'root ::= ("ab" | "cd")+ "."'
DIGITS = r"[0-9]{2,4}"
# what each of them says of the answer
HONOURED: dict[str, tuple[Any, str | None]] = {
    "response_format": ({"type": "json_object", "schema": SCHEMA}, None),
    "guided_json": (SCHEMA, None),
    "guided_regex": (DIGITS, DIGITS),
    "guided_choice": (["yes", 'no "way"'], 'yes|no "way"'),
    "guided_grammar": (GBNF, r"(ab|cd)+\."),
    "structured_outputs": ({"choice": ["up", "down"]}, "up|down"),
    "json_schema": (json.dumps(SCHEMA), None),
    "grammar": (GBNF, r"(ab|cd)+\."),
    "regex": (DIGITS, DIGITS),
    "ebnf": (GBNF, r"(ab|cd)+\."),
}
STRUCTURED: list[tuple[dict[str, Any], str | None]] = [
    ({"json": SCHEMA}, None),
    ({"json": json.dumps(SCHEMA), "regex": None}, None),
    ({"regex": DIGITS}, DIGITS),
    ({"grammar": 'start: "x" /y+/'}, "xy+"),
]
ASK = {"model": "tiny", "max_tokens": 40, "temperature": 1, "seed": 3}
MESSAGES = [{"role": "user", "content": "say it"}]
# what is known of vLLM, SGLang, llama.cpp, OpenAI and Anthropic to hold an answer to a shape
CONSTRAINTS = (
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "structured_outputs", "structural_tag", "json_schema", "grammar",
    "grammar_lazy", "grammar_triggers", "regex", "ebnf", "allowed_token_ids", "bad_words",
    "logit_bias", "logits_processors", "custom_logit_processor", "stop", "stop_token_ids",
    "stop_regex", "min_tokens", "max_tokens", "truncate_prompt_tokens", "chat_template",
    # its prompt_token_ids take the place of the messages
    "kv_transfer_params",
    "tool_choice", "parallel_tool_calls", "function_call", "output_format", "output_config",
)  # fmt: skip


def keeps(text: str, pattern: str | None) -> bool:
    if pattern is not None:
        return re.fullmatch(pattern, text) is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def test_every_constraint_is_honoured_or_refused() -> None:
    known = {*ChatBody.model_fields, *CompletionBody.model_fields, *MessagesBody.model_fields}
    for name in CONSTRAINTS:
        assert (name in known) != (name in REFUSED), name
    assert not set(REFUSED) & known, "a field that is honoured is not refused"
    assert not IGNORED & (known | set(REFUSED) | set(CONSTRAINTS))


@pytest.mark.parametrize("name", HONOURED)
def test_other_servers_fields_hold_an_answer(server: Served, name: str) -> None:
    value, pattern = HONOURED[name]
    reply = server.post("/v1/chat/completions", ASK | {"messages": MESSAGES, name: value})
    assert keeps(reply.json["choices"][0]["message"]["content"], pattern), reply.body
    reply = server.post("/v1/completions", ASK | {"prompt": "say it", name: value})
    assert keeps(reply.json["choices"][0]["text"], pattern), reply.body


@pytest.mark.parametrize("name", HONOURED)
def test_they_hold_a_response(server: Served, name: str) -> None:
    value, pattern = HONOURED[name]
    body = ASK | {"input": "say it", "max_tokens": None, "max_output_tokens": 40, name: value}
    reply = server.post("/v1/responses", body)
    assert keeps(reply.json["output"][0]["content"][0]["text"], pattern), reply.body


def test_a_response_drops_nothing_that_a_chat_honours(server: Served) -> None:
    """Each field of the other OpenAI API is a field here or is refused by name."""
    known = set(ResponseBody.model_fields)
    assert not known & set(NOT_HERE)
    harmless = {"logprobs", "tool_choice", "tools", "parallel_tool_calls"}
    for name in {*ChatBody.model_fields, *CompletionBody.model_fields} - harmless:
        assert (name in known) != (name in NOT_HERE), name
    for name in NOT_HERE:
        body = {"model": "tiny", "input": "say it", name: [7]}
        reply = server.post("/v1/responses", body)
        assert (reply.status, reply.json["error"]["param"]) == (400, name), reply.body


@pytest.mark.parametrize(("value", "pattern"), STRUCTURED)
def test_structured_outputs(server: Served, value: dict[str, Any], pattern: str | None) -> None:
    body = ASK | {"messages": MESSAGES, "structured_outputs": value}
    found = server.post("/v1/chat/completions", body).json["choices"][0]
    assert keeps(found["message"]["content"], pattern)


@pytest.mark.parametrize("name", ["guided_regex", "guided_choice", "guided_grammar"])
def test_behind_a_thought_too(strict_server: Served, name: str) -> None:
    value, pattern = HONOURED[name]
    body = ASK | {"messages": MESSAGES, name: value, "user": name}
    reply = strict_server.post("/v1/chat/completions", body, authorization=f"Bearer {KEYS[0]}").json
    assert keeps(reply["choices"][0]["message"]["content"], pattern), reply


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(server: Served, name: str) -> None:
    value = {"repeat_penalty": 1.3}.get(name, 7)
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "say it"}),
        ("/v1/messages", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "say it", "max_tokens": None}),
    ):
        reply = server.post(path, ASK | body | {name: value})
        assert reply.status == 400, (path, reply.body)
        assert name in reply.json["error"]["message"]


@pytest.mark.parametrize("name", ON_OPENAI_ALONE)
def test_what_one_api_honours_the_other_does_not_drop(server: Served, name: str) -> None:
    reply = server.post("/v1/messages", ASK | {"messages": MESSAGES, name: [7]})
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert name in reply.json["error"]["message"]
    assert name in {*ChatBody.model_fields, *CompletionBody.model_fields}


def test_values_that_ask_for_nothing_pass(server: Served) -> None:
    off: dict[str, Any] = {
        "allowed_token_ids": None,
        "bad_words": [],
        "mirostat": 0,
        "repeat_penalty": 1.0,
    }
    off |= {"skip_special_tokens": True, "top_n_sigma": -1, "guided_json": None, "store": True}
    assert server.post("/v1/completions", ASK | off | {"prompt": "hi"}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(server: Served, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/completions", ASK | {"prompt": "hi"} | fields)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param


NEVER = {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}
IMPOSSIBLE: dict[str, Any] = {
    "response_format": {"type": "json_object", "schema": NEVER},
    "guided_json": NEVER,
    "guided_regex": "(orchid",
    "guided_choice": ["orchid" * 50] * 700,
    "guided_grammar": "root ::= orchid",
    "structured_outputs": {"regex": "(orchid"},
    "json_schema": json.dumps(NEVER),
    "grammar": "start: orchid",
    "regex": "(orchid",
    "ebnf": "root ::= orchid",
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_enforced_is_named_as_the_caller_did(server: Served, name: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": ["hi", "ho"]}),
    ):
        reply = server.post(path, ASK | body | {name: IMPOSSIBLE[name]})
        assert (reply.status, reply.json["error"]["param"]) == (400, name), reply.body
    # a pattern is quoted to its owner, and not in the log
    assert "orchid" not in reason_of(InvalidRequest("near orchid", param=name))


@pytest.mark.parametrize("name", ["guided_regex", "guided_grammar"])
def test_behind_a_thought_it_is_named_too(strict_server: Served, name: str) -> None:
    body = ASK | {"messages": MESSAGES, name: IMPOSSIBLE[name]}
    reply = strict_server.post("/v1/chat/completions", body, authorization=f"Bearer {KEYS[0]}")
    assert (reply.status, reply.json["error"]["param"]) == (400, name), reply.body


OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize("seed", range(3))
def test_a_strict_schema_is_closed(server: Served, seed: int) -> None:
    """As the vendors promise of it: no property that nobody named."""
    fields = {"temperature": 1.0, "seed": seed, "max_tokens": 60, "messages": MESSAGES}
    wanted = {"name": "x", "schema": OPEN, "strict": True}
    body = ASK | fields | {"response_format": {"type": "json_schema", "json_schema": wanted}}
    text = server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"a"}
    body = ASK | fields | {"output_format": {"type": "json_schema", "schema": OPEN}}
    text = server.post("/v1/messages", body).json["content"][0]["text"]
    assert set(json.loads(text)) == {"a"}


def test_a_text_that_nothing_could_end_is_marked(server: Served) -> None:
    body = ASK | {"messages": MESSAGES, "max_tokens": 9}
    cut = server.post("/v1/chat/completions", body | {"regex": "[a-e]{50}X", "n": 2}).json
    assert [found["finish_reason"] for found in cut["choices"]] == ["length"] * 2
    assert cut["coterie"]["unfinished"] == [0, 1]
    ended = server.post("/v1/chat/completions", body | {"regex": "x[a-e]+X"}).json
    assert re.fullmatch("x[a-e]+X", ended["choices"][0]["message"]["content"])
    assert "unfinished" not in ended["coterie"]
    ask = {"prompt": "say it", "max_tokens": 9, "seed": 1, "temperature": 1.0}
    verdicts = [
        server.post("/v1/infer", ask | {"regex": regex}).json["validation"]["valid"]
        for regex in ("[a-e]{50}X", "x[a-e]+X")
    ]
    assert verdicts == [False, True]
