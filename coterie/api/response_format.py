"""Turns the fields of a body that constrain its answer into one `ResponseFormat`.

Reads OpenAI's `response_format`, Anthropic's `output_format`, the native fields, and those of vLLM,
SGLang and llama.cpp. Only the form is checked here. `models/grammar/check.py` checks whether a
schema or grammar can be enforced; this module puts the name of the caller's field into its errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from coterie.api.tools.grammar import closed_schema, is_composed
from coterie.core.errors import CoterieError, InvalidRequest, UnsupportedFeature
from coterie.core.events import Event
from coterie.core.request import ResponseFormat
from coterie.core.value_check import is_deeper

# the name that the layers below use for every format
FORMAT = "response_format"
# lists and objects of a schema inside each other
MAX_DEPTH = 128
# how a Lark grammar is recognised: its first rule, or a directive of llguidance; GBNF has `root
# ::=`
_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:)")


def response_format_of(
    body_field: Any,
    grammar: Any = None,
    regex: Any = None,
    *,
    param: str = FORMAT,
) -> ResponseFormat | None:
    """The format of the answer; None if it is free. `param` is the name of `body_field` in
    errors."""
    given = [
        name
        for name, value in ((param, body_field), ("grammar", grammar), ("regex", regex))
        if value is not None and not _is_text(value)
    ]
    if len(given) > 1:
        raise InvalidRequest(f"give {given[0]} or {given[1]}, not both", param=given[1])
    if regex is not None:
        return ResponseFormat("regex", _text(regex, "regex"))
    if grammar is not None:
        return _grammar(grammar)
    return None if body_field is None else _vendor(body_field, param)


class ConstrainedBody(Protocol):
    """The fields by which other servers constrain an answer."""

    response_format: dict[str, Any] | None
    guided_json: Any
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    structured_outputs: dict[str, Any] | None
    json_schema: Any
    grammar: str | None
    regex: str | None
    ebnf: str | None


def vendor_format_of(body: ConstrainedBody) -> tuple[ResponseFormat | None, str]:
    """The format that a body of the OpenAI dialect asks for, and the field that held it."""
    given: list[tuple[str, ResponseFormat]] = []
    for name, read in _READERS.items():
        value = getattr(body, name)
        answer_format = None if value is None else read(value, name)
        if answer_format is not None:
            given.append((name, answer_format))
    if len(given) > 1:
        names = [name for name, _ in given]
        raise InvalidRequest(f"give {names[0]} or {names[1]}, not both", param=names[1])
    return (given[0][1], given[0][0]) if given else (None, FORMAT)


def format_named(events: AsyncGenerator[Event, None], field: str) -> AsyncGenerator[Event, None]:
    """The same events; an error about the format names the caller's `field`."""
    return events if field == FORMAT else _renamed(events, field)


async def _renamed(events: AsyncGenerator[Event, None], field: str) -> AsyncGenerator[Event, None]:
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except CoterieError as error:
            raise with_param_name(error, FORMAT, field) from None


def with_param_name(error: CoterieError, inner_name: str, body_name: str) -> CoterieError:
    """The error with the body's name of the field, if it is about the field that the layers below
    call `inner_name`."""
    if error.param == inner_name:
        error.param = body_name
    return error


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _vendor(field: Any, param: str) -> ResponseFormat | None:
    if not isinstance(field, dict):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    kind = field.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and field.get("schema") is None:
        return ResponseFormat("json_object")
    if kind == "structural_tag":
        raise UnsupportedFeature(
            f"{param}: structural tags are not available", param=f"{param}.type"
        )
    if kind == "json_object":
        # llama.cpp and others accept this form
        kind = "json_schema"
    if kind != "json_schema":
        raise InvalidRequest(
            f"{param}.type must be text, json_object or json_schema", param=f"{param}.type"
        )
    # OpenAI puts the schema into an object, Anthropic does not
    path: str = param
    holder: Any = field
    if "schema" not in field:
        path, holder = f"{param}.json_schema", field.get("json_schema")
        if not isinstance(holder, dict):
            raise InvalidRequest(f"{path} must be a JSON object", param=path)
    schema, strict = holder.get("schema"), holder.get("strict")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path}.schema must be a JSON object", param=f"{path}.schema")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.strict must be true or false", param=f"{path}.strict")
    return schema_format(schema, strict, f"{path}.schema")


