"""Tools, calls and results in a model's own template, and in one that knows nothing of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import InvalidRequest
from coterie.core.request import Chat, Message, Text, ToolCall
from coterie.models.text.tokenizer import Tokenizer, is_long, load_tokenizer
from coterie.models.text.tool_format import FORMATS, ToolSupport, tool_support, turns_of
from tests.helpers.models.tiny import tiny_checkpoint

# Qwen's way: tools in the system turn, results of one turn together
QWEN = """\
{%- if tools %}{{ '<|turn|>system\\n' }}{% if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}{% endif %}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}
{%- endfor %}{{ 'Answer in <tool_call>{"name": ..., "arguments": ...}</tool_call>' + eos_token }}
{%- endif %}{% for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|turn|>' + message.role + '\\n' + message.content + eos_token }}
{%- elif message.role == 'assistant' %}{{ '<|turn|>assistant' }}{% if message.content %}
{{- '\\n' + message.content }}{% endif %}{% for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": '
 + (tool_call.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ eos_token }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|turn|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ eos_token }}{% endif %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""

# Llama 3.1's way: tools in the first user turn, one call a turn, results as JSON
LLAMA = """\
{{- bos_token }}{% if tools is not none %}{{ 'Environment: ipython\\n' }}{% for t in tools %}
{{- t | tojson(indent=4) }}{% endfor %}
{{- 'Respond as {"name": function name, "parameters": dictionary}' }}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|turn|>' + message['role'] + '\\n\\n' + message['content'] | trim + eos_token }}
{%- elif 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|turn|>assistant\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
{{- tool_call.arguments | tojson }}{{ '}' + eos_token }}
{%- else %}{{ '<|turn|>ipython\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}{% else %}{{ message.content }}{% endif %}{{ eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n\\n' }}{% endif %}"""

TOOLS = (
    {
        "name": "weather",
        "description": "Tells ‘it’",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
)
PARIS = ToolCall("a1", "weather", '{"city": "Paris é"}')
ROME = ToolCall("a2", "weather", '{"city":"Rome"}')
TURNS = (
    Message("user", "Where is it warm?"),
    Message("assistant", "I look.", (PARIS,)),
    Message("tool", "12 degrees", (), "a1"),
    Message("assistant", "Not there."),
    Message("user", "Go on"),
)
PAIR = (
    Message("user", "Both?"),
    Message("assistant", "", (PARIS, ROME)),
    Message("tool", "12", (), "a1"),
    Message("tool", "30", (), "a2"),
)


def tokenizer_with(path: Path, template: str) -> Tokenizer:
    source = tiny_checkpoint("llama")
    for name in ("tokenizer.json", "config.json"):
        (path / name).write_bytes((source / name).read_bytes())
    facts = json.loads((source / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(facts | {"chat_template": template}))
    return load_tokenizer(path)


def as_vendors_write(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """What transformers' documentation asks for."""
    written: list[dict[str, Any]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        written.append(turn)
    return written


@pytest.mark.parametrize(("template", "name"), [(QWEN, "hermes"), (LLAMA, "llama")])
def test_a_template_with_tools_renders_as_in_transformers(
    template: str, name: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = tokenizer_with(tmp_path, template)
    assert tokenizer.tool_support == ToolSupport(FORMATS[name], native=True)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    conversations = [TURNS[:1], TURNS[:3], TURNS]
    if name == "hermes":
        conversations += [PAIR, (Message("system", "Be kind."), *PAIR)]
    for messages in conversations:
        for given in (TOOLS, ()):
            expected = oracle.apply_chat_template(
                as_vendors_write(messages),
                tools=tools if given else None,
                tokenize=False,
                add_generation_prompt=True,
            )
            assert tokenizer.render(Chat(messages, tools=given)) == expected


@pytest.mark.parametrize("template", [QWEN, LLAMA, "{{ messages[1].content }}"])
@pytest.mark.parametrize("depth", [65, 300, 900, 5_000])
def test_arguments_too_deep_to_walk_stay_text(template: str, depth: int, tmp_path: Path) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    call = ToolCall("a1", "weather", deep)
    messages = (TURNS[0], Message("assistant", "", (call,)), TURNS[2])
    text = tokenizer_with(tmp_path, template).render(Chat(messages))
    assert json.dumps(deep) in text


def test_long_chats_are_known_by_all_they_hold() -> None:
    assert not is_long(Chat(TURNS)) and not is_long(Text("a" * 8_000))
    call = ToolCall("a", "weather", '{"city": "' + "a" * 8_000 + '"}')
    assert is_long(Chat((TURNS[0], Message("assistant", "", (call,)), TURNS[2])))
    assert is_long(Chat((Message("user", ""),) * 1_000))
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    assert not is_long(Chat(TURNS, tools=TOOLS * 8)) and is_long(Text("a" * 8_001))
    assert is_long(Chat(TURNS, tools=({"name": "wide", "description": "", "parameters": wide},)))


def test_several_calls_where_a_template_takes_one(tmp_path: Path) -> None:
    """Each call stands before its own result."""
    text = tokenizer_with(tmp_path, LLAMA).render(Chat(PAIR, tools=TOOLS))
    calls = text[text.index("Both?") :].split("</s>")
    assert calls[1:5] == [
        '<|turn|>assistant\n\n{"name": "weather", "parameters": {"city": "Paris é"}}',
        '<|turn|>ipython\n\n"12"',
        '<|turn|>assistant\n\n{"name": "weather", "parameters": {"city": "Rome"}}',
        '<|turn|>ipython\n\n"30"',
    ]


def test_a_template_that_knows_no_tools() -> None:
    """System, user and assistant turns say it all, in Hermes' words."""
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    assert tokenizer.tool_support == ToolSupport(FORMATS["hermes"], native=False)
    text = tokenizer.render(Chat((Message("system", "Be kind."), *PAIR), tools=TOOLS))
    head, *turns = text.split("<|turn|>")[1:]
    assert head.startswith("system\nBe kind.\n\n# Tools\n")
    for tool in TOOLS:
        assert json.dumps({"type": "function", "function": tool}, ensure_ascii=False) in head
    assert turns == [
        "user\nBoth?</s>\n",
        'assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris é"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call></s>\n",
        "user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n30\n</tool_response></s>\n",
        "assistant\n",
    ]
    # without a system turn of the caller's, one is made; without tools, none
    assert tokenizer.render(Chat(TURNS[:1], tools=TOOLS)).startswith("<s><|turn|>system\n# Tools")
    assert "# Tools" not in tokenizer.render(Chat(PAIR))


def test_arguments_that_are_no_object() -> None:
    """A model may have been cut short: its own text stands."""
    for text in ('{"city": "Pa', "[1]", "3", ""):
        turn = Message("assistant", "", (replace(PARIS, arguments=text),))
        support = ToolSupport(FORMATS["hermes"], native=True)
        [shown], _ = turns_of(Chat((turn,)), support)
        assert shown["tool_calls"][0]["function"]["arguments"] == (text or {})


@pytest.mark.parametrize(
    ("template", "name", "native"),
    [
        (None, "hermes", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "hermes", False),
        # tools in a way that is not read here: ours is told instead
        ("{{ tools }}{{ tool_calls }}[TOOL_CALLS]", "hermes", False),
        ("{{ tools }}{{ tool_calls }}<tool_call>\n<function=", "hermes", False),
        ("{{ tools }}{{ tool_calls }}<tool_call>name<arg_key>", "hermes", False),
        ('{{ tools }}{{ m.tool_calls }}<tool_call>{"name", "arguments"', "hermes", True),
        ('{{ tools }}{{ m.tool_calls }}<|python_tag|>"parameters": ', "llama", True),
    ],
)
def test_a_format_is_found_from_the_template(template: str | None, name: str, native: bool) -> None:
    assert tool_support(template) == ToolSupport(FORMATS[name], native)


def test_a_refusal_of_the_template_is_the_callers(tmp_path: Path) -> None:
    template = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + QWEN
    with pytest.raises(InvalidRequest, match="no tools"):
        tokenizer_with(tmp_path, template).render(Chat(TURNS[:1], tools=TOOLS))
