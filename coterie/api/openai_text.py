"""How /v1/completions writes an answer, whole or as chunks: text, echo and legacy logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.api.collect import Answer, Choice
from coterie.api.errors import encode
from coterie.api.openai_chat import FINGERPRINT
from coterie.api.openai_render import (
    DONE,
    KEEPALIVE,
    LegacyLogprobs,
    error_frame,
    finish_fields,
    frame,
    metadata_of,
    usage_fields,
)
from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Event, Finished, Started, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Echo:
    """One prompt as the answer repeats it."""

    text: str
    ids: tuple[int, ...]
    # text of the first token, which has no probability
    first: str


@dataclass(frozen=True, slots=True)
class TextShape:
    id: str
    created: int
    model: str
    # per prompt
    num_choices: int
    num_prompts: int
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    # the request only wants its prompt scored: what the engine made is dropped
    scores_prompt: bool = False
    # per prompt; empty when neither echo nor token ids were asked for
    prompts: tuple[Echo, ...] = ()
    echo: bool = False

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def part_id(self, prompt: int) -> str:
        """The id under which one prompt of the request runs."""
        return self.id if self.num_prompts == 1 else f"{self.id}-{prompt}"

    def usage(self, usage: Usage) -> dict[str, Any]:
        return usage_fields(replace(usage, completion_tokens=0) if self.scores_prompt else usage)


def whole(shape: TextShape, answer: Answer) -> bytes:
    started = {event.request_id: event for event in answer.started}
    choices = [
        _choice(shape, index, choice, started.get(shape.part_id(index // shape.num_choices)))
        for index, choice in enumerate(answer.choices)
    ]
    payload = shape.head() | {"choices": choices, "usage": shape.usage(answer.usage)}
    return encode(payload | answer.metadata)


def _choice(
    shape: TextShape, index: int, choice: Choice, started: Started | None
) -> dict[str, Any]:
    echo = shape.prompts[index // shape.num_choices] if shape.prompts else None
    text = "" if shape.scores_prompt else "".join(choice.text)
    tokens: list[TokenLogprob | None] = [] if shape.scores_prompt else list(choice.logprobs)
    if echo is not None and shape.echo:
        text = echo.text + text
        tokens = [*_prompt_logprobs(started), *tokens]
    first = echo.first if echo is not None else ""
    fields: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": LegacyLogprobs().fields(tokens, first) if shape.logprobs else None,
    }
    fields |= _finish(shape, choice.finish_reason, choice.stop_match)
    if shape.token_ids and echo is not None:
        fields["prompt_token_ids"] = echo.ids
        fields["token_ids"] = [] if shape.scores_prompt else choice.token_ids
    return fields


def _finish(shape: TextShape, reason: str, match: str | int | None) -> dict[str, Any]:
    if shape.scores_prompt and reason == "stop":
        return finish_fields("length", None)
    return finish_fields(reason, match)


def _prompt_logprobs(started: Started | None) -> Sequence[TokenLogprob | None]:
    return () if started is None else started.prompt_logprobs or ()


class TextStream:
    """Frames of one streamed completion."""

    keepalive = KEEPALIVE

    def __init__(self, shape: TextShape) -> None:
        self.shape = shape
        total = shape.num_choices * shape.num_prompts
        self.offsets = [LegacyLogprobs() for _ in range(total)]
        self.plain = not (shape.logprobs or shape.token_ids or shape.scores_prompt)
        self._prompt_of = {shape.part_id(i): i for i in range(shape.num_prompts)}
        self._head = b"data: " + encode(shape.head())[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"
        self._before = [self._head + b'{"index":%d,"text":' % index for index in range(total)]
        self._after = b',"logprobs":null,"finish_reason":null}' + self._tail

    def render(self, event: Event) -> bytes:
        if type(event) is Delta:
            if self.plain and event.finish_reason is None:
                if not event.text:
                    return b""
                return self._before[event.choice] + encode(event.text) + self._after
            return self._delta(event)
        if isinstance(event, Started) and self.shape.echo:
            return self._echo(event)
        if isinstance(event, Finished):
            if not self.shape.include_usage:
                return DONE
            usage = {"choices": [], "usage": self.shape.usage(event.usage)}
            return frame(self.shape.head() | usage | metadata_of(event)) + DONE
        return b""

    def error(self, error: CoterieError) -> bytes:
        return error_frame(error, self.shape.id)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._head + encode(choice) + self._tail

    def _echo(self, event: Started) -> bytes:
        # a request that moves to another worker starts again; its prompt is echoed once
        prompt = self._prompt_of.pop(event.request_id, None)
        if prompt is None:
            return b""
        echo = self.shape.prompts[prompt]
        frames = []
        for offset in range(self.shape.num_choices):
            index = prompt * self.shape.num_choices + offset
            choice = {"index": index, "text": echo.text, "logprobs": None, "finish_reason": None}
            if self.shape.logprobs:
                tokens = _prompt_logprobs(event)
                choice["logprobs"] = self.offsets[index].fields(tokens, echo.first)
            if self.shape.token_ids:
                choice["prompt_token_ids"] = echo.ids
            frames.append(self._chunk(choice))
        return b"".join(frames)

    def _delta(self, event: Delta) -> bytes:
        choice: dict[str, Any] = {
            "index": event.choice,
            "text": event.text,
            "logprobs": None,
            "finish_reason": None,
        }
        if self.shape.scores_prompt:
            choice["text"] = ""
        else:
            if self.shape.logprobs and event.logprobs:
                choice["logprobs"] = self.offsets[event.choice].fields(event.logprobs)
            if self.shape.token_ids:
                choice["token_ids"] = event.token_ids
        if event.finish_reason is not None:
            choice |= _finish(self.shape, event.finish_reason, event.stop_match)
        elif self.shape.scores_prompt:
            return b""
        return self._chunk(choice)
