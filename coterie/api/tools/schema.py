"""A tool's JSON schema as the grammar is given it: what holds arguments, and nothing else.

Builds schemas out of schemas; enforces nothing. The caller's own text stays as it is in the prompt.
"""

from __future__ import annotations

import json
from typing import Any

# as Python's json writes them, which is what models were trained on
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# keywords that hold one schema, a list of schemas, or schemas by name
_ONE = ("items", "additionalProperties", "contains", "propertyNames")
_LISTS = ("prefixItems", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# with these a property that one part does not name may be another part's
_JOINING = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties")
# for the reader alone
_NOTES = ("title", "description", "default", "examples", "example", "$comment", "deprecated")


def held_schema(schema: dict[str, Any], strict: bool | None) -> str:
    """With `strict`, every keyword must be enforced; else those that cannot be are passed over.

    A schema that says nothing of further properties is held to those it names.
    """
    kept = closed_schema(schema)
    options = {**SPACING, "lenient": not strict, "coerce_one_of": not strict}
    return json.dumps({**kept, "x-guidance": options})


def closed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Objects that say nothing of further properties have none; a schema whose parts are joined
    (`allOf`, `if`, properties beside `anyOf`) stays as it is."""
    closed: dict[str, Any] = schema if _is_composed(schema) else _closed(schema)
    return closed


def _parts(schema: dict[str, Any]) -> list[Any]:
    found = [schema[key] for key in _ONE if key in schema]
    found += [item for key in _LISTS for item in _listed(schema.get(key))]
    return found + [
        item for key in _MAPS if isinstance(schema.get(key), dict) for item in schema[key].values()
    ]


def _is_composed(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    joins = any(key in schema for key in _JOINING)
    splits = "properties" in schema and any(key in schema for key in ("anyOf", "oneOf", "$ref"))
    return joins or splits or any(_is_composed(part) for part in _parts(schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = {key: value for key, value in schema.items() if key not in _NOTES}
    closed |= {key: _closed(schema[key]) for key in _ONE if key in schema}
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            closed[key] = [_closed(part) for part in schema[key]]
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(part) for name, part in schema[key].items()}
    if _names_all(schema):
        closed.setdefault("additionalProperties", False)
    return closed


def _names_all(schema: dict[str, Any]) -> bool:
    named = schema.get("properties")
    if not isinstance(named, dict) or "patternProperties" in schema:
        return False
    required = _listed(schema.get("required"))
    return all(isinstance(name, str) and name in named for name in required)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
