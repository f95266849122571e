"""Who judges an answer: one literal table of validators, and the rule that picks from it."""

from __future__ import annotations

from collections.abc import Callable

from coterie.service.validate.base import MAX_CHARACTERS, AnswerContext, Validator, programs
from coterie.service.validate.code import CodeValidator, can_judge, canonical
from coterie.service.validate.generic import GenericValidator
from coterie.service.validate.grammar import GrammarValidator
from coterie.service.validate.json_schema import JsonSchemaValidator
from coterie.service.validate.json_text import JsonValidator
from coterie.service.validate.pattern import PatternValidator
from coterie.service.validate.python_code import NAMES, PythonValidator

VALIDATORS: dict[str, Callable[[str], Validator]] = {
    "json": JsonValidator,
    "json_schema": JsonSchemaValidator,
    "python": PythonValidator,
    "code": CodeValidator,
    "grammar": GrammarValidator,
    "pattern": PatternValidator,
    "generic": GenericValidator,
}
# bounded in time by nature: these may run on the event loop's thread
SAFE = frozenset({"json", "grammar", "generic"})

Pick = tuple[str, str]


def pick(text: str, context: AnswerContext) -> Pick | None:
    """(validator, its argument); None where nobody knows what the answer should be."""
    if len(text) > MAX_CHARACTERS:
        return None
    asked = context.response_format
    if asked is not None:
        if asked.kind == "json_schema":
            return "json_schema", asked.text
        return ("json", "object") if asked.kind == "json_object" else _grammar(context)
    if context.answer_pattern:
        return "pattern", context.answer_pattern
    if context.task_type == "json_parsing":
        return "json", ""
    if context.task_type == "code_generation":
        return _code(text, context.code_language)
    return ("generic", "") if context.task_type else None


def _grammar(context: AnswerContext) -> Pick:
    return "grammar", context.finish_reason


def _code(text: str, asked: str) -> Pick:
    said = [block.language for block in programs(text) if block.language]
    language = next((name for name in (*said, asked) if can_judge(name)), "")
    if not language:
        return "generic", ""
    only_python = all(canonical(name) in NAMES for name in (*said, language))
    # its name goes into metrics: only one that is in the table
    return ("python", "") if only_python else ("code", asked if can_judge(asked) else language)
