"""Chat templates: rendered as transformers renders them, and harmless when they are hostile."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coterie.core.errors import InvalidRequest, WeightsError
from coterie.core.request import Chat, Message
from coterie.models.text.chat_template import ChatTemplate
from coterie.models.text.tokenizer import load_tokenizer
from tests.helpers.models.tiny import tiny_checkpoint

LLAMA3 = """{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- bos_token }}{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- raise_exception("no tools here") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')
                .split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n')
                + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

CORNERS = """{% for m in messages %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
    {{ m | tojson }}|{{ m.content | upper | replace('A', '<') | indent(2) }}
  {% generation %}{{ [m.role, m.content] | join('/') }}{% endgeneration %}
{% endfor %}
{{ dict(a=1, b=[1, 2]) | tojson(indent=2) }}{{ '%s-%d' % ('x', 3) }}{{ '{}{:>4}'.format('y', 2) }}
{% for m in messages %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.length }}{{ loop.last }}{%
endfor %}{{ missing_name }}{{ eos_token ~ '!' ~ 3 }}{{ range(4) | list }}{{ 'ab' * 3 }}{{ 2 ** 5 }}
{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('z') }}{{ messages | map(attribute='role')
| join(',') }}{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}
"""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "corners": CORNERS,
}

CHATS: list[list[tuple[str, str]]] = [
    [("user", "Hi")],
    [("system", " Be brief. "), ("user", "  spaces  \n")],
    [("user", "a"), ("assistant", "b"), ("user", "c <b>&</b> 'quoted' \"double\" é 😀")],
    [("system", "s"), ("user", "1"), ("assistant", "<think>\nwhy\n</think>\n\n2"), ("user", "3")],
    [("user", "a"), ("assistant", "<think>\nw\n</think>\n\ntail")],
    [("assistant", "first")],
    [("user", "{{ 7 * 7 }} {% raw %}")],
    [("tool", "x"), ("user", "y")],
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))


def dicts(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def ours(source: str) -> ChatTemplate:
    specials = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return ChatTemplate(source, specials)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, oracle: Any) -> None:
    template = ours(TEMPLATES[name])
    refused = 0
    for chat in CHATS:
        for options in ({}, {"enable_thinking": False, "date_string": "1 May 2030"}):
            for prompt in (True, False):
                settings = {"add_generation_prompt": prompt, **options}
                try:
                    expected = oracle.apply_chat_template(
                        dicts(chat), chat_template=TEMPLATES[name], tokenize=False, **settings
                    )
                except Exception:
                    refused += 1
                    with pytest.raises(InvalidRequest):
                        template.render(dicts(chat), settings)
                    continue
                assert template.render(dicts(chat), settings) == expected, chat
    assert refused < len(CHATS) * 4


@pytest.mark.parametrize("name", ["smollm2", "llama3", "mistral", "qwen3"])
def test_the_last_message_can_be_continued(name: str, oracle: Any) -> None:
    template = ours(TEMPLATES[name])
    for ending in ("The answer", "The answer is ", "x\n"):
        chat = [("user", "q"), ("assistant", ending)]
        expected = oracle.apply_chat_template(
            dicts(chat),
            chat_template=TEMPLATES[name],
            tokenize=False,
            continue_final_message=True,
        )
        got = template.render_open(dicts(chat), {"add_generation_prompt": False})
        assert got == expected
        assert got.rstrip().endswith(ending.rstrip())


def test_the_default_model_renders_as_in_transformers(
    default_model_path: Path, oracle: Any
) -> None:
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer.chat_template == SMOLLM2
    for chat in CHATS:
        value = Chat(tuple(Message(role, content) for role, content in chat))
        assert tokenizer.render(value) == oracle.apply_chat_template(
            dicts(chat), chat_template=SMOLLM2, tokenize=False, add_generation_prompt=True
        )
    opened = Chat((Message("user", "a"), Message("assistant", "b")), {}, False)
    assert tokenizer.render(opened).endswith("<|im_start|>assistant\nb")


def test_what_loops_tell_equals_what_the_plain_sandbox_tells() -> None:
    """Numbers of loops are read without the sandbox's checks, and names from a copied dict."""
    rng = random.Random()
    names = ("first", "last", "index", "index0", "length", "revindex", "depth", "_iterator", "no")
    for _ in range(60):
        shown = "".join(f"{{{{ loop.{rng.choice(names)} }}}}," for _ in range(4))
        source = (
            "{% for message in messages %}" + shown + "{% for x in range(2) %}{{ loop.last }}"
            "{% endfor %}{% endfor %}{{ namespace is defined }}{{ dict(a=1) }}{{ bos_token }}"
        )
        turns = [{"role": "user", "content": "x"} for _ in range(rng.randrange(5))]
        plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            expected = plain.from_string(source).render(messages=turns, bos_token="<s>")
        except SecurityError:
            with pytest.raises(WeightsError):
                ChatTemplate(source, {"bos_token": "<s>"}).render(turns, {})
            continue
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(turns, {}) == expected


def test_a_refusal_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequest, match="must alternate") as caught:
        ours(MISTRAL).render(dicts([("user", "a"), ("user", "b")]), {})
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="continued"):
        ours("{{ 'fixed' }}").render_open(dicts([("assistant", "b")]), {})


