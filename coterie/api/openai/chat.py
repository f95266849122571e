"""Writes an answer of /v1/chat/completions, whole or as chunks.

In the plain case, text only, a chunk is three joined byte strings, because a token may cost only
microseconds. Everything else that a request can ask for takes the slower path through dicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coterie import __version__
from coterie.api.dialect import CollectedAnswer, CollectedChoice
from coterie.api.door import short_id
from coterie.api.errors import encode
from coterie.api.openai.render import (
    DONE,
    KEEPALIVE,
    RunningUsage,
    chat_logprobs,
    error_frame,
    finish_fields,
    frame,
    metadata_of,
    prompt_logprobs,
    usage_fields,
)
from coterie.api.tools.read import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    TEXT_ONLY,
    AnswerSyntax,
    ChoiceReader,
    Piece,
)
from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Event, Finished, Started

FINGERPRINT = f"coterie-{__version__}"


@dataclass(slots=True)
class ChatShape:
    """The form of one answer, as its request asked for it."""

    id: str
    created: int
    # may change until the first event: another specialist may answer
    model: str
    num_choices: int
    include_usage: bool = False
    # send the usage in every chunk
    continuous_usage: bool = False
    logprobs: bool = False
    # number of alternatives for each token of the prompt
    prompt_logprobs: int | None = None
    # send the token ids of the prompt and of every choice
    token_ids: bool = False
    # logprobs name tokens by their ids
    names_ids: bool = False
    # the text of the turn that the answer continues, if the answer repeats it
    echo: str = ""
    syntax: AnswerSyntax = TEXT_ONLY

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def whole(shape: ChatShape, answer: CollectedAnswer) -> bytes:
    """The body of an answer without streaming."""
    choices, reasoning_tokens = [], 0
    for index, choice in enumerate(answer.choices):
        rendered, tokens = _choice(shape, index, choice)
        choices.append(rendered)
        reasoning_tokens += tokens
    payload = shape.head("chat.completion") | {"choices": choices}
    payload["usage"] = usage_fields(answer.usage, reasoning_tokens)
    for started in answer.started[:1]:
        if shape.token_ids:
            payload["prompt_token_ids"] = started.prompt_ids
        if shape.prompt_logprobs is not None:
            scores = started.prompt_logprobs or ()
            payload["prompt_logprobs"] = prompt_logprobs(scores, shape.prompt_logprobs)
    return encode(payload | answer.metadata)


def _choice(shape: ChatShape, index: int, choice: CollectedChoice) -> tuple[dict[str, Any], int]:
    parts = shape.syntax.read(choice)
    words = shape.echo + parts.words
    message: dict[str, Any] = {"role": "assistant", "content": words, "refusal": None}
    if shape.syntax.reasoning is not None:
        message["reasoning_content"] = parts.thought or None
    if parts.calls:
        message["content"] = words or None
        message["tool_calls"] = [call_fields(name, text) for name, text in parts.calls]
    fields = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(choice.logprobs, shape.names_ids) if shape.logprobs else None,
    } | finish_fields(parts.finish_reason, choice.stop_match, bool(parts.calls))
    if shape.token_ids:
        fields["token_ids"] = choice.token_ids
    return fields, parts.reasoning_tokens


def call_fields(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": short_id("call_", 24), "type": "function", "function": function}


class ChatStream:
    """Frames of one streamed chat."""

    keepalive = KEEPALIVE

    def __init__(self, shape: ChatShape) -> None:
        self.shape = shape
        self.readers = [shape.syntax.reader() for _ in range(shape.num_choices)]
        self.spent = RunningUsage() if shape.continuous_usage else None
        needs_dicts = shape.logprobs or shape.token_ids or self.spent is not None
        self.plain = not needs_dicts and self.readers[0] is None
        self.prompt_ids: tuple[int, ...] = ()
        # index of each choice's last call
        self.calls = [-1] * shape.num_choices
        # choices that have sent text or a call
        self.answered = set[int]()
        self.started = False
        # these are known at the first event
        self._head, self._before = b"", list[bytes]()
        self._tail = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"
        self._after = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def render(self, event: Event) -> bytes:
        if self.spent is not None:
            self.spent.take(event)
        if type(event) is Delta:
            if self.plain and event.finish_reason is None and self.started:
                if not event.text:
                    return b""
                return self._before[event.choice] + encode(event.text) + self._after
            return self._begin() + self._delta(event)
        if isinstance(event, Finished):
            return self._begin() + self._end(event)
        if isinstance(event, Started):
            self.prompt_ids = event.prompt_ids
            return self._begin()
        return b""

    def error(self, error: CoterieError) -> bytes:
        return error_frame(error, self.shape.id)

    def _begin(self) -> bytes:
        if self.started:
            return b""
        self.started = True
        head = encode(self.shape.head("chat.completion.chunk"))[:-1]
        self._head = b"data: " + head + b',"choices":['
        # a chunk with text is `before[choice] + JSON string + after`
        self._before = [
            self._head + b'{"index":%d,"delta":{"content":' % index
            for index in range(self.shape.num_choices)
        ]
        frames = []
        for index in range(self.shape.num_choices):
            # if tools may be called, an answer may have no text
            content = "" if self.shape.syntax.calls is None else None
            delta = {"role": "assistant", "content": content, "refusal": None}
            frames.append(self._chunk({"index": index, "delta": delta} | _OPEN))
            if self.shape.echo:
                delta = {"content": self.shape.echo}
                frames.append(self._chunk({"index": index, "delta": delta} | _OPEN))
        if self.shape.token_ids:
            ids = b'"prompt_token_ids":' + encode(self.prompt_ids)
            frames[0] = frames[0].replace(b'"choices":', ids + b',"choices":', 1)
        return b"".join(frames)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        if self.spent is None:
            return self._head + encode(choice) + self._tail
        return self._head + encode(choice) + b'],"usage":' + encode(self.spent.fields()) + b"}\n\n"

    def _delta(self, event: Delta) -> bytes:
        reader = self.readers[event.choice]
        deltas = [self._fields(event.choice, piece) for piece in self._pieces(event, reader)]
        if self._is_silent(event):
            deltas.append({"content": ""})
        extras = self._extras(event)
        if extras and not deltas:
            deltas = [{} if self.shape.syntax.calls is not None else {"content": ""}]
        frames = []
        for delta in deltas:
            choice = {"index": event.choice, "delta": delta} | _OPEN
            # the extra fields of a token are sent once, with its first piece
            frames.append(self._chunk(choice | extras))
            extras = {}
        if event.finish_reason is not None:
            last = {"index": event.choice, "delta": {}, "logprobs": None}
            frames.append(self._chunk(last | _finish(event, event.finish_reason, reader)))
        return b"".join(frames)

    def _is_silent(self, event: Delta) -> bool:
        """Whether the choice ends without text and call: then its content is the empty string."""
        ended = event.finish_reason is not None and event.choice not in self.answered
        return ended and self.shape.syntax.calls is not None

    def _pieces(self, event: Delta, reader: ChoiceReader | None) -> list[Piece]:
        if reader is None:
            return [(CONTENT, event.text)] if event.text else []
        pieces = reader.feed(event.text, event.token_ids)
        return pieces if event.finish_reason is None else pieces + reader.finish()

    def _fields(self, choice: int, piece: Piece) -> dict[str, Any]:
        kind, text = piece
        if kind == REASONING:
            return {"reasoning_content": text}
        self.answered.add(choice)
        if kind == CALL:
            self.calls[choice] += 1
            return {"tool_calls": [{"index": self.calls[choice]} | call_fields(text, "")]}
        if kind == ARGUMENTS:
            call = {"index": self.calls[choice], "function": {"arguments": text}}
            return {"tool_calls": [call]}
        return {"content": text}

    def _extras(self, event: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.shape.logprobs and event.logprobs:
            extras["logprobs"] = chat_logprobs(event.logprobs, self.shape.names_ids)
        if self.shape.token_ids and event.token_ids:
            extras["token_ids"] = event.token_ids
        return extras

    def _end(self, event: Finished) -> bytes:
        if not self.shape.include_usage:
            return DONE
        thought = sum(reader.reasoning_tokens for reader in self.readers if reader is not None)
        payload = self.shape.head("chat.completion.chunk")
        payload |= {"choices": [], "usage": usage_fields(event.usage, thought)}
        return frame(payload | metadata_of(event)) + DONE


def _finish(event: Delta, reason: str, reader: ChoiceReader | None) -> dict[str, Any]:
    if reader is None:
        return finish_fields(reason, event.stop_match)
    return finish_fields(reader.ending(reason), event.stop_match, reader.called)


_OPEN: dict[str, Any] = {"logprobs": None, "finish_reason": None}
