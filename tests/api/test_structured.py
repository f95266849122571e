"""Structured output over real HTTP on all three APIs, and what callers may get wrong."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import anthropic
import jsonschema
import msgspec
import openai
import pytest

from coterie.api.openai.types import ChatBody
from coterie.api.response_format import response_format_of, schema_format, vendor_format_of
from coterie.core.errors import InvalidRequest
from coterie.core.request import ResponseFormat
from tests.helpers.serving.server_process import Served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
ASK = [{"role": "user", "content": "who?"}]


def valid(text: str, schema: dict[str, Any] = SCHEMA) -> bool:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return True


def chat(server: Served, **fields: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    given: dict[str, Any] = {"max_tokens": 60, "temperature": 1, "seed": 5, **fields}
    return client.chat.completions.create(model="tiny", messages=ASK, **given)


def test_openai_schema_for_every_choice(server: Served) -> None:
    reply = chat(server, response_format=FORMAT, n=4)
    texts = [choice.message.content for choice in reply.choices]
    assert len(set(texts)) > 1
    assert all(valid(text) for text in texts)


def test_openai_stream_is_the_same_text(server: Served) -> None:
    whole = chat(server, response_format=FORMAT).choices[0].message.content
    parts = chat(server, response_format=FORMAT, stream=True)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == whole and valid(streamed)


def test_openai_any_object(server: Served) -> None:
    reply = chat(server, response_format={"type": "json_object"}, temperature=2)
    assert isinstance(json.loads(reply.choices[0].message.content), dict)


def test_anthropic_output_format(server: Served) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    reply = client.messages.create(
        model="tiny",
        max_tokens=60,
        messages=[{"role": "user", "content": "who?"}],
        extra_body={"output_format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert valid(reply.content[0].text)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("regex", r"(yes|no), [0-9]{2,4}", r"(yes|no), [0-9]{2,4}"),
        ("grammar", 'root ::= ("ab" | "cd")+ "."', r"(ab|cd)+\."),
        ("grammar", {"type": "gbnf", "text": 'root ::= "x" [0-9]+ "y"'}, "x[0-9]+y"),
        ("grammar", 'start: WORD ("-" WORD)*\nWORD: /[a-f]{1,4}/', "[a-f]{1,4}(-[a-f]{1,4})*"),
        ("response_format", FORMAT, None),
    ],
    ids=["regex", "gbnf text", "gbnf", "lark text", "schema"],
)
def test_native_fields(server: Served, field: str, value: Any, pattern: str | None) -> None:
    body = {"prompt": "go", "max_tokens": 60, "temperature": 1.0, "seed": 3, field: value}
    reply = server.post("/v1/infer", body)
    assert reply.status == 200, reply.body
    text = reply.json["text"]
    assert re.fullmatch(pattern, text) if pattern else valid(text), text


def nested(depth: int) -> Any:
    return {"items": nested(depth - 1)} if depth else {}


HOSTILE: dict[str, Any] = {
    "wrong type": {"type": "thing"},
    "not enforceable": {"type": "array", "uniqueItems": True},
    "nothing fits": {"allOf": [{"type": "string"}, {"type": "number"}]},
    "refers to itself": {"$ref": "#"},
    "elsewhere": {"$ref": "http://localhost:1/x"},
    "deep": nested(150),
    "eats the CPU": {"type": "integer", "multipleOf": 99999989},
    "too many fields": {"type": "object", "properties": {f"p{i}": {} for i in range(4000)}},
    "pattern": {"type": "string", "pattern": "(?<!a)b"},
    "huge": {"enum": ["x" * 250_000]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_a_400_that_names_the_field(server: Served, name: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": HOSTILE[name]}}
    body = {"model": "tiny", "messages": ASK, "response_format": wanted, "max_tokens": 5}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 400, reply.body
    assert reply.json["error"]["param"].startswith("response_format")


TURNS = '"messages":[{"role":"user","content":"x"}],"max_tokens":4'
OLLAMA = TURNS.replace(',"max_tokens":4', ',"stream":false')
STRICT = '{"name":"x","strict":true,"schema":SCHEMA}'
TOOL = '{"type":"function","function":{"name":"f","parameters":SCHEMA}}'
PARTS = '"input":[{"type":"message","role":"user","content":VALUE}]'
# bodies with a schema, a value or a text that nests; SCHEMA, VALUE and TEXT are replaced
NESTED: dict[str, tuple[str, str]] = {
    "format": ("/v1/chat/completions", TURNS + ',"response_format":{"type":"json_schema",'
               '"json_schema":{"name":"x","schema":SCHEMA}}'),
    "strict": ("/v1/chat/completions", TURNS + ',"response_format":{"type":"json_schema",'
               f'"json_schema":{STRICT}}}'),
    "object": ("/v1/chat/completions",
               TURNS + ',"response_format":{"type":"json_object","schema":SCHEMA}'),
    "vllm": ("/v1/completions", '"prompt":"x","max_tokens":4,"guided_json":SCHEMA'),
    "vllm's text": ("/v1/completions", '"prompt":"x","max_tokens":4,"guided_json":"TEXT"'),
    "structured": ("/v1/completions", '"prompt":"x","structured_outputs":{"json":SCHEMA}'),
    "tool": ("/v1/chat/completions", TURNS + f',"tools":[{TOOL}],"tool_choice":"required"'),
    "kwargs": ("/v1/chat/completions", TURNS + ',"chat_template_kwargs":{"a":VALUE}'),
    "unknown field": ("/v1/chat/completions", TURNS + ',"something":VALUE'),
    "anthropic": ("/v1/messages", TURNS + ',"output_format":{"type":"json_schema",'
                  '"schema":SCHEMA}'),
    "anthropic's tool": ("/v1/messages", TURNS + ',"tools":[{"name":"f","input_schema":SCHEMA}]'),
    "anthropic's call": ("/v1/messages", '"max_tokens":4,"messages":[{"role":"assistant",'
                         '"content":[{"type":"tool_use","id":"a","name":"f","input":VALUE}]}]'),
    "responses": ("/v1/responses", '"input":"x","text":{"format":{"type":"json_schema",'
                  '"name":"x","strict":true,"schema":SCHEMA}}'),
    "responses' parts": ("/v1/responses", PARTS),
    "ollama": ("/api/chat", OLLAMA + ',"format":SCHEMA'),
    "ollama's tool": ("/api/chat", OLLAMA + f',"tools":[{TOOL}]'),
    "llama.cpp": ("/completion", '"prompt":"x","json_schema":SCHEMA'),
    "native": ("/v1/infer", '"prompt":"x","response_format":{"type":"json_schema",'
               f'"json_schema":{STRICT}}}'),
    "tokenize": ("/tokenize", TURNS + f',"tools":[{TOOL}]'),
    "gbnf": ("/v1/infer", '"prompt":"x","grammar":"root ::= GROUPS"'),
    "lark": ("/v1/infer", '"prompt":"x","grammar":"start: GROUPS"'),
    "regex": ("/v1/infer", '"prompt":"x","regex":"BRACKETS"'),
}  # fmt: skip
# the first is allowed where nothing walks the value
DEPTHS = (150, 400, 900, 4900)


@pytest.mark.parametrize("name", NESTED)
def test_what_nests_deeply_is_a_400(server: Served, name: str) -> None:
    path, body = NESTED[name]
    model = "" if path == "/v1/infer" else '"model":"tiny",'
    for depth in DEPTHS:
        half = depth // 2
        schema = '{"type":"object","properties":{"a":' * half + "{}" + "}}" * half
        texts = {
            "SCHEMA": schema,
            "VALUE": '{"a":' * depth + "{}" + "}" * depth,
            "TEXT": schema.replace('"', '\\"'),
            "GROUPS": "(" * depth + '\\"a\\"' + ")" * depth,
            "BRACKETS": "(" * depth + "a" + ")" * depth,
        }
        text = body
        for word, value in texts.items():
            text = text.replace(word, value)
        reply = server.post(path, f"{{{model}{text}}}".encode())
        if depth == DEPTHS[0] and reply.status == 200:
            continue
        assert reply.status == 400, (depth, reply.status, reply.body[:300])
        said = reply.body.decode()
        assert "nested" in said or "cannot be enforced" in said or "too long" in said, said[:300]


def test_grammars_that_kill_their_judge_leave_the_server_alone(server: Served) -> None:
    """A chain of rules that overflows the compiler's stack; others are served meanwhile."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(6500))
    body = {"prompt": "go", "grammar": f'start: r0\n{rules}\nr6500: "a"', "max_tokens": 3}
    replies = list[Any]()
    asking = threading.Thread(target=lambda: replies.append(server.post("/v1/infer", body)))
    asking.start()
    slowest = 0.0
    while asking.is_alive():
        started = time.monotonic()
        assert server.get("/health/live").status == 200
        slowest = max(slowest, time.monotonic() - started)
    asking.join()
    assert replies[0].status == 400 and "too long" in replies[0].json["error"]["message"]
    assert slowest < 1.0
    assert valid(chat(server, response_format=FORMAT).choices[0].message.content)


