"""Writes the SDKs' types from the OpenAPI document; `--check` fails if one is out of date.

Defines how a JSON schema is written in Python and in TypeScript. Bodies become TypedDicts and
interfaces, answers frozen dataclasses and interfaces; only types of the native routes are written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

Schema = Mapping[str, Any]
PREFIX = "#/components/schemas/"
ROUTES = re.compile(r"/v1/(infer|jobs|inferences|feedback|experts)(/|$)")
# fields of a body that the Python client takes as separate arguments are left out
PYTHON_OPTIONS = {
    "InferBody": ("InferOptions", ("prompt", "stream")),
    "InstallBody": ("InstallOptions", ("path",)),
}
WIDTH = 100
WRITTEN = "Written by scripts/generate_sdk.py from docs/api/openapi.json; do not edit."


@dataclass(frozen=True, slots=True)
class Model:
    """One named object of the document."""

    name: str
    about: str
    fields: Mapping[str, Schema]
    required: Sequence[str]
    # sent by the client; all others come from the server
    sent: bool


def models(document: Schema) -> list[Model]:
    """The models that the native routes send and answer, and all that they refer to."""
    schemas = document["components"]["schemas"]
    sent, answered = _roots(document)
    closures = _closure(schemas, sent), _closure(schemas, answered)
    # a model that is part of a body and of an answer is written once, as an answer
    kinds = dict.fromkeys(closures[1], False) | dict.fromkeys(closures[0] - closures[1], True)
    return [_model(name, schemas[name], kinds[name]) for name in sorted(kinds)]


def _roots(document: Schema) -> tuple[set[str], set[str]]:
    sent, answered = set(), set()
    for path, operations in document["paths"].items():
        if not ROUTES.match(path):
            continue
        for operation in operations.values():
            sent |= set(_refs(operation.get("requestBody", {})))
            for status, answer in operation["responses"].items():
                if status.startswith("2"):
                    answered |= set(_refs(answer))
    return sent, answered


def _closure(schemas: Mapping[str, Schema], names: set[str]) -> set[str]:
    names_found: set[str] = set()
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        if name not in names_found:
            names_found.add(name)
            waiting += _refs(schemas[name])
    return names_found


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].removeprefix(PREFIX)
        for value in node.values():
            yield from _refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _refs(value)


def _model(name: str, schema: Schema, sent: bool) -> Model:
    about = " ".join(schema.get("description", "").split())
    return Model(name, about, schema.get("properties", {}), schema.get("required", ()), sent)


# Python


def python_types(document: Schema) -> str:
    all_models = models(document)
    lines = [f'"""What is sent and what is answered.\n\n{WRITTEN}\n"""', "", _PYTHON_IMPORTS]
    for model in all_models:
        lines += ["", "", *(_typed_dict(model) if model.sent else _dataclass(model))]
    return "\n".join(lines) + "\n"


_PYTHON_IMPORTS = """\
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict"""


def _typed_dict(model: Model) -> list[str]:
    title, omitted = PYTHON_OPTIONS.get(model.name, (model.name, ()))
    lines = [f"class {title}(TypedDict, total=False):", *_python_about(model)]
    for name, schema in model.fields.items():
        if name in omitted:
            continue
        kind = python_type(schema)
        lines += _python_comment(schema)
        lines.append(f"    {name}: {f'Required[{kind}]' if name in model.required else kind}")
    return lines


def _dataclass(model: Model) -> list[str]:
    lines = ["@dataclass(frozen=True)", f"class {model.name}:", *_python_about(model)]
    # fields without a default come first
    for name in sorted(model.fields, key=lambda field: field not in model.required):
        schema = model.fields[name]
        kind = python_type(schema)
        lines += _python_comment(schema)
        if name in model.required:
            lines.append(f"    {name}: {kind}")
        else:
            maybe = kind if kind.endswith("| None") else f"{kind} | None"
            lines.append(f"    {name}: {maybe} = None")
    return lines


def _python_about(model: Model) -> list[str]:
    if not model.about:
        return []
    wrapped = textwrap.wrap(f'"""{model.about}', WIDTH - 7)
    wrapped[-1] += '"""'
    return [*(f"    {line}" for line in wrapped), ""]


def _python_comment(schema: Schema) -> list[str]:
    return [f"    # {line}" for line in textwrap.wrap(schema.get("description", ""), WIDTH - 6)]


