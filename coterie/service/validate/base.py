"""What a validator is, what it knows about an answer, and how it reports its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coterie.core.events import ValidationResult
from coterie.core.quick_init import quick_init
from coterie.core.request import ResponseFormat

# longer answers are not validated
MAX_CHARACTERS = 1_000_000
# characters of an error's text, which may quote the answer
MAX_ERROR = 500
TOO_DEEP, TOO_LARGE = "it is nested too deeply", "checking it takes too much memory"
EXHAUSTED = (TOO_DEEP, TOO_LARGE)


@quick_init
@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The facts that decide which validator checks an answer."""

    response_format: ResponseFormat | None = None
    # from the plan's trace; empty = not known
    task_type: str = ""
    code_language: str = ""
    # names of the adapters that answered, without version
    experts: tuple[str, ...] = ()
    finish_reason: str = "stop"
    # the regular expression that the adapter's package gives for its answers
    answer_pattern: str = ""
    # validators that the specialist's settings name; they replace the one that fits the form
    checks: tuple[str, ...] = ()
    # the engine drew only tokens that the format allows, up to its end
    is_enforced: bool = False


class Validator(Protocol):
    @property
    def name(self) -> str: ...

    def check(self, text: str) -> ValidationResult:
        """Never raises because of the text."""


def result_of(name: str, text: str, fault_of: Callable[[str], str | None]) -> ValidationResult:
    """The result of a check. `fault_of` returns what is wrong, None if nothing is."""
    began = time.perf_counter()
    try:
        fault = fault_of(text)
    except RecursionError:
        fault = TOO_DEEP
    except MemoryError:
        fault = TOO_LARGE
    spent_ms = round((time.perf_counter() - began) * 1000, 3)
    return ValidationResult(fault is None, name, cut(fault), spent_ms)


def cut(fault: str | None) -> str | None:
    if fault is None or len(fault) <= MAX_ERROR:
        return fault
    return fault[: MAX_ERROR - 3] + "..."


_MARKS = ("```", "~~~")
# languages of code blocks that are not programs
_PLAIN = frozenset({"text", "txt", "plain", "plaintext", "output", "console", "log", "markdown"})


@dataclass(frozen=True, slots=True)
class CodeBlock:
    # lower case; empty = not given
    language: str
    code: str
    # its last line ends it; otherwise the text ended inside it
    is_closed: bool = True


def blocks(text: str) -> list[CodeBlock]:
    code_blocks: list[CodeBlock] = []
    mark, language, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if not mark:
            if bare.startswith(_MARKS):
                run = len(bare) - len(bare.lstrip(bare[0]))
                mark, info = bare[0] * run, bare[run:].split()
                language, lines = info[0].lower().strip("{}.") if info else "", []
        elif bare.startswith(mark) and not bare.strip(mark[0]):
            code_blocks.append(CodeBlock(language, "".join(lines)))
            mark = ""
        else:
            lines.append(line)
    if mark:
        code_blocks.append(CodeBlock(language, "".join(lines), is_closed=False))
    return code_blocks


# of a block; one beside others is no fault, such as how a package is installed
ONLY_COMMENTS = "there is no code, only comments"


def first_fault(faults: Iterable[str | None]) -> str | None:
    """Of an answer whose blocks have these faults."""
    found = list(faults)
    real = next((fault for fault in found if fault and fault != ONLY_COMMENTS), None)
    return real or (None if None in found else ONLY_COMMENTS)


def programs(text: str) -> list[CodeBlock]:
    return [block for block in blocks(text) if block.language not in _PLAIN]


def in_language(code_blocks: Sequence[CodeBlock], languages: Collection[str]) -> list[CodeBlock]:
    """The blocks that name one of these languages; if there are none, those that name no language.
    Beside a block that names it, one without a name shows what a program reads or prints."""
    named = [block for block in code_blocks if block.language in languages]
    return named or [block for block in code_blocks if not block.language]
