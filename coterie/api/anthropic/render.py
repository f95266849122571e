"""Writes an answer of /v1/messages, whole or as events in Anthropic's order.

message_start, then per block content_block_start, deltas, content_block_stop, then message_delta
and message_stop. The first block's start is followed by a ping. No [DONE].
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from coterie.api import errors
from coterie.api.dialect import CollectedAnswer
from coterie.api.door import short_id
from coterie.api.errors import encode
from coterie.api.tools.read import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    TEXT_ONLY,
    AnswerSyntax,
    ChoiceParts,
    Piece,
)
from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Event, Finished, Started, Usage, metadata

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(slots=True)
class MessageShape:
    id: str
    # may change until the first event: another specialist may answer
    model: str
    request_id: str
    syntax: AnswerSyntax = TEXT_ONLY

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
        }


def stop_fields(reason: str, stop_match: str | int | None, called: bool = False) -> dict[str, Any]:
    """A time limit or an abort cuts an answer short. Anthropic calls that max_tokens."""
    if reason == "stop" and isinstance(stop_match, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_match}
    stop_reason = "tool_use" if called else "end_turn"
    return {"stop_reason": stop_reason if reason == "stop" else "max_tokens", "stop_sequence": None}


def usage_fields(usage: Usage) -> dict[str, int]:
    """`input_tokens` counts neither tokens read from the cache nor tokens written to it: the three
    counts add up to the prompt."""
    stored = min(usage.stored_tokens, usage.prompt_tokens - usage.cached_tokens)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - stored,
        "cache_creation_input_tokens": stored,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def whole(shape: MessageShape, answer: CollectedAnswer) -> bytes:
    choice = answer.choices[0]
    parts = shape.syntax.read(choice)
    payload = shape.message(_blocks(parts))
    payload |= stop_fields(parts.finish_reason, choice.stop_match, bool(parts.calls))
    return encode(payload | {"usage": usage_fields(answer.usage)} | answer.metadata)


def _blocks(parts: ChoiceParts) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if parts.thought:
        blocks.append({"type": "thinking", "thinking": parts.thought, "signature": ""})
    if parts.words or not (parts.thought or parts.calls):
        blocks.append({"type": "text", "text": parts.words})
    for name, arguments in parts.calls:
        blocks.append(_tool_use(name) | {"input": whole_input(arguments)})
    return blocks


def _tool_use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": short_id("toolu_", 24), "name": name, "input": {}}


def whole_input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; empty if the call was cut short and its JSON cannot be read."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def thread_refusal(request_id: str) -> bytes:
    """The error for a body with `thread`: this server stores no conversations. Anthropic's client
    reads the error code and then sends all messages."""
    error = {
        "type": "invalid_request_error",
        "message": "thread: conversations are not kept here; send all of its messages",
        "details": {"error_code": "thread_unsupported_request"},
    }
    return encode({"type": "error", "error": error, "request_id": request_id})


def event(name: str, fields: dict[str, Any]) -> bytes:
    payload = encode({"type": name} | fields)
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


# kind of piece -> (empty block, name of its delta, key of its text)
_KINDS = {
    CONTENT: ({"type": "text", "text": ""}, b"text_delta", b"text"),
    REASONING: (
        {"type": "thinking", "thinking": "", "signature": ""},
        b"thinking_delta",
        b"thinking",
    ),
    ARGUMENTS: ({}, b"input_json_delta", b"partial_json"),
}


class MessageStream:
    """Frames of one streamed message."""

    keepalive = PING

    def __init__(self, shape: MessageShape) -> None:
        self.shape = shape
        self.reader = shape.syntax.reader()
        self.started = False
        self.kind: str | None = None
        self.block = -1
        self.stop: dict[str, Any] = stop_fields("stop", None)
        # the start of a delta frame, up to its text
        self._before = b""

    def render(self, event: Event) -> bytes:
        if type(event) is Delta:
            return self._delta(event)
        if isinstance(event, Started):
            known = Usage(
                event.prompt_tokens, 0, event.cached_tokens, stored_tokens=event.stored_tokens
            )
            return self._begin(known)
        return self._end(event) if isinstance(event, Finished) else b""

    def error(self, error: CoterieError) -> bytes:
        body = errors.body_of(error, errors.ANTHROPIC, self.shape.request_id)
        return b"event: error\ndata: " + body + b"\n\n"

    def _begin(self, usage: Usage) -> bytes:
        if self.started:
            return b""
        self.started = True
        message = self.shape.message([]) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = usage_fields(replace(usage, completion_tokens=0))
        start = event("message_start", {"message": message})
        # with a reader, the kind of the first block is known only when its first text arrives
        return start if self.reader is not None else start + self._open(CONTENT)

    def _open(self, kind: str, tool: str = "") -> bytes:
        empty, delta, key = _KINDS[kind]
        self.kind = kind
        self.block += 1
        self._before = (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
            % (self.block, delta, key)
        )
        block = _tool_use(tool) if tool else empty
        frames = event("content_block_start", {"index": self.block, "content_block": block})
        return frames + PING if self.block == 0 else frames

    def _close(self) -> bytes:
        if self.kind is None:
            return b""
        frames = b""
        if self.kind == REASONING:
            sign = {"type": "signature_delta", "signature": ""}
            frames = event("content_block_delta", {"index": self.block, "delta": sign})
        self.kind = None
        return frames + event("content_block_stop", {"index": self.block})

    def _delta(self, delta: Delta) -> bytes:
        if self.reader is None:
            if delta.finish_reason is not None:
                self.stop = stop_fields(delta.finish_reason, delta.stop_match)
            return self._write((CONTENT, delta.text)) if delta.text else b""
        pieces = self.reader.feed(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            pieces += self.reader.finish()
            reason = self.reader.ending(delta.finish_reason)
            self.stop = stop_fields(reason, delta.stop_match, self.reader.called)
        return b"".join(map(self._write, pieces))

    def _write(self, piece: Piece) -> bytes:
        kind, text = piece
        if kind == CALL:
            return self._close() + self._open(ARGUMENTS, text)
        before = b"" if kind == self.kind else self._close() + self._open(kind)
        return before + self._before + encode(text) + b"}}\n\n"

    def _end(self, finished: Finished) -> bytes:
        usage = finished.usage
        frames = self._begin(usage)
        if self.block < 0:
            frames += self._open(CONTENT)
        last = {"delta": self.stop, "usage": usage_fields(usage)}
        last |= metadata(finished)
        return frames + self._close() + event("message_delta", last) + event("message_stop", {})