def python_type(schema: Schema) -> str:
    def scalars(kind: str) -> str:
        return {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}[kind]

    def mapping(values: str) -> str:
        return f"dict[str, {values}]"

    texts = Spelling(scalars, lambda item: f"list[{item}]", mapping, "None", "Any")
    return _spelled(schema, texts, lambda values: f"Literal[{', '.join(map(json.dumps, values))}]")


# TypeScript


def typescript_types(document: Schema) -> str:
    all_models = models(document)
    lines = [f"/** What is sent and what is answered. {WRITTEN} */"]
    for model in all_models:
        lines += ["", *_interface(model)]
    return "\n".join([*lines, "", *_shapes(all_models)]) + "\n"


def _interface(model: Model) -> list[str]:
    lines = [*_typescript_doc(model.about, ""), f"export interface {model.name} {{"]
    for name, schema in model.fields.items():
        lines += _typescript_doc(schema.get("description", ""), "  ")
        mark = "" if name in model.required else "?"
        lines.append(f"  {camel(name)}{mark}: {typescript_type(schema)};")
    return [*lines, "}"]


def _typescript_doc(text: str, indent: str) -> list[str]:
    if not text:
        return []
    lines = textwrap.wrap(text, WIDTH - 10)
    if len(lines) == 1:
        return [f"{indent}/** {lines[0]} */"]
    return [f"{indent}/**", *(f"{indent} * {line}" for line in lines), f"{indent} */"]


def typescript_type(schema: Schema) -> str:
    def scalars(kind: str) -> str:
        return {"string": "string", "boolean": "boolean"}.get(kind, "number")

    def mapping(values: str) -> str:
        return f"Record<string, {values}>"

    def array(item: str) -> str:
        return f"({item})[]" if " " in item else f"{item}[]"

    texts = Spelling(scalars, array, mapping, "null", "unknown")
    return _spelled(schema, texts, lambda values: " | ".join(map(json.dumps, values)))


def _shapes(all_models: Sequence[Model]) -> list[str]:
    """Fields that hold named objects: only in these are names translated."""
    lines = [
        "/** Fields that hold named objects. Whatever is in other fields is the caller's own. */"
    ]
    lines.append(
        "export const SHAPES: Readonly<Record<string, Readonly<Record<string, string>>>> = {"
    )
    for model in all_models:
        inner = {name: next(_refs(schema), None) for name, schema in model.fields.items()}
        pairs = ", ".join(f"{name}: {json.dumps(ref)}" for name, ref in inner.items() if ref)
        lines.append(f"  {model.name}: {{ {pairs} }}," if pairs else f"  {model.name}: {{}},")
    return [*lines, "};"]


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# both


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a language writes the JSON types."""

    scalar: Callable[[str], str]
    array: Callable[[str], str]
    mapping: Callable[[str], str]
    null: str
    anything: str


def _spelled(schema: Schema, texts: Spelling, literal: Callable[[Sequence[Any]], str]) -> str:
    def spell(node: Schema) -> str:
        if "$ref" in node:
            return str(node["$ref"]).removeprefix(PREFIX)
        for choices in (node.get("anyOf"), node.get("oneOf")):
            if choices:
                spelled = dict.fromkeys(spell(item) for item in choices)
                return " | ".join(sorted(spelled, key=lambda text: text == texts.null))
        if "const" in node or "enum" in node:
            return literal(node.get("enum") or [node["const"]])
        return by_type(node, node.get("type"))

    def by_type(node: Schema, kind: Any) -> str:
        if isinstance(kind, list):
            return spell({"anyOf": [{**node, "type": item} for item in kind]})
        if kind == "null":
            return texts.null
        if kind == "array":
            return texts.array(spell(node.get("items", {})))
        if kind == "object":
            values = node.get("additionalProperties")
            return texts.mapping(spell(values) if isinstance(values, dict) else texts.anything)
        return texts.anything if kind is None else texts.scalar(kind)

    return spell(schema)


FILES: dict[str, Callable[[Schema], str]] = {
    "sdk/python/coterie_client/types.py": python_types,
    "sdk/typescript/src/types.ts": typescript_types,
}


def drifted(document: Schema) -> dict[str, str]:
    """path -> what it should contain, for every file that is out of date."""
    texts = {name: make(document) for name, make in FILES.items()}
    return {name: text for name, text in texts.items() if _current_text(ROOT / name) != text}


def _current_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on drift")
    args = parser.parse_args()
    from coterie.api.routes import reference

    outdated = drifted(reference())
    for name, text in outdated.items():
        print(f"{name}: {'has drifted; run make docs' if args.check else 'written'}")
        if not args.check:
            (ROOT / name).write_text(text, encoding="utf-8")
    return 1 if outdated and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
