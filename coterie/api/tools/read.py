"""Splits one choice of an answer into pieces: reasoning, text, calls and their arguments.

`ChoiceReader` joins the two splitters. All other text is content.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from coterie.api.dialect import (
    CollectedChoice,
    DialectPipeline,
    NamedAnswer,
    ParsedRequest,
    PlannedAnswer,
    events_of,
)
from coterie.api.door import Exchange
from coterie.api.response_format import FORMAT, format_named, with_param_name
from coterie.api.tools.base import ToolSet
from coterie.api.tools.grammar import ANSWER, answer_behind_thought, tool_constraint
from coterie.api.transport.sse import Events
from coterie.core.errors import InvalidRequest
from coterie.core.events import CALL_TOKEN, THOUGHT_MARKS
from coterie.core.quick_init import quick_init
from coterie.core.request import Chat, ResponseFormat
from coterie.models.text.tokenizer import is_long
from coterie.models.text.tool_format import FORMATS, ToolFormat

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

# size of tools as JSON; above it the grammar is written on a thread. It would take about 2 ms of
# the event loop.
MAX_INLINE_BYTES = 8_000


@quick_init
@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How to read the answers to one request."""

    # the marks of a thought, and whether the prompt has already opened one; None = no thinking
    reasoning: tuple[tuple[str, str], bool] | None = None
    # None = no tools were given
    calls: CallMarks | None = None
    # True = the prompt has opened a thought, False = the model may open one; None = neither
    thought: bool | None = None
    # no white space belongs to the marks of a thought
    exact: bool = False

    def reader(self) -> ChoiceReader | None:
        """A reader for one choice; None if all of an answer is text."""
        return None if self.reasoning is None and self.calls is None else ChoiceReader(self)

    def read(self, choice: CollectedChoice) -> ChoiceParts:
        """The parts of a whole choice."""
        reader = self.reader()
        if reader is None:
            return ChoiceParts("".join(choice.text), finish_reason=choice.finish_reason)
        pieces, at = list[Piece](), 0
        for text, size in zip(choice.text, choice.sizes, strict=True):
            pieces += reader.feed(text, tuple(choice.token_ids[at : at + size]))
            at += size
        pieces += reader.finish()
        return ChoiceParts(
            _joined(pieces, CONTENT),
            _joined(pieces, REASONING),
            _calls(pieces),
            reader.ending(choice.finish_reason),
            reader.reasoning_tokens,
        )


# all of an answer is text
TEXT_ONLY = AnswerSyntax()


@quick_init
@dataclass(frozen=True, slots=True)
class ChoiceParts:
    """The text, the thought and the calls (name, arguments) of a choice."""

    words: str
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str = "stop"
    reasoning_tokens: int = 0


def _joined(pieces: list[Piece], kind: str) -> str:
    return "".join(text for piece_kind, text in pieces if piece_kind == kind)


def _calls(pieces: list[Piece]) -> tuple[tuple[str, str], ...]:
    calls: list[tuple[str, str]] = []
    for kind, text in pieces:
        if kind == CALL:
            calls.append((text, ""))
        elif kind == ARGUMENTS:
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return tuple(calls)


