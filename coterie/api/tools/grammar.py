"""The grammar that constrains a model to its tools, as Lark text for the engine.

A forced call is constrained from the first token. If the model may also write text, all bytes and
special tokens are allowed until a call starts; from there only a tool's name and arguments that fit
its schema are allowed. This module builds the text; the engine compiles it.
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
# characters of a grammar that the engine accepts
MAX_GRAMMAR = 200_000
# start of the rule for an answer without a call
ANSWER = "answer: "
# the negated class matches no text, so its complement matches every string of bytes
_ANY = r"ANY: ~/[^\x00-\x{10FFFF}]/"


def tool_constraint(
    tool_set: ToolSet, tokenizer: Tokenizer, thought: bool | None, answer: ResponseFormat | None
) -> ResponseFormat:
    """The grammar for calls of `tool_set`. `thought`: True if the prompt has opened a thought,
    False if the model may open one, None if it does not think. `answer` is the format of an answer
    without a call."""
    text = _Lark(tool_set, tokenizer, thought, answer).text()
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
    """The format of an answer that may have a thought before it. The thought is not constrained."""
    return ResponseFormat("lark", _Lark(None, tokenizer, thought, answer).text())


class _Lark:
    def __init__(
        self,
        tool_set: ToolSet | None,
        tokenizer: Tokenizer,
        thought: bool | None,
        answer: ResponseFormat | None,
    ) -> None:
        self.parallel = tool_set is not None and tool_set.parallel
        # free text is not allowed as an answer
        self.required = tool_set is None or tool_set.required
        self.format = tokenizer.tool_support.format
        self.thought, self.answer = thought, answer
        self.tools: Sequence[Tool] = [] if tool_set is None else tool_set.usable()
        self.special = tokenizer.special_ids
        self.marks = tokenizer.reasoning
        marks = {self.special.get(mark) for mark in (self.format.mark, *(self.marks or ()))}
        # the grammar engine reserves the byte 0xFF: its token has to be named
        allowed = {*self.special.values(), tokenizer.never_text_id}
        allowed -= {*tokenizer.eos_ids, *marks, None}
        self.allowed = ",".join(str(token) for token in allowed if token is not None)

    def text(self) -> str:
        skip = f"skip: (ANY <[{self.allowed}]>)*" if self.allowed else 'skip: ""'
        rules = ["%llguidance {}", *self._thinking(), *self._body(), *self._calls(), skip, _ANY]
        return "\n".join(rules) + "\n"

    def _thinking(self) -> list[str]:
        """The start rule: a thought, which calls no tool, may come before the body."""
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
        """The rules of an answer: text, calls, or text and then calls."""
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
        """A rule for `text` up to the first `mark`. A special token is never part of the text."""
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
        """Calls without a mark. Such a call starts with its whole head: a shorter beginning may
        also be an answer in JSON."""
        rules, calls = [], []
        for index, tool in enumerate(self.tools):
            parts = ("{", '"name"', ":", f'"{tool.name}"', ",", f'"{self.format.key}"', ":")
            head = r"[ \n]*".join(re.escape(part) for part in parts)
            rules.append(rf"bare_{index}[lazy]: /[ \n]*{head}/")
            calls.append(f'bare_{index} " "? arguments_{index}')
        return [*rules, f"bare_calls: ( {' | '.join(calls)} ){self._again()}"]

    def _token(self, mark: str) -> str:
        token = self.special.get(mark)
        return _literal(mark) if token is None else f"<[{token}]>"


def _in_lark(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _literal(text: str) -> str:
    return json.dumps(text)


def _answer_rule(answer: ResponseFormat) -> str:
    if answer.kind == "regex":
        # a slash or the end of the line ends a pattern in Lark
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


# white space as Python's json module writes it, because models were trained on that
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# keywords whose value is one schema, a list of schemas, or a map from name to schema
_ONE = ("items", "additionalProperties", "contains", "propertyNames")
_LISTS = ("prefixItems", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# with these keywords, a property that one part does not name may be defined by another part
_JOINING = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties")
# keywords that only document
_NOTES = ("title", "description", "default", "examples", "example", "$comment", "deprecated")


def enforced_schema(schema: dict[str, Any], strict: bool | None) -> str:
    """With `strict`, every keyword must be enforced; otherwise those that cannot be are skipped.

    If a schema does not mention additional properties, only the named ones are allowed.
    """
    kept = closed_schema(schema)
    options = {**SPACING, "lenient": not strict, "coerce_one_of": not strict}
    return json.dumps({**kept, "x-guidance": options})


def closed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid additional properties where the schema does not mention them. A schema whose parts are
    joined (`allOf`, `if`, properties beside `anyOf`) stays as it is."""
    closed: dict[str, Any] = schema if is_composed(schema) else _closed(schema)
    return closed


def _parts(schema: dict[str, Any]) -> list[Any]:
    parts = [schema[key] for key in _ONE if key in schema]
    parts += [item for key in _LISTS for item in _listed(schema.get(key))]
    return parts + [
        item for key in _MAPS if isinstance(schema.get(key), dict) for item in schema[key].values()
    ]


def is_composed(schema: Any) -> bool:
    """Whether its parts are joined: one cannot know what another names, so it is never closed."""
    if not isinstance(schema, dict):
        return False
    joins = any(key in schema for key in _JOINING)
    splits = "properties" in schema and any(key in schema for key in ("anyOf", "oneOf", "$ref"))
    return joins or splits or any(is_composed(part) for part in _parts(schema))


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
