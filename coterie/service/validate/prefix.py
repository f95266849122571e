"""What an answer that was cut could still become: open, unformed or broken (`slo/evidence.py`).

Broken is certain: JSON that no text can complete, a Python line that no later line can mend, a
complete code block with a language and a fault, or a long run without a letter or digit. Unformed
is a text that is neither a beginning of the form nor followed by a code block yet, such as words
before it. A form that cannot be judged by its beginning, such as a pattern's, leaves the answer
open.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from typing import Any

import msgspec

from coterie.service.slo.evidence import BROKEN, OPEN, UNFORMED
from coterie.service.validate.base import ONLY_COMMENTS, CodeBlock, blocks, in_language, programs
from coterie.service.validate.code import GRAMMARS, CodeValidator, canonical, parser
from coterie.service.validate.json_text import JsonValidator
from coterie.service.validate.python_code import NAMES

# characters without a letter or digit from which on a text is noise
NOISE_CHARACTERS = 16
# of a text that parses in part: the least share of its characters in parsed structures
FORMED_SHARE = 0.3
# languages in which no statement begins with a name
_KEYWORD_FIRST = frozenset({"sql"})
# compile() then tells a text that ends too early from a wrong one
_INCOMPLETE = ast.PyCF_ONLY_AST | 0x4000 | 0x200
_NUMBER_AT = re.compile(r"invalid number \(byte (\d+)\)")
# faults that the parser finds at a token and no later token can mend
_CERTAIN = ("invalid syntax", "invalid character", "invalid non-printable character")
# a last line that may be the beginning of a mark that ends or begins a code block
_LAST_MARK = re.compile(r"(?<=\n)[ \t]*(`+|~+)\Z")
_STRUCTURED = frozenset({"json", "json_schema", "python", "code"})


def prefix_kind(validator: str, argument: str, text: str) -> str:
    """The kind of a cut answer that this validator, with this argument, found invalid."""
    if validator not in _STRUCTURED or not text:
        return OPEN
    if len(text) >= NOISE_CHARACTERS and not any(char.isalnum() for char in text):
        return BROKEN
    text = _without_cut_mark(text)
    try:
        if validator in ("json", "json_schema"):
            return _json(text, validator == "json_schema" or argument == "object", argument)
        if validator == "python":
            return _code(text, "python", in_language(programs(text), NAMES))
        return _code(text, canonical(argument), CodeValidator(argument).judged_blocks(text))
    except (RecursionError, MemoryError):
        return BROKEN


def _without_cut_mark(text: str) -> str:
    found = _LAST_MARK.search(text)
    if found is None:
        return text
    *_, last = blocks(text) or [CodeBlock("", "")]
    # a block of four marks or more is not ended by three
    is_inside = not last.is_closed and last.code.endswith(found[1])
    return text[: found.start()] if is_inside or len(found[1]) < 3 else text


def _json(text: str, strict: bool, argument: str) -> str:
    begins = text.lstrip()[:1]
    if _is_json_beginning(text) and not (argument == "object" and begins not in ("", "{")):
        return OPEN
    if strict:
        return BROKEN
    for block in in_language(blocks(text), ("json",)):
        fault = JsonValidator().check(block.code).error
        if fault and (block.is_closed or not _is_json_beginning(block.code)):
            return _broken_in(block)
    return OPEN if blocks(text) else UNFORMED


def _broken_in(block: CodeBlock) -> str:
    """The kind of an answer with a fault in this block. One that names no language is not judged
    any more if a later one does."""
    return BROKEN if block.language else UNFORMED


def _is_json_beginning(text: str) -> bool:
    data = text.encode("utf-8", "replace")
    try:
        msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        number = _NUMBER_AT.search(str(error))
        return "truncated" in str(error) or (number is not None and int(number[1]) >= len(data))
    return True


def _code(text: str, language: str, judged: list[CodeBlock]) -> str:
    if not blocks(text):
        return OPEN if _beginning(text, language) == OPEN else UNFORMED
    *complete, last = judged or [CodeBlock("", "", False)]
    if last.is_closed:
        complete.append(last)
    check = CodeValidator(language).block_fault
    for block in complete:
        if check(block) not in (None, ONLY_COMMENTS):
            return _broken_in(block)
    if last.is_closed or not last.code.strip():
        return OPEN
    kind = _beginning(last.code, canonical(last.language) or language)
    return _broken_in(last) if kind == BROKEN else kind


def _beginning(code: str, language: str) -> str:
    """The kind of a program's beginning, without code blocks."""
    if language in NAMES:
        return BROKEN if _is_wrong_python(code) else OPEN
    if language not in GRAMMARS:
        return OPEN
    return OPEN if _is_formed(language, code) else UNFORMED


def _is_wrong_python(code: str) -> bool:
    whole, _, last = textwrap.dedent(code).rpartition("\n")
    error = _python_error(whole + "\n")
    if error is not None:
        return "incomplete input" not in str(error.msg)
    error = _python_error(f"{whole}\n{last}" if whole else last)
    if error is None or not str(error.msg).startswith(_CERTAIN) or not error.end_offset:
        return False
    is_last_line = error.lineno == (whole.count("\n") + 2 if whole else 1)
    # a token that is not the last one cannot change any more
    rest = last[max(error.end_offset - 1, error.offset or 1) :] if is_last_line else ""
    return bool(rest.strip())


def _python_error(code: str) -> SyntaxError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "answer", "exec", _INCOMPLETE)
    except SyntaxError as error:
        return error
    except ValueError as error:
        return SyntaxError(str(error))
    return None


def _is_formed(language: str, code: str) -> bool:
    data = code.encode("utf-8", "replace")
    root = parser(language).parse(data).root_node
    first, begin = _first_token(root)
    if first is None:
        return False
    # the parser skips what it cannot read
    is_at_begin = not data[begin : first.start_byte].strip()
    is_word = not first.is_named and first.type[-1:].isalpha()
    if is_at_begin and (is_word or first.type.startswith("keyword_")):
        return True
    if language in _KEYWORD_FIRST:
        return False
    return _parsed_bytes(root) >= FORMED_SHARE * len(b"".join(data.split()))


def _first_token(root: Any) -> tuple[Any, int]:
    """The first token that is no comment, None if there is none; and where the text before it
    begins, behind comments."""
    pending, begin = [root], 0
    while pending:
        node = pending.pop()
        if node.is_extra and not node.is_error:
            begin = node.end_byte
        elif node.child_count:
            pending.extend(reversed(node.children))
        elif node is not root:
            return node, begin
    return None, begin


def _parsed_bytes(root: Any) -> int:
    """Bytes of the tokens inside structures that the parser recognised."""
    parsed, pending = 0, [(root, False)]
    while pending:
        node, is_inside = pending.pop()
        if not node.child_count:
            parsed += node.end_byte - node.start_byte if is_inside and not node.is_error else 0
            continue
        is_structure = node.is_named and node.child_count >= 2 and node is not root
        is_inside = not node.is_error and (is_inside or is_structure)
        pending.extend((child, is_inside) for child in node.children)
    return parsed