class ChoiceReader:
    """Splits the deltas of one choice into pieces. Feed it every delta."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._thoughts = None
        if syntax.reasoning is not None:
            self._thoughts = ReasoningSplitter(*syntax.reasoning, syntax.exact)
        self._calls = None if syntax.calls is None else syntax.calls.splitter()

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.reasoning_tokens

    @property
    def called(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def in_text(self) -> bool:
        """Whether the next token may be text: no thought and no call is open."""
        thinks = self._thoughts is not None and self._thoughts.kind == REASONING
        return not thinks and (self._calls is None or self._calls.in_text)

    def ending(self, reason: str) -> str:
        """The finish reason. It is "length" if the engine stopped because a call did not fit."""
        is_cut = self._calls is not None and self._calls.is_cut
        return "length" if reason == "stop" and is_cut else reason

    def feed(self, text: str, token_ids: tuple[int, ...] = ()) -> list[Piece]:
        if self._thoughts is None:
            pieces = [(CONTENT, text)] if text else []
        else:
            pieces = self._thoughts.feed(text, len(token_ids))
        return pieces if self._calls is None else self._called(pieces, token_ids)

    def finish(self) -> list[Piece]:
        pieces = [] if self._thoughts is None else self._thoughts.finish()
        if self._calls is None:
            return pieces
        return self._called(pieces, ()) + self._calls.finish()

    def _called(self, pieces: list[Piece], token_ids: tuple[int, ...]) -> list[Piece]:
        assert self._calls is not None
        split = self._calls.feed("", token_ids)
        for kind, text in pieces:
            split += self._calls.feed(text) if kind == CONTENT else [(kind, text)]
        return split


async def answer_syntax_of(parsed: ParsedRequest, tokenizer: Tokenizer | None) -> AnswerSyntax:
    prompt, tools = parsed.request.prompt, parsed.tools
    assert isinstance(prompt, Chat)
    if tokenizer is None:
        return remote_syntax(tools)
    return local_syntax(tools, tokenizer, await opened_thought(tokenizer, prompt))


def local_syntax(tools: ToolSet | None, tokenizer: Tokenizer, thought: bool | None) -> AnswerSyntax:
    """`thought`: as in `AnswerSyntax`."""
    marks = None
    if tools is not None:
        form = tokenizer.tool_support.format
        marks = CallMarks(
            form, tools.callable_names, tokenizer.special_ids.get(form.mark), tools.required
        )
    reasoning = None if tokenizer.reasoning is None else (tokenizer.reasoning, bool(thought))
    return AnswerSyntax(reasoning, marks, thought)


def remote_syntax(tools: ToolSet | None) -> AnswerSyntax:
    """How `workers/remote/answer.py` writes an answer."""
    marks = None
    if tools is not None:
        marks = CallMarks(FORMATS["hermes"], tools.callable_names, CALL_TOKEN, tools.required)
    return AnswerSyntax((THOUGHT_MARKS, False), marks, exact=True)


async def with_answer_grammar(
    parsed: ParsedRequest, tokenizer: Tokenizer | None, syntax: AnswerSyntax
) -> ParsedRequest:
    """The same request with one grammar for its thoughts, tools and format. A server elsewhere
    enforces them itself."""
    if tokenizer is None:
        return parsed
    try:
        grammar = await _whole_format(parsed, tokenizer, syntax.thought)
    except InvalidRequest as error:
        raise with_param_name(error, FORMAT, parsed.format_field) from None
    if grammar is parsed.request.response_format:
        return parsed
    return replace(parsed, request=replace(parsed.request, response_format=grammar))


async def _whole_format(
    parsed: ParsedRequest, tokenizer: Tokenizer, thought: bool | None
) -> ResponseFormat | None:
    answer, tools = parsed.request.response_format, parsed.tools
    if tools is not None:
        size = len(msgspec.json.encode(tools.fields()))
        if size > MAX_INLINE_BYTES or (answer is not None and answer.kind == "gbnf"):
            build = partial(tool_constraint, tools, tokenizer, thought, answer)
            answer = await asyncio.to_thread(build)
        else:
            answer = tool_constraint(tools, tokenizer, thought, answer)
    elif answer is not None and thought is not None:
        answer = await asyncio.to_thread(answer_behind_thought, answer, tokenizer, thought)
    return answer


# the grammar compiler's error: line, column, reason, then the lines around it
_FAULT = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| .*)?$")
_RULE = re.compile(r"arguments_(\d+): ")


def tool_events(
    service: DialectPipeline,
    parsed: ParsedRequest,
    planned: PlannedAnswer,
    exchange: Exchange,
    answer: NamedAnswer | None = None,
) -> Events:
    """The events of `parsed`. Its response format must already be the grammar of its tools."""
    grammar = parsed.request.response_format
    planned.set_format(grammar)
    events = events_of(service, planned, exchange, answer)
    if parsed.tools is None or grammar is None:
        return format_named(events, parsed.format_field)
    return _blaming(events, parsed.tools, grammar, parsed.format_field)


async def _blaming(
    events: Events, tool_set: ToolSet, grammar: ResponseFormat, format_field: str
) -> Events:
    """The same events. An error in the grammar becomes an error of the tool, or of the answer
    format, that it came from."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except InvalidRequest as error:
            if error.param != FORMAT:
                raise
            raise blamed(error.message, tool_set, grammar, format_field) from None


