"""Writes an answer of /v1/responses, whole or as events in OpenAI's order.

response.created and response.in_progress, then per item response.output_item.added, its parts and
deltas, response.output_item.done, then response.completed, .incomplete or .failed. Events are
numbered. No [DONE].
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from coterie.api.dialect import CollectedAnswer, CollectedChoice
from coterie.api.door import new_id, short_id
from coterie.api.errors import encode, public_message, status_of
from coterie.api.openai.render import KEEPALIVE, chat_logprobs
from coterie.api.responses.tools import CalledName, ResponseTools, custom_input
from coterie.api.tools.read import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    TEXT_ONLY,
    AnswerSyntax,
    Piece,
)
from coterie.core.errors import ContextLengthExceeded, CoterieError, InvalidRequest
from coterie.core.events import Delta, Event, Finished, TokenLogprob, Usage, metadata

COMPLETED, INCOMPLETE, FAILED = "completed", "incomplete", "failed"
IN_PROGRESS, QUEUED, CANCELLED = "in_progress", "queued", "cancelled"
ResponseFields = dict[str, Any]
# the prefixes of ids, as OpenAI's are
_IDS = {CONTENT: "msg_", REASONING: "rs_", CALL: "fc_"}


@dataclass(slots=True)
class ResponseShape:
    """The form of one answer, as its request asked for it."""

    id: str
    # the fields of the request that the answer repeats
    repeated: ResponseFields
    tools: ResponseTools
    created_at: int = field(default_factory=lambda: int(time.time()))
    logprobs: bool = False
    syntax: AnswerSyntax = TEXT_ONLY

    @property
    def model(self) -> str:
        """Who answers; set again if another specialist takes the request."""
        name: str = self.repeated["model"]
        return name

    @model.setter
    def model(self, name: str) -> None:
        self.repeated["model"] = name

    def response(
        self, status: str, output: Sequence[ResponseFields] = (), **more: Any
    ) -> ResponseFields:
        """The response object in one of its states."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "error": None,
            "incomplete_details": None,
            "output": list(output),
            "usage": None,
            **self.repeated,
            **more,
        }

    def ended(self, reader: ItemReader, usage: Usage) -> ResponseFields:
        """The response object of an answer that was read to its end."""
        output, counts = reader.output(), usage_fields(usage, reader.reasoning_tokens)
        if reader.reason == "stop":
            return self.response(COMPLETED, output, usage=counts)
        details = {"reason": "max_output_tokens"}
        if reader.reason != "length":
            # OpenAI has no word for a deadline
            details["stop_reason"] = reader.reason
        return self.response(INCOMPLETE, output, usage=counts, incomplete_details=details)


def usage_fields(usage: Usage, reasoning_tokens: int = 0) -> ResponseFields:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.stored_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": max(usage.reasoning_tokens, reasoning_tokens)
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def text_part(text: str, logprobs: Sequence[ResponseFields] = ()) -> ResponseFields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def error_fields(error: CoterieError) -> ResponseFields:
    """Why a response failed, in the words that OpenAI's type allows."""
    code = "server_error"
    if status_of(error, "openai") in (429, 529):
        code = "rate_limit_exceeded"
    elif isinstance(error, (InvalidRequest, ContextLengthExceeded)):
        code = "invalid_prompt"
    return {"code": code, "message": public_message(error)}


@dataclass(slots=True)
class OutputItem:
    """One item of an answer while it is written."""

    kind: str
    id: str
    called: CalledName | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[ResponseFields] = field(default_factory=list)
    call_id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def part(self) -> ResponseFields:
        """Its content; a call has none."""
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return text_part(self.text, self.logprobs)

    def fields(self, status: str) -> ResponseFields:
        content = [] if status == IN_PROGRESS else [self.part]
        if self.called is not None:
            return self._call(self.called, status)
        if self.kind == REASONING:
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _call(self, called: CalledName, status: str) -> ResponseFields:
        fields = {"id": self.id, "call_id": self.call_id, "name": called.name, "status": status}
        if called.namespace is not None:
            fields["namespace"] = called.namespace
        if called.is_custom:
            return {"type": "custom_tool_call", "input": custom_input(self.text), **fields}
        return {"type": "function_call", "arguments": self.text, **fields}


