"""From a body's `response_format`, `grammar` or `regex` to one `ResponseFormat`.

Reads OpenAI's shapes, Anthropic's `output_format` and the native fields. Shapes only: whether a
schema or grammar can be enforced is told by `models/grammar_check.py`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from coterie.core.errors import InvalidRequest
from coterie.core.request import ResponseFormat

# Lark's first rule, or llguidance's own mark; GBNF writes `root ::=`
_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:)")


def response_format_of(
    body_field: Any, grammar: Any = None, regex: Any = None, *, param: str = "response_format"
) -> ResponseFormat | None:
    """None where the answer is free. `param` names `body_field` in complaints."""
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


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _vendor(field: Any, param: str) -> ResponseFormat | None:
    if not isinstance(field, dict):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    kind = field.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind != "json_schema":
        raise InvalidRequest(
            f"{param}.type must be text, json_object or json_schema", param=f"{param}.type"
        )
    # OpenAI wraps the schema, Anthropic does not
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
    schema: dict[str, Any], strict: bool | None = None, param: str = "response_format"
) -> ResponseFormat:
    """With `strict` False, keywords that cannot be enforced are passed over."""
    own = {key: value for key, value in schema.items() if key != "x-guidance"}
    if strict is False:
        own["x-guidance"] = {"lenient": True}
    try:
        return ResponseFormat("json_schema", msgspec.json.encode(own).decode())
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _grammar(value: Any) -> ResponseFormat:
    if isinstance(value, str):
        text = _text(value, "grammar")
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
