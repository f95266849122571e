"""How /v1/chat/completions writes an answer, whole or as chunks.

The plain case, text and nothing else, is three byte strings joined: one token must cost
microseconds. Everything that was asked for on top takes the slower road through dicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coterie import __version__
from coterie.api.collect import Answer, Choice
from coterie.api.errors import encode
from coterie.api.openai_render import (
    DONE,
    KEEPALIVE,
    chat_logprobs,
    error_frame,
    finish_fields,
    frame,
    metadata_of,
    usage_fields,
)
from coterie.api.reasoning import REASONING, Piece, Splitter
from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Event, Finished, Started

FINGERPRINT = f"coterie-{__version__}"


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What one answer looks like, as its request asked."""

    id: str
    created: int
    model: str
    num_choices: int
    include_usage: bool = False
    logprobs: bool = False
    # the prompt's ids when the request asked for token ids
    prompt_ids: tuple[int, ...] | None = None
    # marks, and whether the prompt already opened them; None = the model does not think
    reasoning: tuple[tuple[str, str], bool] | None = None

    def splitter(self) -> Splitter | None:
        return None if self.reasoning is None else Splitter(*self.reasoning)

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def whole(shape: ChatShape, answer: Answer) -> bytes:
    """The body of an answer that is not streamed."""
    choices, reasoning_tokens = [], 0
    for index, choice in enumerate(answer.choices):
        rendered, tokens = _choice(shape, index, choice)
        choices.append(rendered)
        reasoning_tokens += tokens
    payload = shape.head("chat.completion") | {"choices": choices}
    payload["usage"] = usage_fields(answer.usage, reasoning_tokens)
    if shape.prompt_ids is not None:
        payload["prompt_token_ids"] = shape.prompt_ids
    return encode(payload | answer.metadata)


def _choice(shape: ChatShape, index: int, choice: Choice) -> tuple[dict[str, Any], int]:
    text, splitter = "".join(choice.text), shape.splitter()
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if splitter is not None:
        pieces = splitter.feed(text) + splitter.finish()
        thought = "".join(part for kind, part in pieces if kind == REASONING)
        message["content"] = "".join(part for kind, part in pieces if kind != REASONING)
        message["reasoning_content"] = thought or None
    fields = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(choice.logprobs) if shape.logprobs else None,
    } | finish_fields(choice.finish_reason, choice.stop_match)
    if shape.prompt_ids is not None:
        fields["token_ids"] = choice.token_ids
    return fields, _thought_tokens(shape, choice)


def _thought_tokens(shape: ChatShape, choice: Choice) -> int:
    """Tokens of the deltas that ran before the closing mark."""
    splitter = shape.splitter()
    if splitter is None:
        return 0
    share = len(choice.token_ids) / max(len(choice.text), 1)
    for text in choice.text:
        splitter.feed(text, 1)
    return round(splitter.reasoning_tokens * share)


class ChatStream:
    """Frames of one streamed chat."""

    keepalive = KEEPALIVE

    def __init__(self, shape: ChatShape) -> None:
        self.shape = shape
        self.splitters = [shape.splitter() for _ in range(shape.num_choices)]
        self.plain = not (shape.logprobs or shape.prompt_ids is not None or shape.reasoning)
        self.begun = False
        head = encode(shape.head("chat.completion.chunk"))[:-1]
        self._head = b"data: " + head + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"
        # a text chunk is `before[choice] + json string + after`
        self._before = [
            self._head + b'{"index":%d,"delta":{"content":' % index
            for index in range(shape.num_choices)
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def render(self, event: Event) -> bytes:
        if type(event) is Delta:
            if self.plain and event.finish_reason is None and self.begun:
                if not event.text:
                    return b""
                return self._before[event.choice] + encode(event.text) + self._after
            return self._begin() + self._delta(event)
        if isinstance(event, Finished):
            return self._begin() + self._end(event)
        return self._begin() if isinstance(event, Started) else b""

    def error(self, error: CoterieError) -> bytes:
        return error_frame(error, self.shape.id)

    def _begin(self) -> bytes:
        if self.begun:
            return b""
        self.begun = True
        frames = []
        for index in range(self.shape.num_choices):
            delta = {"role": "assistant", "content": "", "refusal": None}
            frames.append(self._chunk({"index": index, "delta": delta} | _OPEN))
        if self.shape.prompt_ids is not None:
            ids = b'"prompt_token_ids":' + encode(self.shape.prompt_ids)
            frames[0] = frames[0].replace(b'"choices":', ids + b',"choices":', 1)
        return b"".join(frames)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + encode(choice) + self._tail

    def _delta(self, event: Delta) -> bytes:
        ended = event.finish_reason is not None
        pieces = self._pieces(event, ended)
        extras = self._extras(event)
        if extras and not pieces:
            pieces = [("content", "")]
        frames = []
        for kind, text in pieces:
            key = "reasoning_content" if kind == REASONING else "content"
            choice = {"index": event.choice, "delta": {key: text}} | _OPEN
            # what belongs to the token goes out once, with its first piece
            frames.append(self._chunk(choice | extras))
            extras = {}
        if event.finish_reason is not None:
            last = {"index": event.choice, "delta": {}, "logprobs": None}
            frames.append(self._chunk(last | finish_fields(event.finish_reason, event.stop_match)))
        return b"".join(frames)

    def _pieces(self, event: Delta, ended: bool) -> list[Piece]:
        splitter = self.splitters[event.choice]
        if splitter is None:
            return [("content", event.text)] if event.text else []
        pieces = splitter.feed(event.text, len(event.token_ids))
        return pieces + splitter.finish() if ended else pieces

    def _extras(self, event: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.shape.logprobs and event.logprobs:
            extras["logprobs"] = chat_logprobs(event.logprobs)
        if self.shape.prompt_ids is not None and event.token_ids:
            extras["token_ids"] = event.token_ids
        return extras

    def _end(self, event: Finished) -> bytes:
        if not self.shape.include_usage:
            return DONE
        thought = sum(s.reasoning_tokens for s in self.splitters if s is not None)
        payload = self.shape.head("chat.completion.chunk")
        payload |= {"choices": [], "usage": usage_fields(event.usage, thought)}
        return frame(payload | metadata_of(event)) + DONE


_OPEN: dict[str, Any] = {"logprobs": None, "finish_reason": None}