def blamed(
    message: str, tool_set: ToolSet, grammar: ResponseFormat, format_field: str = FORMAT
) -> InvalidRequest:
    fault = _FAULT.search(message)
    if fault is not None:
        lines = grammar.text.splitlines()
        at = int(fault[1]) - 1
        line = lines[at] if at < len(lines) else ""
        if line.startswith(ANSWER):
            reason = f"{format_field}: cannot be enforced: {fault[2]}"
            return InvalidRequest(reason, param=format_field)
        rule = _RULE.match(line)
        if rule is not None:
            tool = tool_set.usable()[int(rule[1])]
            where = tool.where or f"tools.{tool_set.tools.index(tool)}"
            reason = f"{where}: the schema of '{tool.name}' cannot be enforced: {fault[2]}"
            return InvalidRequest(reason, param=where)
    return InvalidRequest(f"tools: {message}", param="tools")


# kinds of pieces: CALL starts a call, its text is the tool's name; ARGUMENTS is JSON text
CALL, ARGUMENTS = "call", "arguments"


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How to find calls in the answers to one request."""

    format: ToolFormat
    names: frozenset[str]
    # the token of the mark, if it is a special token: those have no text
    mark_id: int | None = None
    # the answer must consist of calls only
    required: bool = False

    def splitter(self) -> ToolSplitter:
        return ToolSplitter(self)


class ToolSplitter:
    """Splits the deltas of one choice into pieces: CONTENT, CALL and ARGUMENTS."""

    def __init__(self, marks: CallMarks) -> None:
        self.marks = marks
        form = marks.format
        names = "|".join(re.escape(name) for name in sorted(marks.names))
        self._head = re.compile(
            rf'\{{\s*"name"\s*:\s*"({names})"\s*,\s*"{form.key}"\s*:\s*(?=\S)', re.ASCII
        )
        self._heads = [f'{{"name":"{name}","{form.key}":' for name in marks.names]
        self._scanner = _Value()
        self._step = self._first if form.bare else self._words
        self.pending = ""
        self.num_calls = 0
        # the answer ended while a call was about to start
        self.is_cut = False

    @property
    def in_text(self) -> bool:
        return self._step in (self._first, self._words)

    def feed(self, text: str, token_ids: tuple[int, ...] = ()) -> list[Piece]:
        marked = self.marks.mark_id is not None and self.marks.mark_id in token_ids
        if marked and self._step in (self._first, self._words):
            self._step = self._opening
        self.pending += text
        pieces: list[Piece] = []
        while self.pending and self._step(pieces):
            continue
        return pieces

    def finish(self) -> list[Piece]:
        """The rest when the choice has ended. If at most half of a mark is there, it is text,
        unless a call was required. If more is there, it is a call that ran out of tokens."""
        text, self.pending = self.pending, ""
        if self._step not in (self._first, self._words):
            return []
        size = len(text) if self.marks.required else self._begun_call(text)
        if size:
            self.is_cut = True
            text = text[:-size].rstrip()
        return [(CONTENT, text)] if text else []

    def _begun_call(self, text: str) -> int:
        """Length of an unfinished mark at the end, or of an unfinished call without a mark. 0 if
        less than half of it is there."""
        if self._step == self._first:
            bare = "".join(text.split())
            parts = (head for head in self._heads if head.startswith(bare))
            return len(text) if any(2 * len(bare) > len(head) for head in parts) else 0
        mark = self.marks.format.mark
        size = overlap(text, mark) if self.marks.mark_id is None else 0
        return size if 2 * size > len(mark) else 0

    def _first(self, pieces: list[Piece]) -> bool:
        """The start of an answer, where a call needs no mark."""
        if self._head.match(self.pending.lstrip()) is not None:
            self.pending = self.pending.lstrip()
            self._step = self._opening
            return True
        bare = "".join(self.pending.split())
        if any(head.startswith(bare) for head in self._heads):
            return False
        self._step = self._words
        return True

    def _words(self, pieces: list[Piece]) -> bool:
        mark = self.marks.format.mark
        at = self.pending.find(mark) if self.marks.mark_id is None else -1
        if at >= 0:
            self._add_text(pieces, self.pending[:at].rstrip())
            self.pending = self.pending[at + len(mark) :]
            self._step = self._opening
            return True
        end = len(self.pending)
        if self.marks.mark_id is None:
            end -= overlap(self.pending, mark)
        # white space is kept back until text follows it
        end = len(self.pending[:end].rstrip())
        self._add_text(pieces, self.pending[:end])
        self.pending = self.pending[end:]
        return False

    def _opening(self, pieces: list[Piece]) -> bool:
        head = self._head.search(self.pending)
        if head is None:
            return False
        # a mark that is a special token may come after text that was kept back
        self._add_text(pieces, self.pending[: head.start()].rstrip())
        pieces.append((CALL, head[1]))
        self.num_calls += 1
        self.pending = self.pending[head.end() :]
        self._scanner = _Value()
        self._step = self._arguments
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        size = self._scanner.feed(self.pending)
        pieces.append((ARGUMENTS, self.pending[:size]))
        self.pending = self.pending[size:]
        if self._scanner.ended:
            self._step = self._between
        return self._scanner.ended

    def _between(self, pieces: list[Piece]) -> bool:
        """After a call come only its end mark and further calls."""
        if self._head.search(self.pending) is None:
            return False
        self.pending = self.pending[self.pending.index("{") :]
        self._step = self._opening
        return True

    def _add_text(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append((CONTENT, text))


class _Value:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.escaped = False
        self.ended = False

    def feed(self, text: str) -> int:
        """The number of characters that belong to the value."""
        for at, character in enumerate(text):
            if self.in_string:
                self._quote(character)
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.ended = True
                    return at + 1
        return len(text)

    def _quote(self, character: str) -> None:
        if self.escaped:
            self.escaped = False
        elif character == "\\":
            self.escaped = True
        elif character == '"':
            self.in_string = False


REASONING, CONTENT = "reasoning", "content"
Piece = tuple[str, str]


class ReasoningSplitter:
    """Splits the deltas of one choice into (kind, text) pieces.

    Keeps back text that may be the start of a mark, and white space that may come before one.
    """

    def __init__(self, marks: tuple[str, str], inside: bool, exact: bool = False) -> None:
        self.opening, self.closing = marks
        self.exact = exact
        # None: only white space so far, so the opening mark may still come
        self.kind: str | None = REASONING if inside else None
        self.pending = ""
        # white space before text is left out
        self.fresh = not exact
        self.reasoning_tokens = 0

    def feed(self, text: str, num_tokens: int = 0) -> list[Piece]:
        if self.kind != CONTENT:
            self.reasoning_tokens += num_tokens
        self.pending += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            continue
        return pieces

    def finish(self) -> list[Piece]:
        """The rest when the choice has ended. An incomplete mark is text."""
        kind, text = self.kind or CONTENT, self.pending
        self.pending = ""
        if kind == REASONING:
            text = text.rstrip()
        return [(kind, text)] if text else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take one step; True if another one may be possible."""
        if self.fresh:
            self.pending = self.pending.lstrip()
        if not self.pending:
            return False
        if self.kind is None:
            return self._begin()
        if self.kind == REASONING:
            return self._reason(pieces)
        self._add_piece(pieces, CONTENT, len(self.pending))
        return False

    def _begin(self) -> bool:
        if self.pending.startswith(self.opening):
            self.kind, self.pending = REASONING, self.pending[len(self.opening) :]
            return True
        if self.opening.startswith(self.pending):
            return False
        self.kind, self.reasoning_tokens = CONTENT, 0
        return True

    def _reason(self, pieces: list[Piece]) -> bool:
        end = self.pending.find(self.closing)
        if end >= 0:
            self._add_piece(pieces, REASONING, len(self.pending[:end].rstrip()))
            self.pending = self.pending.lstrip()[len(self.closing) :]
            self.kind, self.fresh = CONTENT, not self.exact
            return True
        safe = self.pending[: len(self.pending) - overlap(self.pending, self.closing)].rstrip()
        self._add_piece(pieces, REASONING, len(safe))
        return False

    def _add_piece(self, pieces: list[Piece], kind: str, size: int) -> None:
        if size:
            pieces.append((kind, self.pending[:size]))
            self.pending = self.pending[size:]
            self.fresh = False


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


async def opened_thought(tokenizer: Tokenizer, chat: Chat) -> bool | None:
    """True if the prompt ends inside a thought, False if a thought may follow; None if the model
    does not think, or the thought has already ended."""
    if tokenizer.reasoning is None:
        return None
    if is_long(chat):
        text = await asyncio.to_thread(tokenizer.render, chat)
    else:
        text = tokenizer.render(chat)
    opening, closing = tokenizer.reasoning
    end = text.rstrip()
    return None if end.endswith(closing) else end.endswith(opening)