FIRST_ONLY = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning') }}{% endif %}
<|{{ m.role }}|>{{ m.content }}{% endfor %}"""
DROPS = """{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% endif %}
{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "takes"),
    [(TEMPLATES["smollm2"], True), (FIRST_ONLY, False), (DROPS, False)],
    ids=["smollm2", "first only", "drops"],
)
def test_several_system_messages(source: str, takes: bool) -> None:
    """Apart and in their places where the template writes them so, else one at the start."""
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    turns = (Message("user", "q"), Message("assistant", "a"))
    ones, twos = Message("system", "Rule one."), Message("system", "Rule two.")
    joined = (Message("system", "Rule one.\n\nRule two."), *turns, Message("user", "r"))
    for messages in (
        (ones, twos, *turns, Message("user", "r")),
        (ones, *turns, twos, Message("user", "r")),
        (*turns, ones, twos, Message("user", "r")),
    ):
        got = tokenizer.render(Chat(messages, template=source))
        if takes:
            plain = [{"role": one.role, "content": one.content} for one in messages]
            template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
            assert got == template.render(plain, {"add_generation_prompt": True})
        else:
            assert got == tokenizer.render(Chat(joined, template=source))
        assert got.count("Rule one.") == got.count("Rule two.") == 1


def test_reserved_options_are_refused_and_objects_are_text() -> None:
    tokenizer = load_tokenizer(tiny_checkpoint("llama"))
    message = (Message("user", "a"),)
    with pytest.raises(InvalidRequest, match="messages"):
        tokenizer.render(Chat(message, {"messages": []}))
    assert "a" in tokenizer.render(Chat(message, {"anything": object()}))


ESCAPES = {
    "attribute escape": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "string class": "{{ ''.__class__.__mro__ }}",
    "format escape": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "globals": "{{ raise_exception.__globals__['os'].system('true') }}",
    "attr filter": "{{ (messages|attr('__class__')).mro() }}",
    "namespace dunder": "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
    "dict attributes": "{{ dict.__class__.__base__.__subclasses__() }}",
    "mutation": "{{ messages.append(1) }}",
}

SLOW = {
    "huge range": "{% for i in range(10**9) %}{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "slow filters": "{% for i in range(99999) %}{% set x = range(99999)|map('abs')|sum %}"
    "{% endfor %}",
    "slow search": "{% set l = range(99999)|list %}{% for i in range(99999) %}{% if 'x' in l %}"
    "{% endif %}{% endfor %}",
    "filtered loops": "{% for i in range(99999)|map('abs') %}{% for j in range(99999)|map('abs') %}"
    "{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "tree recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "tag flood": "{% macro f() %}{% for i in range(999) %}{{ g() }}{% endfor %}{% endmacro %}"
    "{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
}

LARGE = {
    "repeat": "{{ 'a' * 10**10 }}",
    "list repeat": "{{ ([0] * 10**10)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "products": "{% set n = namespace(x=2) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}",
    "doubling +": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "doubling ~": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 100000 %}{{ x|replace('a', x) }}",
    "replace keyword": "{% set x = 'a' * 100000 %}{{ x|replace('a', new=x) }}",
    "join": "{% set x = 'a' * 100000 %}{{ ([x] * 100000)|join }}",
    "join between": "{% set x = 'a' * 100000 %}{{ range(99999)|join(x) }}",
    "join method": "{% set x = 'a' * 100000 %}{{ x.join(['b'] * 100000) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "format width": "{{ '{:>9999999999}'.format(1) }}",
    "format argument": "{{ '{:>{w}}'.format(1, w=10**10) }}",
    "percent width": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent filter": "{{ '%9999999999d'|format(1) }}",
    "format fields": "{% set x = 'a' * 100000 %}{{ ('{0}' * 100000).format(x) }}",
    "indent": "{{ ('a\n' * 10)|indent(10**10) }}",
    "json indent": "{{ [1]|tojson(indent=10**10) }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "long output": "{% set x = 'a' * 1000000 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    "many values": "{% set n = namespace(l=[]) %}{% set x = 'a' * 9000000 %}"
    "{% for i in range(9999) %}{% set n.l = n.l + [x ~ i] %}{% endfor %}",
}


def stopped(source: str) -> None:
    with pytest.raises((WeightsError, InvalidRequest)):
        text = ours(source).render(dicts([("user", "x")]), {})
        raise AssertionError(f"rendered {len(text)} characters: {text[:200]}")


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_are_stopped(name: str) -> None:
    stopped(ESCAPES[name])


# each runs for seconds before it is stopped: `make test` tries one
ENDLESS = [pytest.param(name, marks=pytest.mark.full) for name in list(SLOW)[1:]]


@pytest.mark.parametrize("name", [*list(SLOW)[:1], *ENDLESS])
def test_endless_templates_are_stopped(name: str) -> None:
    started = time.process_time()
    stopped(SLOW[name])
    assert time.process_time() - started < 10


@pytest.mark.parametrize("name", LARGE)
def test_large_values_are_stopped(name: str) -> None:
    tracemalloc.start()
    try:
        stopped(LARGE[name])
        assert tracemalloc.get_traced_memory()[1] < 250_000_000
    finally:
        tracemalloc.stop()


def test_broken_templates_are_the_models_error() -> None:
    for source in ("{% for x in %}", "{{ ", "{% unknown_tag %}", "{{ x|no_such_filter }}"):
        with pytest.raises(WeightsError, match="not valid Jinja"):
            ours(source).render(dicts([("user", "x")]), {})


def test_long_chats_fit_the_budget() -> None:
    chat = [("user" if i % 2 == 0 else "assistant", "word " * 200) for i in range(9_999)]
    for name in ("smollm2", "llama3", "mistral", "qwen3"):
        assert len(ours(TEMPLATES[name]).render(dicts(chat), {})) > 9_000_000
