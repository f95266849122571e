"""What a validator is, what it is told about an answer, and how it says what it found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from coterie.core.events import ValidationResult
from coterie.core.request import ResponseFormat

# longer answers are not judged
MAX_CHARACTERS = 1_000_000
# of an error's text: it may quote the answer
MAX_ERROR = 500
TOO_DEEP = "it is nested too deeply"


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What decides who judges an answer."""

    response_format: ResponseFormat | None = None
    # of the plan's trace; empty = not known
    task_type: str = ""
    code_language: str = ""
    # adapters it ran on, by name without version
    experts: tuple[str, ...] = ()
    finish_reason: str = "stop"
    # what the adapter that answered says its answers match
    answer_pattern: str = ""


class Validator(Protocol):
    @property
    def name(self) -> str: ...

    def check(self, text: str) -> ValidationResult:
        """Never raises for the text's sake."""


def judged(name: str, text: str, fault_of: Callable[[str], str | None]) -> ValidationResult:
    """`fault_of` says what is wrong, None when nothing is."""
    began = time.perf_counter()
    try:
        fault = fault_of(text)
    except RecursionError:
        fault = TOO_DEEP
    except MemoryError:
        fault = "checking it takes too much memory"
    spent_ms = round((time.perf_counter() - began) * 1000, 3)
    return ValidationResult(fault is None, name, cut(fault), spent_ms)


def cut(fault: str | None) -> str | None:
    if fault is None or len(fault) <= MAX_ERROR:
        return fault
    return fault[: MAX_ERROR - 3] + "..."


_MARKS = ("```", "~~~")
# blocks that hold no program
_PLAIN = frozenset({"text", "txt", "plain", "plaintext", "output", "console", "log", "markdown"})


@dataclass(frozen=True, slots=True)
class CodeBlock:
    # lower case; empty = not said
    language: str
    code: str


def blocks(text: str) -> list[CodeBlock]:
    found: list[CodeBlock] = []
    mark, language, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if not mark:
            if bare.startswith(_MARKS):
                run = len(bare) - len(bare.lstrip(bare[0]))
                mark, said = bare[0] * run, bare[run:].split()
                language, lines = said[0].lower().strip("{}.") if said else "", []
        elif bare.startswith(mark) and not bare.strip(mark[0]):
            found.append(CodeBlock(language, "".join(lines)))
            mark = ""
        else:
            lines.append(line)
    if mark:
        found.append(CodeBlock(language, "".join(lines)))
    return found


def programs(text: str) -> list[CodeBlock]:
    return [block for block in blocks(text) if block.language not in _PLAIN]