def schema_format(
    schema: dict[str, Any],
    strict: bool | None = None,
    param: str = FORMAT,
    *,
    closed: bool = True,
) -> ResponseFormat:
    """The format of a schema. Not `strict`: skip keywords that cannot be enforced. `closed`: an
    object whose schema says nothing of further properties has only those that it names."""
    if is_deeper(schema, MAX_DEPTH):
        raise InvalidRequest(f"{param}: is nested deeper than {MAX_DEPTH}", param=param)
    closed = closed and not is_composed(schema)
    if closed:
        schema = closed_schema(schema)
    own = {key: value for key, value in schema.items() if key != "x-guidance"}
    if strict is False:
        own["x-guidance"] = {"lenient": True}
    return ResponseFormat("json_schema", msgspec.json.encode(own).decode(), closed)


def _schema(value: Any, param: str, *, closed: bool = True) -> ResponseFormat:
    """A schema, given as an object or as JSON text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise InvalidRequest(f"{param}: is not valid JSON", param=param) from None
        except RecursionError:
            raise InvalidRequest(f"{param}: is nested too deeply", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param}: must be a JSON schema", param=param)
    return schema_format(value, param=param, closed=closed)


def _choice(value: Any, param: str) -> ResponseFormat:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise InvalidRequest(f"{param}: must be a list of texts that is not empty", param=param)
    words = " | ".join(json.dumps(word, ensure_ascii=False) for word in value)
    return ResponseFormat("lark", f"start: {words}\n")


def _regex(value: Any, param: str) -> ResponseFormat:
    return ResponseFormat("regex", _text(value, param))


def _structured(value: Any, param: str) -> ResponseFormat | None:
    """vLLM's newer field for the same formats."""
    for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace"):
        if value.get(name):
            raise UnsupportedFeature(f"{param}.{name}: is not available", param=f"{param}.{name}")
    given = [name for name in _STRUCTURED if value.get(name) not in (None, False)]
    if len(given) != 1:
        names = ", ".join(_STRUCTURED)
        raise InvalidRequest(f"{param}: give exactly one of {names}", param=param)
    closed = value.get("disable_additional_properties")
    if closed is not None and not isinstance(closed, bool):
        field = f"{param}.disable_additional_properties"
        raise InvalidRequest(f"{field} must be true or false", param=field)
    if closed is False and given == ["json"]:
        return _schema(value["json"], f"{param}.json", closed=False)
    return _STRUCTURED[given[0]](value[given[0]], f"{param}.{given[0]}")


def _object(value: Any, param: str) -> ResponseFormat:
    return ResponseFormat("json_object")


def _grammar(value: Any, param: str = "grammar") -> ResponseFormat:
    if isinstance(value, str):
        text = _text(value, param)
        return ResponseFormat("lark" if _LARK.search(text) else "gbnf", text)
    if not isinstance(value, dict):
        raise InvalidRequest("grammar must be a text or {type, text}", param="grammar")
    kind = value.get("type")
    if kind not in ("lark", "gbnf"):
        raise InvalidRequest("grammar.type must be lark or gbnf", param="grammar.type")
    return ResponseFormat(kind, _text(value.get("text"), "grammar.text"))


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{param} must be a text that is not empty", param=param)
    return value


_STRUCTURED: dict[str, Callable[[Any, str], ResponseFormat | None]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _object,
}
_READERS: dict[str, Callable[[Any, str], ResponseFormat | None]] = {
    "response_format": _vendor,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _structured,
    "json_schema": _schema,
    "grammar": _grammar,
    "regex": _regex,
    "ebnf": _grammar,
}
