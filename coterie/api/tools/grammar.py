"""The grammar that holds a model to its tools: Lark text for the engine.

A forced call is held from the first token on. Where the model may also speak, any bytes and any
special tokens pass until a call is opened: then only that call's name, and arguments that fit its
schema. Builds text; compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coterie.api.tools.base import Tool, ToolSet
from coterie.core.errors import InvalidRequest
from coterie.core.request import ResponseFormat
from coterie.models.grammar.grammar import lark_of

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

MAX_CALLS = 32
# what the engine reads
MAX_GRAMMAR = 200_000
# begins the rule of what an answer that calls nothing has to look like
ANSWER = "answer: "
# no text matches the negated class, so its complement is every string of bytes
_ANY = r"ANY: ~/[^\x00-\x{10FFFF}]/"


def tool_constraint(
    toolbox: ToolSet, tokenizer: Tokenizer, thought: bool | None, answer: ResponseFormat | None
) -> ResponseFormat:
    """`thought`: the prompt has opened one (True), the model may (False), or never thinks (None).
    `answer` is what an answer that calls nothing has to look like."""
    text = _Lark(toolbox, tokenizer, thought, answer).text()
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"tools: their schemas make a grammar of {len(text)} characters; the limit is "
            f"{MAX_GRAMMAR}. Give fewer tools.",
            param="tools",
        )
    return ResponseFormat("lark", text)


def answer_behind_thought(
    answer: ResponseFormat, tokenizer: Tokenizer, thought: bool
) -> ResponseFormat:
    """An answer's format where a thought may come before it, which is not held to it."""
    return ResponseFormat("lark", _Lark(None, tokenizer, thought, answer).text())


class _Lark:
    def __init__(
        self,
        toolbox: ToolSet | None,
        tokenizer: Tokenizer,
        thought: bool | None,
        answer: ResponseFormat | None,
    ) -> None:
        self.parallel = toolbox is not None and toolbox.parallel
        # an answer may not be just any words
        self.required = toolbox is None or toolbox.required
        self.format = tokenizer.tool_support.format
        self.thought, self.answer = thought, answer
        self.tools: Sequence[Tool] = [] if toolbox is None else toolbox.usable()
        self.special = tokenizer.special_ids
        self.marks = tokenizer.reasoning
        kept = {self.special.get(mark) for mark in (self.format.mark, *(self.marks or ()))}
        # the grammar engine keeps the byte 0xFF for itself: it has to be named as a token
        passed = {*self.special.values(), tokenizer.never_text_id}
        passed -= {*tokenizer.eos_ids, *kept, None}
        self.passed = ",".join(str(token) for token in passed if token is not None)

    def text(self) -> str:
        skip = f"skip: (ANY <[{self.passed}]>)*" if self.passed else 'skip: ""'
        rules = ["%llguidance {}", *self._thinking(), *self._body(), *self._calls(), skip, _ANY]
        return "\n".join(rules) + "\n"

    def _thinking(self) -> list[str]:
        """What may come before the body: a model's thought, which calls nothing."""
        if self.thought is None or self.marks is None:
            return ["start: body"]
        unfinished = "" if self.required else " | skip ANY"
        rules = [
            f"thought: skip thought_end SPACE body{unfinished}",
            self._up_to("thought_end", "ANY", self.marks[1]),
            r"SPACE: /[ \n]*/",
        ]
        if self.thought:
            return ["start: thought", *rules]
        begin = self._up_to("thought_begin", "SPACE", self.marks[0])
        return ["start: body | thought_begin thought", begin, *rules]

    def _body(self) -> list[str]:
        """An answer: words, calls, or words and then calls."""
        marked = f"{self._token(self.format.mark)} calls"
        if not self.tools and self.answer is not None:
            return ["body: answer", f"{ANSWER}{_answer_rule(self.answer)}"]
        if self.required:
            return ["body: calls" if self.format.bare else f"body: {marked}"]
        if self.answer is not None:
            return [f"body: answer | {marked}", f"{ANSWER}{_answer_rule(self.answer)}"]
        bare = " | bare_calls" if self.format.bare else ""
        lead = self._up_to("lead", "ANY", self.format.mark)
        rules = [f"body: skip ANY | skip lead calls{bare}", lead]
        return [*rules, *self._bare_calls()] if bare else rules

    def _up_to(self, rule: str, text: str, mark: str) -> str:
        """`text` that ends with the first `mark`; a special token cannot be part of a text."""
        if mark in self.special:
            return f"{rule}: {text} {self._token(mark)}"
        return f"{rule}[lazy]: {text} {_literal(mark)}"

    def _calls(self) -> list[str]:
        form = self.format
        if not self.tools:
            return []
        begin = f"{_literal(form.space)} " if form.space else ""
        end = f" {_literal(form.space)}" if form.space else ""
        end += f" {self._token(form.closing)}" if form.closing else ""
        names = " | ".join(f"tool_{index}" for index in range(len(self.tools)))
        rules = [f"calls: call{self._again()}", f"call: {begin}( {names} ){end}"]
        for index, tool in enumerate(self.tools):
            head = _literal(f'{{"name": "{tool.name}", "{form.key}": ')
            rules.append(f"tool_{index}: {head} arguments_{index}")
            rules.append(
                f'arguments_{index}: %json {enforced_schema(tool.parameters, tool.strict)} "}}"'
            )
        return rules

    def _again(self) -> str:
        if not self.parallel:
            return ""
        behind = _literal(self.format.between)
        if not self.format.bare:
            behind += f" {self._token(self.format.mark)}"
        return f" ({behind} call){{0,{MAX_CALLS - 1}}}"

    def _bare_calls(self) -> list[str]:
        """A call without a mark is opened by its whole head: less may be an answer in JSON."""
        rules, calls = [], []
        for index, tool in enumerate(self.tools):
            parts = ("{", '"name"', ":", f'"{tool.name}"', ",", f'"{self.format.key}"', ":")
            head = r"[ \n]*".join(re.escape(part) for part in parts)
            rules.append(rf"bare_{index}[lazy]: /[ \n]*{head}/")
            calls.append(f'bare_{index} " "? arguments_{index}')
        return [*rules, f"bare_calls: ( {' | '.join(calls)} ){self._again()}"]

    def _token(self, mark: str) -> str:
        found = self.special.get(mark)
        return _literal(mark) if found is None else f"<[{found}]>"


def _in_lark(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _literal(text: str) -> str:
    return json.dumps(text)


def _answer_rule(answer: ResponseFormat) -> str:
    if answer.kind == "regex":
        # a slash ends a pattern in Lark, and so does the line
        pattern = re.sub(r"\\.|/|\n", _in_lark, answer.text, flags=re.DOTALL)
        return f"/{pattern}/"
    if answer.kind in ("lark", "gbnf"):
        text = answer.text if answer.kind == "lark" else lark_of(answer.text)
        return f"%lark {{\n{text}\n}}"
    if answer.kind == "json_object":
        return f"%json {json.dumps({'type': 'object', 'x-guidance': SPACING})}"
    schema = json.loads(answer.text)
    options = {**schema.get("x-guidance", {}), **SPACING}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


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


def enforced_schema(schema: dict[str, Any], strict: bool | None) -> str:
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
