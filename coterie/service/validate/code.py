"""code: the answer, or each of its code blocks, parses in its language with tree-sitter's grammar.

Such a grammar accepts more than a compiler: a fault that it finds is a fault for every compiler.
Runs only in a validator process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from coterie.core.errors import MissingDependency
from coterie.core.events import ValidationResult
from coterie.service.validate.base import (
    ONLY_COMMENTS,
    CodeBlock,
    first_fault,
    programs,
    result_of,
)
from coterie.service.validate.json_text import JsonValidator
from coterie.service.validate.python_code import NAMES, syntax_fault

# language -> (module, its function)
GRAMMARS = {
    "bash": ("tree_sitter_bash", "language"),
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
    "go": ("tree_sitter_go", "language"),
    "java": ("tree_sitter_java", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "rust": ("tree_sitter_rust", "language"),
    "sql": ("tree_sitter_sql", "language"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
}
_ALIASES = {
    "sh": "bash", "shell": "bash", "zsh": "bash", "c++": "cpp", "cc": "cpp", "cxx": "cpp",
    "h": "c", "hpp": "cpp", "golang": "go", "js": "javascript", "jsx": "javascript",
    "mjs": "javascript", "node": "javascript", "rs": "rust", "ts": "typescript",
    "postgresql": "sql", "postgres": "sql", "mysql": "sql", "sqlite": "sql",
}  # fmt: skip


class CodeValidator:
    def __init__(self, argument: str) -> None:
        """`argument` is the language of blocks that do not name one."""
        self._language = canonical(argument)
        self.name = self._language or "code"

    def check(self, text: str) -> ValidationResult:
        return result_of(self.name, text, self._fault)

    def judged_blocks(self, text: str) -> list[CodeBlock]:
        """The blocks that hold programs. One without a language is in that of this validator,
        unless another block names it: then it shows what a program reads or prints."""
        found = programs(text)
        if any(_is_same(block.language, self._language) for block in found):
            return [block for block in found if block.language]
        return found

    def _fault(self, text: str) -> str | None:
        code_blocks = self.judged_blocks(text) or [CodeBlock("", text)]
        return first_fault(self.block_fault(block) for block in code_blocks)

    def block_fault(self, block: CodeBlock) -> str | None:
        language = canonical(block.language) or self._language
        if language in NAMES:
            return syntax_fault(block.code)
        if language == "json":
            return JsonValidator().check(block.code).error
        if not block.code.strip():
            return "there is no code"
        return tree_fault(language, block.code) if language in GRAMMARS else None


def canonical(language: str) -> str:
    low = language.strip().lower()
    return _ALIASES.get(low, low)


def _is_same(one: str, other: str) -> bool:
    one, other = canonical(one), canonical(other)
    return bool(one) and (one == other or (one in NAMES and other in NAMES))


def can_check(language: str) -> bool:
    name = canonical(language)
    return name in GRAMMARS or name in NAMES


def tree_fault(language: str, code: str) -> str | None:
    root = parser(language).parse(code.encode("utf-8", "replace")).root_node
    if not root.has_error:
        is_code = any(not child.is_extra for child in root.children)
        return None if is_code else ONLY_COMMENTS
    node = root
    # go down to the first child with an error, without recursion
    while not (node.is_error or node.is_missing):
        inner = next((child for child in node.children if child.has_error), None)
        if inner is None:
            break
        node = inner
    what = f"{node.type} is missing" if node.is_missing else "a syntax error"
    return f"line {node.start_point[0] + 1}: {what} in {language}"


def parser(language: str) -> Any:
    module, function = GRAMMARS[language]
    try:
        from tree_sitter import Language, Parser

        grammar = getattr(import_module(module), function)()
    except ImportError as error:
        package = module.replace("_", "-")
        raise MissingDependency(f"no grammar for {language}: pip install {package}") from error
    return Parser(Language(grammar))
