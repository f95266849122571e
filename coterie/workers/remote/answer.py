"""Reads the answer of a remote server into events: chunks of a stream, or a whole body.

Calls of tools and thoughts, which a server sends in fields of their own, become text with marks, as
the answer of an engine here has them; `api/tools/read.py` takes them apart again. A call begins at
`CALL_TOKEN`, which no text can imitate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from coterie.core.events import (
    CALL_TOKEN,
    THOUGHT_MARKS,
    UNKNOWN_TOKEN,
    Delta,
    Event,
    Finished,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from coterie.core.plan import RemoteAssignment
from coterie.core.request import Chat
from coterie.workers.remote.failure import RETRY_S, RemoteFailure, in_stream

# characters of one token of text that are believed, and of an answer of unknown length
MAX_TOKEN_CHARACTERS, LEAST_MOST_CHARACTERS = 64, 1 << 16
MAX_CALLS = 128
# counts above this are not believed
MAX_TOKENS = 1 << 31
REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}


class _CallFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    function: _CallFunction | None = None


class _TokenScore(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None
    top_logprobs: list[_TokenScore] | None = None


class _Scores(msgspec.Struct):
    content: list[_TokenScore] | None = None


class _Part(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Part | None = None
    message: _Part | None = None
    text: str | None = None
    logprobs: _Scores | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _AnswerDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _AnswerDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class _ChoiceState:
    """How far one choice has come."""

    num_tokens: int = 0
    is_thinking: bool = False
    # of the call that is being written; the number of calls is one more
    call: int = -1
    arguments: list[str] = field(default_factory=list)
    reason: str | None = None


class AnswerReader:
    """Takes the chunks of one answer in order; passes events to `sink`. Raises RemoteFailure for
    anything that is not a correct answer."""

    def __init__(
        self,
        assignment: RemoteAssignment,
        replica: str,
        sink: Callable[[Event], None],
        key: str = "",
    ) -> None:
        self._assignment, self._replica, self._sink, self._key = assignment, replica, sink, key
        self._choices = [_ChoiceState() for _ in range(assignment.sampling.n or 1)]
        self._usage: _Usage | None = None
        limits, prompt = assignment.limits, assignment.prompt
        most = (limits.max_tokens or 0) * MAX_TOKEN_CHARACTERS
        self._room = max(most, LEAST_MOST_CHARACTERS) * len(self._choices)
        # logprobs of one choice; a server may count its end
        self._max_tokens = (limits.max_tokens or 0) + 1
        if not assignment.is_limited:
            self._room = 16 * LEAST_MOST_CHARACTERS * len(self._choices)
            self._max_tokens = LEAST_MOST_CHARACTERS
        rules = prompt.tool_rules if isinstance(prompt, Chat) else None
        self._tools = frozenset(() if rules is None else rules.names)
        # seconds since arrival
        self.sent_s = 0.0
        self.first_token_s = self._last_token_s = 0.0
        self.is_started = False

    @property
    def has_ended(self) -> bool:
        """Whether every choice has its end."""
        return all(choice.reason is not None for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    def take(self, raw: bytes) -> None:
        """One chunk, or a whole body."""
        try:
            chunk = _decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self._bad("sent something that is not a chunk of an answer") from None
        if chunk.error and bytes(chunk.error) != b"null":
            raise in_stream(_loose(bytes(chunk.error)), self._replica, self._key)
        if chunk.usage is not None:
            self._usage = chunk.usage
        choices = chunk.choices or ()
        if len(choices) > len(self._choices):
            raise self._bad("sent more choices in one chunk than were asked for")
        for choice in choices:
            self._take_choice(choice)

    def finished(self) -> Finished:
        """The last event. The counts are the server's; without them each chunk was a token."""
        told, details = self._usage or _Usage(), _PromptDetails()
        if told.prompt_tokens_details is not None:
            details = told.prompt_tokens_details
        thought = told.completion_tokens_details
        prompt_tokens = _count(told.prompt_tokens, self._assignment.num_prompt_tokens)
        usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=_count(told.completion_tokens, self.num_tokens),
            cached_tokens=min(_count(details.cached_tokens, 0), prompt_tokens),
            reasoning_tokens=_count(thought.reasoning_tokens, 0) if thought is not None else 0,
        )
        total_s = self._since_arrival_s()
        timings = Timings(
            queue_s=self.sent_s if self.is_started else total_s,
            prefill_s=max(self.first_token_s - self.sent_s, 0.0) if self.first_token_s else 0.0,
            first_token_s=self.first_token_s,
            decode_s=self._last_token_s - self.first_token_s,
            total_s=total_s,
        )
        reasons = tuple(choice.reason or "abort" for choice in self._choices)
        return Finished(self._assignment.request_id, reasons, usage, timings)

    def expire(self) -> None:
        """The request's own deadline has passed: end the choices with the text that is there."""
        for index, choice in enumerate(self._choices):
            if choice.reason is None:
                choice.reason = "timeout"
                self._emit(index, "", (), finish_reason="timeout")

    def _take_choice(self, choice: _Choice) -> None:
        if not 0 <= choice.index < len(self._choices):
            raise self._bad("sent a choice that nobody asked for")
        self._start()
        state, part = self._choices[choice.index], choice.delta or choice.message or _Part()
        pieces = self._pieces(state, part, choice.text)
        tokens: tuple[int, ...] = (UNKNOWN_TOKEN,)
        if (pieces or part.tool_calls) and state.reason is not None:
            raise self._bad("went on after the end of a choice")
        if part.tool_calls and state.call < 0:
            tokens = (CALL_TOKEN,)
        text = "".join(pieces) + "".join(self._calls(state, part.tool_calls or ()))
        scores = self._scores(choice.logprobs, is_text=bool(pieces))
        self._room -= len(text)
        if self._room < 0:
            raise self._bad("does not end its answer")
        if text or scores:
            num_tokens = max(len(scores or ()), 1)
            state.num_tokens += num_tokens
            tokens += (UNKNOWN_TOKEN,) * (num_tokens - 1)
            self._last_token_s = self._since_arrival_s()
            self.first_token_s = self.first_token_s or self._last_token_s
            self._emit(choice.index, text, tokens, logprobs=scores)
        if choice.finish_reason is not None and state.reason is None:
            self._end(choice.index, state, choice)

    def _pieces(self, state: _ChoiceState, part: _Part, text: str | None) -> list[str]:
        thought = part.reasoning_content or part.reasoning or ""
        words = (text or "") + (part.content or "") + (part.refusal or "")
        pieces: list[str] = []
        opening, closing = THOUGHT_MARKS
        if thought:
            if not state.is_thinking:
                pieces.append(opening)
                state.is_thinking = True
            pieces.append(thought)
        if (words or part.tool_calls) and state.is_thinking:
            state.is_thinking = False
            pieces.append(closing)
        return [*pieces, words] if words else pieces

    def _calls(self, state: _ChoiceState, calls: list[_Call] | tuple[()]) -> list[str]:
        """The text of calls: `{"name": NAME, "arguments": ARGUMENTS}` one after the other."""
        written: list[str] = []
        for place, call in enumerate(calls):
            index = place if call.index is None else call.index
            function = call.function or _CallFunction()
            if index != state.call:
                if index != state.call + 1 or index >= MAX_CALLS or not function.name:
                    raise self._bad("mixed up its calls of tools")
                if function.name not in self._tools:
                    raise self._bad("called a tool that may not be called")
                written.append(self._call_end(state, is_cut=False))
                state.call, state.arguments = index, []
                written.append(f'{{"name": {json.dumps(function.name)}, "arguments": ')
            if function.arguments:
                state.arguments.append(function.arguments)
                written.append(function.arguments)
        return written

    def _call_end(self, state: _ChoiceState, *, is_cut: bool) -> str:
        """What closes the last call. A call that was not cut off must be whole."""
        if state.call < 0:
            return ""
        given = "".join(state.arguments)
        if not given.strip():
            return "{}}\n"
        if is_cut:
            return ""
        try:
            arguments = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise self._bad("called a tool with arguments that are not a JSON object")
        return "}\n"

    def _scores(self, scores: _Scores | None, *, is_text: bool) -> tuple[TokenLogprob, ...] | None:
        if self._assignment.sampling.logprobs is None:
            return None
        given = scores.content if scores is not None else None
        if given is None and is_text:
            raise RemoteFailure("unsupported", f"logprobs: {self._replica} does not send them")
        if len(given or ()) > self._max_tokens:
            raise self._bad("sent logprobs of more tokens than were asked for")
        most = self._assignment.sampling.logprobs + 1
        return tuple(_scored(one, most) for one in given or ())

    def _end(self, index: int, state: _ChoiceState, choice: _Choice) -> None:
        # an unknown reason, as that of a content filter, is none of an answer that is whole
        reason = REASONS.get(choice.finish_reason or "", "abort")
        text = self._call_end(state, is_cut=reason != "stop")
        if state.is_thinking:
            text = THOUGHT_MARKS[1] if reason == "stop" else ""
        match = choice.stop_reason if reason == "stop" else None
        if reason == "length" and choice.stop_reason in ("timeout", "abort"):
            # another Coterie
            reason = str(choice.stop_reason)
        state.reason = reason
        self._emit(index, text, (), finish_reason=reason, stop_match=match)

    def _start(self) -> None:
        if not self.is_started:
            self.is_started = True
            self._sink(Started(self._assignment.request_id, self._replica, 0, 0))

    def _emit(
        self,
        choice: int,
        text: str,
        tokens: tuple[int, ...],
        *,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        finish_reason: str | None = None,
        stop_match: str | int | None = None,
    ) -> None:
        self._sink(
            Delta(
                self._assignment.request_id,
                choice,
                text,
                tokens,
                logprobs,
                finish_reason,
                stop_match,
            )
        )

    def _since_arrival_s(self) -> float:
        return time.monotonic() - self._assignment.arrived_at

    def _bad(self, what: str) -> RemoteFailure:
        return RemoteFailure("unavailable", f"{self._replica} {what}", RETRY_S, kind="bad_answers")


def _scored(one: _TokenScore, most: int) -> TokenLogprob:
    top = tuple(
        (UNKNOWN_TOKEN, item.token, _bytes_of(item), item.logprob)
        for item in (one.top_logprobs or ())[:most]
    )
    return TokenLogprob(UNKNOWN_TOKEN, one.token, _bytes_of(one), one.logprob, top)


def _bytes_of(one: _TokenScore) -> bytes:
    if one.bytes is not None and all(0 <= byte < 256 for byte in one.bytes):
        return bytes(one.bytes)
    return one.token.encode(errors="replace")


def _count(told: int | None, own: int) -> int:
    return told if told is not None and 0 <= told < MAX_TOKENS else own


def _loose(raw: bytes) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