def new_item(kind: str, called: CalledName | None = None) -> OutputItem:
    if called is None:
        return OutputItem(kind, new_id(_IDS[kind]))
    prefix = "ctc_" if called.is_custom else _IDS[CALL]
    return OutputItem(CALL, new_id(prefix), called, call_id=short_id("call_", 24))


class ItemChange(NamedTuple):
    """New text of an item, and the log probabilities of its tokens."""

    item: OutputItem
    text: str
    logprobs: Sequence[ResponseFields] = ()


class ItemReader:
    """Splits the deltas of an answer into items."""

    def __init__(self, shape: ResponseShape) -> None:
        self._tools = shape.tools
        self._reader = shape.syntax.reader()
        self.items: list[OutputItem] = []
        self.reason = "stop"
        # of tokens whose text is kept back
        self._scores: list[TokenLogprob] = []

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.reasoning_tokens

    def feed(
        self, text: str, token_ids: tuple[int, ...] = (), scores: Sequence[TokenLogprob] = ()
    ) -> list[ItemChange]:
        reader = self._reader
        if reader is None:
            self._scores += scores
            return self._add([(CONTENT, text)] if text else [])
        was_text = reader.in_text
        pieces = reader.feed(text, token_ids)
        # log probabilities are those of a message; marks, thoughts and calls have none
        if not reader.in_text:
            self._scores.clear()
        elif was_text:
            self._scores += scores
        return self._add(pieces)

    def finish(self, reason: str) -> list[ItemChange]:
        """The rest. An answer without anything has a message without text."""
        changes: list[ItemChange] = []
        self.reason = reason
        if self._reader is not None:
            changes = self._add(self._reader.finish())
            self.reason = self._reader.ending(reason)
        return changes if self.items else changes + self._add([(CONTENT, "")])

    def output(self) -> list[ResponseFields]:
        """All items, when the answer has ended."""
        return item_fields(self.items, self.reason)

    def _add(self, pieces: Sequence[Piece]) -> list[ItemChange]:
        changes: list[ItemChange] = []
        for kind, text in pieces:
            if kind == CALL:
                self.items.append(new_item(CALL, self._tools.named(text)))
                changes.append(ItemChange(self.items[-1], ""))
                continue
            if not self.items or (kind != ARGUMENTS and self.items[-1].kind != kind):
                self.items.append(new_item(kind))
            item = self.items[-1]
            item.texts.append(text)
            scores: list[ResponseFields] = []
            if kind == CONTENT and self._scores:
                scores = chat_logprobs(self._scores)["content"]
                self._scores = []
                item.logprobs += scores
            changes.append(ItemChange(item, text, scores))
        return changes


def read_whole(shape: ResponseShape, choice: CollectedChoice) -> ItemReader:
    """The reader of an answer that has ended."""
    reader, at = ItemReader(shape), 0
    for text, size in zip(choice.text, choice.sizes, strict=True):
        end = at + size
        reader.feed(text, tuple(choice.token_ids[at:end]), choice.logprobs[at:end])
        at = end
    reader.finish(choice.finish_reason)
    return reader


def item_fields(items: Sequence[OutputItem], reason: str) -> list[ResponseFields]:
    """All items of an answer that has ended. Only the last one can be incomplete."""
    fields = [item.fields(COMPLETED) for item in items[:-1]]
    return fields + [item.fields(last_status(item, reason)) for item in items[-1:]]


def last_status(item: OutputItem, reason: str) -> str:
    """Of the last item. A stop string may end an answer inside a call."""
    is_cut = reason != "stop" or (item.called is not None and not _is_json(item.text))
    return INCOMPLETE if is_cut else COMPLETED


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def whole(shape: ResponseShape, answer: CollectedAnswer) -> ResponseFields:
    """The response of an answer without streaming."""
    reader = read_whole(shape, answer.choices[0])
    return shape.ended(reader, answer.usage) | answer.metadata


