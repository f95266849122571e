"""The table of validators, and the rule that picks one for an answer."""

from __future__ import annotations

from collections.abc import Callable

from coterie.service.validate.base import MAX_CHARACTERS, AnswerContext, Validator, programs
from coterie.service.validate.code import GRAMMARS, CodeValidator, can_check, canonical
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
# validators that are always fast: they may run on the event loop
SAFE = frozenset({"json", "grammar", "generic"})

# validators that need nothing but the answer: the settings of a specialist may name them; the name
# of a language means code in it
NAMED_CHECKS = ("json", "python", "generic", *GRAMMARS)

Pick = tuple[str, str]


def picks(text: str, context: AnswerContext) -> list[Pick]:
    """The validators for an answer. Those that the specialist's settings name replace the one for
    its task type; a form that the caller asked for is always checked."""
    named = [name for name in context.checks if name in NAMED_CHECKS]
    asked = context.response_format is not None or context.answer_pattern
    chosen = [] if named and not asked else [pick(text, context)]
    if len(text) <= MAX_CHARACTERS:
        chosen += [("code", name) if name in GRAMMARS else (name, "") for name in named]
    return list(dict.fromkeys(item for item in chosen if item is not None))


def pick(text: str, context: AnswerContext) -> Pick | None:
    """(validator, its argument); None if it is not known which form the answer should have."""
    if len(text) > MAX_CHARACTERS:
        return None
    answer_format = context.response_format
    if answer_format is not None:
        if answer_format.kind == "json_schema":
            return "json_schema", answer_format.text
        return ("json", "object") if answer_format.kind == "json_object" else _grammar(context)
    if context.answer_pattern:
        return "pattern", context.answer_pattern
    if context.task_type == "json_parsing":
        return "json", ""
    if context.task_type == "code_generation":
        return _code(text, context.code_language)
    return ("generic", "") if context.task_type else None


def _grammar(context: AnswerContext) -> Pick:
    return "grammar", context.finish_reason


def _code(text: str, requested: str) -> Pick:
    named = [block.language for block in programs(text) if block.language]
    language = next((name for name in (*named, requested) if can_check(name)), "")
    if not language:
        return "generic", ""
    if all(canonical(name) in NAMES for name in (*named, language)):
        return "python", ""
    # the language becomes a metric label, so it must be one of the table
    return "code", requested if can_check(requested) else language