def test_what_a_format_reads_as() -> None:
    schema = '{"type":"object"}'
    assert response_format_of(None) is None
    assert response_format_of({"type": "text"}) is None
    assert response_format_of({"type": "text"}, regex="a") == ResponseFormat("regex", "a")
    assert response_format_of({"type": "json_object"}) == ResponseFormat("json_object")
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert response_format_of(wrapped) == ResponseFormat("json_schema", schema, closed=True)
    bare = {"type": "json_schema", "schema": {"type": "object", "x-guidance": {"lenient": True}}}
    assert response_format_of(bare) == ResponseFormat("json_schema", schema, closed=True)
    wrapped["json_schema"]["strict"] = False  # type: ignore[index]
    loose = response_format_of(wrapped)
    assert loose is not None and json.loads(loose.text)["x-guidance"] == {"lenient": True}
    assert response_format_of(None, "start: A") == ResponseFormat("lark", "start: A")
    assert response_format_of(None, 'root ::= "a"') == ResponseFormat("gbnf", 'root ::= "a"')


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "x", "schema": NAMED}}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": WRAPPED},
        {"response_format": {"type": "json_object", "schema": NAMED}},
        {"guided_json": NAMED},
        {"guided_json": json.dumps(NAMED)},
        {"json_schema": NAMED},
        {"structured_outputs": {"json": NAMED}},
        {"structured_outputs": {"json": NAMED, "disable_additional_properties": True}},
    ],
    ids=str,
)
def test_an_object_has_only_what_its_schema_names(body: dict[str, Any]) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], **body}
    answer_format, _ = vendor_format_of(ChatBody.model_validate(asked))
    assert answer_format is not None and answer_format.closed
    assert json.loads(answer_format.text) == NAMED | {"additionalProperties": False}


