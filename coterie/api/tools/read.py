"""Reads one choice of an answer as pieces: thoughts, words, calls and their arguments.

Joins the two splitters; what neither is asked for passes as words.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from coterie.api.collect import CollectedChoice
from coterie.api.inference import (
    DialectPipeline,
    ParsedRequest,
    RequestHeaders,
    events_of,
    inference_request,
)
from coterie.api.response_format import FORMAT, format_named, with_param_name
from coterie.api.tools.base import ToolSet
from coterie.api.tools.grammar import ANSWER, answer_behind_thought, tool_constraint
from coterie.api.tools.reasoning import CONTENT, REASONING, Piece, ReasoningSplitter, opened_thought
from coterie.api.tools.split import ARGUMENTS, CALL, CallMarks
from coterie.api.transport.sse import Events
from coterie.core.errors import InvalidRequest
from coterie.core.request import Chat, ResponseFormat

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

# of tools as JSON; above it a grammar is written on a thread: about 2 ms of the event loop
MAX_INLINE_BYTES = 8_000


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How the answers to one request are to be read."""

    # marks, and whether the prompt already opened them; None = the model does not think
    reasoning: tuple[tuple[str, str], bool] | None = None
    # None = no tools were given
    calls: CallMarks | None = None
    # the prompt has opened a thought, or the model may; None = neither
    thought: bool | None = None

    def reader(self) -> ChoiceReader | None:
        """None where all of an answer is words."""
        return None if self.reasoning is None and self.calls is None else ChoiceReader(self)

    def read(self, choice: CollectedChoice) -> ChoiceParts:
        """A whole choice."""
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


# all of an answer is words
WORDS = AnswerSyntax()


@dataclass(frozen=True, slots=True)
class ChoiceParts:
    """What a choice says, thinks and calls: names with their arguments."""

    words: str
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str = "stop"
    reasoning_tokens: int = 0


def _joined(pieces: list[Piece], kind: str) -> str:
    return "".join(text for found, text in pieces if found == kind)


def _calls(pieces: list[Piece]) -> tuple[tuple[str, str], ...]:
    calls: list[tuple[str, str]] = []
    for kind, text in pieces:
        if kind == CALL:
            calls.append((text, ""))
        elif kind == ARGUMENTS:
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return tuple(calls)


class ChoiceReader:
    """Feed every delta of one choice."""

    def __init__(self, reading: AnswerSyntax) -> None:
        self._thoughts = (
            None if reading.reasoning is None else ReasoningSplitter(*reading.reasoning)
        )
        self._calls = None if reading.calls is None else reading.calls.splitter()

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._thoughts is None else self._thoughts.reasoning_tokens

    @property
    def called(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def ending(self, reason: str) -> str:
        """Why the choice ended; an engine that has no room for a call ends before it."""
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
        found = self._calls.feed("", token_ids)
        for kind, text in pieces:
            found += self._calls.feed(text) if kind == CONTENT else [(kind, text)]
        return found


async def answer_syntax_of(ask: ParsedRequest, tokenizer: Tokenizer) -> AnswerSyntax:
    assert isinstance(ask.prompt, Chat)
    marks = None
    if ask.tools is not None:
        form = tokenizer.tool_support.format
        marks = CallMarks(
            form,
            ask.tools.callable_names,
            tokenizer.special_ids.get(form.mark),
            ask.tools.required,
        )
    thought = await opened_thought(tokenizer, ask.prompt)
    reasoning = None if tokenizer.reasoning is None else (tokenizer.reasoning, bool(thought))
    return AnswerSyntax(reasoning, marks, thought)


async def with_answer_grammar(
    ask: ParsedRequest, tokenizer: Tokenizer, reading: AnswerSyntax
) -> ParsedRequest:
    """The same with the one grammar that holds its thoughts, tools and format together."""
    try:
        return replace(ask, response_format=await _whole_format(ask, tokenizer, reading.thought))
    except InvalidRequest as error:
        raise with_param_name(error, FORMAT, ask.format_field) from None


async def _whole_format(
    ask: ParsedRequest, tokenizer: Tokenizer, thought: bool | None
) -> ResponseFormat | None:
    answer = ask.response_format
    if ask.tools is not None:
        size = len(msgspec.json.encode(ask.tools.fields()))
        if size > MAX_INLINE_BYTES or (answer is not None and answer.kind == "gbnf"):
            build = partial(tool_constraint, ask.tools, tokenizer, thought, answer)
            answer = await asyncio.to_thread(build)
        else:
            answer = tool_constraint(ask.tools, tokenizer, thought, answer)
    elif answer is not None and thought is not None:
        answer = await asyncio.to_thread(answer_behind_thought, answer, tokenizer, thought)
    return answer


# the grammar's own complaint: line, column, reason, then the lines around it
_FAULT = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| .*)?$")
_RULE = re.compile(r"arguments_(\d+): ")


def tool_events(
    service: DialectPipeline, ask: ParsedRequest, steering: RequestHeaders, request_id: str
) -> Events:
    """The events of `ask`, whose format is already its tools' grammar."""
    asked = inference_request(ask, steering, request_id)
    events = events_of(service, asked, steering.exchange)
    if ask.tools is None or ask.response_format is None:
        return format_named(events, ask.format_field)
    return _blaming(events, ask.tools, ask)


async def _blaming(events: Events, toolbox: ToolSet, ask: ParsedRequest) -> Events:
    """The same events; a complaint about the grammar becomes one about a tool, or about what an
    answer that calls none has to look like."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except InvalidRequest as error:
            if error.param != FORMAT or ask.response_format is None:
                raise
            raise blamed(error.message, toolbox, ask.response_format, ask.format_field) from None


def blamed(
    message: str, toolbox: ToolSet, grammar: ResponseFormat, format_field: str = FORMAT
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
            tool = toolbox.usable()[int(rule[1])]
            where = f"tools.{toolbox.tools.index(tool)}"
            reason = f"{where}: the schema of '{tool.name}' cannot be enforced: {fault[2]}"
            return InvalidRequest(reason, param=where)
    return InvalidRequest(f"tools: {message}", param="tools")