def frame(name: str, fields: ResponseFields) -> bytes:
    payload = encode({"type": name} | fields)
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


# kind of item -> (name of its text's events, name of the text in the last one)
_TEXT = {
    CONTENT: ("response.output_text", "text"),
    REASONING: ("response.reasoning_text", "text"),
    CALL: ("response.function_call_arguments", "arguments"),
}
_CUSTOM = ("response.custom_tool_call_input", "input")


class EventFrames:
    """The frames of one response, numbered."""

    def __init__(self) -> None:
        self.number = 0
        self.item: OutputItem | None = None
        self._index = -1
        # the start of a frame with new text of the open item
        self._before = b""

    def event(self, name: str, /, **fields: Any) -> bytes:
        number, self.number = self.number, self.number + 1
        return frame(name, {"sequence_number": number} | fields)

    def open(self, item: OutputItem) -> bytes:
        self.item = item
        self._index += 1
        empty = OutputItem(item.kind, item.id, item.called, call_id=item.call_id)
        place: ResponseFields = {"item_id": item.id, "output_index": self._index}
        frames = self.event(
            "response.output_item.added", output_index=self._index, item=empty.fields(IN_PROGRESS)
        )
        if item.called is None:
            place["content_index"] = 0
            frames += self.event("response.content_part.added", **place, part=empty.part)
        name, _ = _names(item)
        start = encode({"type": f"{name}.delta"} | place)[:-1]
        self._before = b"event: " + name.encode() + b".delta\ndata: " + start + b',"delta":'
        return frames

    def text_delta(self, text: str) -> bytes:
        """New text of a message, without log probabilities."""
        number, self.number = self.number, self.number + 1
        return self._before + encode(text) + b',"logprobs":[],"sequence_number":%d}\n\n' % number

    def delta(self, text: str, logprobs: Sequence[ResponseFields] = ()) -> bytes:
        """New text of the open item. The input of a custom tool is known when its JSON is
        complete."""
        item = self.item
        assert item is not None
        if not text or (item.called is not None and item.called.is_custom):
            return b""
        if item.kind == CONTENT and not logprobs:
            return self.text_delta(text)
        number, self.number = self.number, self.number + 1
        scores = b',"logprobs":' + encode(logprobs) if logprobs else b""
        return self._before + encode(text) + scores + b',"sequence_number":%d}\n\n' % number

    def close(self, status: str) -> bytes:
        """End the open item, if there is one."""
        item, self.item = self.item, None
        if item is None:
            return b""
        name, key = _names(item)
        place: ResponseFields = {"item_id": item.id, "output_index": self._index}
        fields, frames = item.fields(status), b""
        if item.called is None:
            place["content_index"] = 0
            more = {"logprobs": item.logprobs} if item.kind == CONTENT else {}
            frames += self.event(f"{name}.done", **place, text=item.text, **more)
            frames += self.event("response.content_part.done", **place, part=item.part)
        else:
            if item.called.is_custom and fields[key]:
                frames += self.event(f"{name}.delta", **place, delta=fields[key])
            # older clients' types want the name here too
            more = {} if item.called.is_custom else {"name": fields["name"]}
            frames += self.event(f"{name}.done", **place, **{key: fields[key]}, **more)
        done = {"output_index": self._index, "item": fields}
        return frames + self.event("response.output_item.done", **done)


def _names(item: OutputItem) -> tuple[str, str]:
    return _CUSTOM if item.called is not None and item.called.is_custom else _TEXT[item.kind]


