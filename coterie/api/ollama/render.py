"""Writes an answer of /api/chat or /api/generate: whole, or as one JSON object on each line.

The two differ in where the text is: `message.content` or `response`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie.api import errors
from coterie.api.dialect import CollectedAnswer
from coterie.api.door import short_id
from coterie.api.errors import encode
from coterie.api.openai.render import FINISH_REASONS, LOWEST_LOGPROB
from coterie.api.tools.read import (
    ARGUMENTS,
    CALL,
    REASONING,
    TEXT_ONLY,
    AnswerSyntax,
    Piece,
)
from coterie.core.errors import CoterieError
from coterie.core.events import (
    Delta,
    Event,
    Finished,
    Started,
    Timings,
    TokenLogprob,
    Usage,
    metadata,
)

# a space before the next object: an empty line would be no JSON
KEEPALIVE = b" "


@dataclass(slots=True)
class OllamaShape:
    id: str
    # the name as the caller wrote it, and as this server knows it
    requested: str
    known: str
    # may change until the first event: another specialist may answer
    model: str
    # the answer of /api/generate
    is_generate: bool = False
    logprobs: bool = False
    # send the tokens of the whole conversation at the end
    with_context: bool = False
    syntax: AnswerSyntax = TEXT_ONLY

    def head(self) -> dict[str, Any]:
        name = self.requested if self.model == self.known else self.model
        return {"model": name, "created_at": now()}

    def body(self, text: str, thought: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
        """The fields with the answer's text, or a part of it."""
        if self.is_generate:
            return {"response": text} | ({"thinking": thought} if thought else {})
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def loaded(shape: OllamaShape, reason: str) -> bytes:
    """The answer to a request without a prompt, by which clients load and unload a model."""
    return encode(shape.head() | shape.body("") | {"done": True, "done_reason": reason})


def end_fields(reason: str, usage: Usage, timings: Timings) -> dict[str, Any]:
    """Durations are in nanoseconds. `load_duration` is all that comes before the prompt is read."""
    return {
        "done": True,
        "done_reason": FINISH_REASONS[reason],
        "total_duration": _ns(timings.total_s),
        "load_duration": _ns(timings.queue_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(timings.prefill_s),
        "eval_count": usage.completion_tokens,
        # clients divide by it, and one token takes no time here
        "eval_duration": _ns(timings.decode_s),
    }


def _ns(seconds: float) -> int:
    return max(math.ceil(seconds * 1e9), 1)


def whole(shape: OllamaShape, answer: CollectedAnswer) -> bytes:
    choice = answer.choices[0]
    parts = shape.syntax.read(choice)
    words, calls = parts.words, list[dict[str, Any]]()
    for name, arguments in parts.calls:
        call = call_fields(name, arguments, len(calls))
        if call is None:
            words += arguments
        else:
            calls.append(call)
    payload = shape.head() | shape.body(words, parts.thought, calls)
    if shape.logprobs:
        payload["logprobs"] = logprob_fields(choice.logprobs)
    finished = answer.finished
    payload |= end_fields(parts.finish_reason, finished.usage, finished.timings)
    if shape.with_context and answer.started:
        payload["context"] = [*answer.started[0].prompt_ids, *choice.token_ids]
    return encode(payload | answer.metadata)


def call_fields(name: str, arguments: str, index: int) -> dict[str, Any] | None:
    """None if the arguments are no JSON object: the answer was cut inside of them."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    function = {"index": index, "name": name, "arguments": value}
    return {"id": short_id("call_", 8), "function": function}


def logprob_fields(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        _scored(token.text, token.data, token.logprob)
        | ({"top_logprobs": [_scored(*item[1:]) for item in token.top]} if token.top else {})
        for token in tokens
    ]


def _scored(name: str, data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}


class OllamaStream:
    """Lines of one streamed answer. A call is sent when all of its arguments are there."""

    keepalive = KEEPALIVE

    def __init__(self, shape: OllamaShape) -> None:
        self.shape = shape
        self.reader = shape.syntax.reader()
        self._reason = "stop"
        self._num_calls = 0
        # (name, arguments so far) of the call that is open
        self._call: tuple[str, str] | None = None
        self._context: list[int] = []

    def render(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Started):
            # a request that moves to another worker sends Started again
            if self.shape.with_context and not self._context:
                self._context = list(event.prompt_ids)
            return b""
        return self._end(event) if isinstance(event, Finished) else b""

    def error(self, error: CoterieError) -> bytes:
        return errors.body_of(error, errors.OLLAMA, self.shape.id) + b"\n"

    def _delta(self, event: Delta) -> bytes:
        if self.shape.with_context:
            self._context += event.token_ids
        scores = logprob_fields(event.logprobs or ()) if self.shape.logprobs else []
        lines = self._plain(event) if self.reader is None else self._pieces(event)
        if event.finish_reason is not None:
            reason = event.finish_reason
            self._reason = reason if self.reader is None else self.reader.ending(reason)
        if scores:
            # the scores of a token are sent once, with its first piece
            lines = lines or [self.shape.body("")]
            lines[0]["logprobs"] = scores
        return b"".join(self._line(fields) for fields in lines)

    def _plain(self, event: Delta) -> list[dict[str, Any]]:
        return [self.shape.body(event.text)] if event.text else []

    def _pieces(self, event: Delta) -> list[dict[str, Any]]:
        assert self.reader is not None
        pieces = self.reader.feed(event.text, event.token_ids)
        if event.finish_reason is not None:
            pieces = pieces + self.reader.finish()
        lines = [fields for piece in pieces for fields in self._piece(piece)]
        return lines + self._closed() if event.finish_reason is not None else lines

    def _piece(self, piece: Piece) -> list[dict[str, Any]]:
        kind, text = piece
        if kind == ARGUMENTS:
            name, before = self._call or ("", "")
            self._call = (name, before + text)
            return []
        before_it = self._closed()
        if kind == CALL:
            self._call = (text, "")
            return before_it
        thought = {"thought": text} if kind == REASONING else {"text": text}
        return [*before_it, self.shape.body(**{"text": ""} | thought)]

    def _closed(self) -> list[dict[str, Any]]:
        """The call that was open."""
        if self._call is None:
            return []
        (name, arguments), self._call = self._call, None
        call = call_fields(name, arguments, self._num_calls)
        if call is None:
            return [self.shape.body(arguments)]
        self._num_calls += 1
        return [self.shape.body("", calls=[call])]

    def _line(self, fields: dict[str, Any]) -> bytes:
        return encode(self.shape.head() | fields | {"done": False}) + b"\n"

    def _end(self, event: Finished) -> bytes:
        payload = self.shape.head() | self.shape.body("")
        payload |= end_fields(self._reason, event.usage, event.timings)
        if self._context:
            payload["context"] = self._context
        return encode(payload | metadata(event)) + b"\n"


def embeddings(model: str, vectors: NDArray[np.float32], spent_ns: int, num_tokens: int) -> bytes:
    """The answer of /api/embed. Rows are written one by one, so that a thread that writes a large
    answer never holds the interpreter for long."""
    rows = b",".join([encode(row.tolist()) for row in vectors])
    tail = encode(embed_figures(spent_ns, num_tokens))[1:]
    return encode({"model": model})[:-1] + b',"embeddings":[' + rows + b"]," + tail


def embed_figures(spent_ns: int, num_tokens: int) -> dict[str, Any]:
    return {"total_duration": spent_ns, "load_duration": 0, "prompt_eval_count": num_tokens}
