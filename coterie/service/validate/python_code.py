"""python: the answer, or each of its Python blocks, parses. The code is not run.

Runs only in a validator process: the parser's recursion may overflow the stack.
"""

from __future__ import annotations

import ast
import textwrap
import warnings

from coterie.core.events import ValidationResult
from coterie.service.validate.base import (
    ONLY_COMMENTS,
    TOO_DEEP,
    first_fault,
    in_language,
    programs,
    result_of,
)

NAMES = frozenset({"python", "py", "python3", "py3"})


class PythonValidator:
    name = "python"

    def __init__(self, argument: str = "") -> None:
        """The argument is not used."""

    def check(self, text: str) -> ValidationResult:
        return result_of(self.name, text, _fault)


def _fault(text: str) -> str | None:
    codes = [block.code for block in in_language(programs(text), NAMES)]
    return first_fault(syntax_fault(code) for code in codes or [text])


def syntax_fault(code: str) -> str | None:
    if not code.strip():
        return "there is no code"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = ast.parse(textwrap.dedent(code), "answer")
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except (MemoryError, RecursionError):
        return TOO_DEEP
    except ValueError as error:
        return str(error)
    return None if program.body else ONLY_COMMENTS