def test_an_object_that_may_have_more() -> None:
    asked = {"structured_outputs": {"json": NAMED, "disable_additional_properties": False}}
    messages = [{"role": "user", "content": "x"}]
    body = ChatBody.model_validate({"model": "m", "messages": messages, **asked})
    found, _ = vendor_format_of(body)
    assert found == ResponseFormat("json_schema", msgspec.json.encode(NAMED).decode())
    # what a schema says itself, and parts that cannot know each other
    said = NAMED | {"additionalProperties": {"type": "string"}}
    assert json.loads(schema_format(said).text) == said
    joined = {"allOf": [NAMED, {"properties": {"b": True}}]}
    assert json.loads(schema_format(joined).text) == joined and not schema_format(joined).closed
    beside = {**NAMED, "anyOf": [{"required": ["b"]}]}
    assert not schema_format({"type": "array", "items": beside}).closed
    nested = schema_format({"type": "array", "items": NAMED}, False)
    assert nested.closed and '"additionalProperties":false' in nested.text


def test_the_receipt_says_whether_objects_are_closed(server: Served) -> None:
    def told(**fields: Any) -> tuple[str, str]:
        asked = {"model": "tiny", "messages": ASK, "max_tokens": 60, "temperature": 0, **fields}
        reply = server.post("/v1/chat/completions", asked).json
        receipt = server.get(f"/v1/receipts/{reply['id']}").json
        return reply["choices"][0]["message"]["content"], receipt["plan"]["schema"]

    content, form = told(response_format=WRAPPED)
    assert set(json.loads(content)) == {"a"} and form == "closed"
    open_form = {"json": NAMED, "disable_additional_properties": False}
    assert told(structured_outputs=open_form)[1] == "open"
    assert told(guided_regex="[a-z]{3}")[1] == "" and told()[1] == ""


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("text",), "response_format"),
        (({"type": "yaml"},), "response_format.type"),
        (({"type": ["json_object"]},), "response_format.type"),
        (({"type": "json_schema"},), "response_format.json_schema"),
        (({"type": "json_schema", "json_schema": []},), "response_format.json_schema"),
        (({"type": "json_schema", "json_schema": {}},), "response_format.json_schema.schema"),
        (({"type": "json_schema", "schema": 5},), "response_format.schema"),
        (({"type": "json_schema", "schema": {}, "strict": "yes"},), "response_format.strict"),
        (({"type": "json_object"}, "start: A"), "grammar"),
        ((None, "start: A", "a"), "regex"),
        ((None, 5), "grammar"),
        ((None, {"type": "peg", "text": "a"}), "grammar.type"),
        ((None, {"type": "lark"}), "grammar.text"),
        ((None, None, " "), "regex"),
    ],
    ids=str,
)
def test_wrong_shapes_name_their_field(arguments: tuple[Any, ...], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        response_format_of(*arguments)
    assert caught.value.param == param