class ResponseStream:
    """Frames of one streamed response."""

    keepalive = KEEPALIVE

    def __init__(self, shape: ResponseShape) -> None:
        self.shape = shape
        self.frames = EventFrames()
        self.reader = ItemReader(shape)
        self.started = False
        # all of the answer is text: a delta is three joined byte strings
        self.plain = shape.syntax.reader() is None and not shape.logprobs
        # set before the last event is rendered, when it is known whether the response was kept
        self.final: ResponseFields | None = None

    def render(self, event: Event) -> bytes:
        if type(event) is Delta:
            item, text = self.frames.item, event.text
            if self.plain and item is not None and event.finish_reason is None:
                if not text:
                    return b""
                item.texts.append(text)
                return self.frames.text_delta(text)
            return self._begin() + self._delta(event)
        if isinstance(event, Finished):
            return self._begin() + self._end(event)
        return self._begin()

    def error(self, error: CoterieError) -> bytes:
        failed = self.shape.response(FAILED, self._done_items(), error=error_fields(error))
        return self._begin() + self.frames.event("response.failed", response=failed)

    def ended(self, event: Finished) -> ResponseFields:
        """The response after the last delta."""
        return self.shape.ended(self.reader, event.usage) | metadata(event)

    def _begin(self) -> bytes:
        if self.started:
            return b""
        self.started = True
        return beginning(self.frames, self.shape.response(IN_PROGRESS))

    def _done_items(self) -> list[ResponseFields]:
        """Items that were completed before an error."""
        return item_fields(self.reader.items[:-1], "stop")

    def _delta(self, event: Delta) -> bytes:
        reader = self.reader
        changes = reader.feed(event.text, event.token_ids, event.logprobs or ())
        if event.finish_reason is not None:
            changes += reader.finish(event.finish_reason)
        return b"".join([self._write(change) for change in changes])

    def _write(self, change: ItemChange) -> bytes:
        frames, before = self.frames, b""
        if change.item is not frames.item:
            before = frames.close(COMPLETED) + frames.open(change.item)
        return before + frames.delta(change.text, change.logprobs)

    def _end(self, event: Finished) -> bytes:
        final = self.final or self.ended(event)
        item, last = self.frames.item, b""
        if item is not None:
            last = self.frames.close(last_status(item, self.reader.reason))
        return last + self.frames.event(f"response.{final['status']}", response=final)


def beginning(frames: EventFrames, response: ResponseFields) -> bytes:
    first = frames.event("response.created", response=response)
    return first + frames.event("response.in_progress", response=response)


def replayed(response: ResponseFields, is_queued: bool = False) -> Iterator[bytes]:
    """The events of a response that has ended: its items as one delta each. The same response
    always has the same events."""
    frames = EventFrames()
    begun = response | {
        "status": QUEUED if is_queued else IN_PROGRESS,
        "output": [], "usage": None, "completed_at": None, "incomplete_details": None,
        "error": None,
    }  # fmt: skip
    begun.pop("coterie", None)
    yield frames.event("response.created", response=begun)
    if is_queued:
        yield frames.event("response.queued", response=begun)
        begun["status"] = IN_PROGRESS
    yield frames.event("response.in_progress", response=begun)
    for fields in response["output"]:
        item = _stored_item(fields)
        yield frames.open(item)
        yield frames.delta(item.text, item.logprobs)
        yield frames.close(fields.get("status", COMPLETED))
    ending = response["status"]
    # OpenAI has no event for a response that was cancelled
    name = ending if ending in (COMPLETED, INCOMPLETE) else FAILED
    yield frames.event(f"response.{name}", response=response)


def _stored_item(fields: ResponseFields) -> OutputItem:
    """The item of which `fields` were made."""
    kind, item_id = fields["type"], fields["id"]
    if kind in ("message", "reasoning"):
        part = fields["content"][0]
        item = OutputItem(CONTENT if kind == "message" else REASONING, item_id)
        item.logprobs = part.get("logprobs") or []
        item.texts = [part["text"]]
        return item
    is_custom = kind == "custom_tool_call"
    called = CalledName(fields["name"], fields.get("namespace"), is_custom)
    text = encode({"input": fields["input"]}).decode() if is_custom else fields["arguments"]
    return OutputItem(CALL, item_id, called, [text], call_id=fields["call_id"])
