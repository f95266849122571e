"""Writes an answer of /v1/completions, whole or as chunks: text, echo and legacy logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coterie.api.dialect import CollectedAnswer, CollectedChoice
from coterie.api.errors import encode
from coterie.api.openai.chat import FINGERPRINT
from coterie.api.openai.parse import part_id
from coterie.api.openai.render import (
    DONE,
    KEEPALIVE,
    LegacyLogprobs,
    RunningUsage,
    error_frame,
    finish_fields,
    frame,
    metadata_of,
    prompt_logprobs,
    usage_fields,
)
from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Event, Finished, Started, TokenLogprob, Usage
from coterie.core.request import Prompt, Text
from coterie.engine.detokenize import TextOffsets, pieces_of, token_name

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """One prompt as the answer repeats it: the text of its tokens."""

    text: str
    ids: tuple[int, ...]
    # the offset of each token in the text
    offsets: list[int]


def echo_of(prompt: Prompt, ids: tuple[int, ...], tokenizer: Tokenizer) -> EchoedPrompt:
    """The prompt as the answer repeats it. Special tokens are included if the caller wrote them,
    not if the tokenizer added them before the text."""
    lead = 0
    if isinstance(prompt, Text):
        while lead < len(ids) and _is_added(prompt.text, ids[lead], tokenizer):
            lead += 1
    pieces = pieces_of(tokenizer, skip_special=False)
    offsets = TextOffsets(pieces)
    places = [0] * lead + [offsets.push(token) for token in ids[lead:]]
    return EchoedPrompt(pieces.text(ids[lead:]), ids, places)


def _is_added(text: str, token: int, tokenizer: Tokenizer) -> bool:
    if not tokenizer.is_special(token):
        return False
    return not text.startswith(tokenizer.token_bytes(token).decode(errors="replace"))


@dataclass(slots=True)
class TextShape:
    id: str
    created: int
    # may change until the first event: another specialist may answer
    model: str
    # per prompt
    num_choices: int
    prompts: tuple[Prompt, ...]
    # None if another server answers: then nothing that needs tokens was asked for
    tokenizer: Tokenizer | None
    include_usage: bool = False
    # send the usage in every chunk
    continuous_usage: bool = False
    # number of alternatives for each token; None = no logprobs
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    # logprobs name tokens by their ids
    names_ids: bool = False
    skip_special: bool = True
    # the request wants only scores of its prompt: the engine's token is dropped
    scores_prompt: bool = False
    echo: bool = False

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def own_tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None, "refused before"
        return self.tokenizer

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def part_id(self, prompt: int) -> str:
        return part_id(self.id, prompt, self.num_prompts)

    def echoed(self, prompt: int, started: Started) -> EchoedPrompt:
        return echo_of(self.prompts[prompt], started.prompt_ids, self.own_tokenizer)

    def listed(self, start: int = 0) -> LegacyLogprobs:
        """Logprob lists for one choice, whose text begins after `start` characters."""
        offsets = TextOffsets(pieces_of(self.own_tokenizer, self.skip_special), start)
        return LegacyLogprobs(offsets, self.logprobs or 0, self.names_ids)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return usage_fields(replace(usage, completion_tokens=0) if self.scores_prompt else usage)


def whole(shape: TextShape, answer: CollectedAnswer) -> bytes:
    started = {event.request_id: event for event in answer.started}
    choices = [
        _choice(shape, index, choice, started.get(shape.part_id(index // shape.num_choices)))
        for index, choice in enumerate(answer.choices)
    ]
    payload = shape.head() | {"choices": choices, "usage": shape.usage(answer.usage)}
    return encode(payload | answer.metadata)


def _choice(
    shape: TextShape, index: int, choice: CollectedChoice, started: Started | None
) -> dict[str, Any]:
    prompt = index // shape.num_choices
    echo = shape.echoed(prompt, started) if shape.echo and started is not None else None
    text = "" if shape.scores_prompt else "".join(choice.text)
    lead = "" if echo is None else echo.text
    fields: dict[str, Any] = {"index": index, "text": lead + text, "logprobs": None}
    if shape.logprobs is not None:
        listed = shape.listed(len(lead))
        tokens = [] if shape.scores_prompt else choice.logprobs
        fields["logprobs"] = listed.fields(tokens, len(lead) + len(text))
        if echo is not None:
            prompt_lists = _echo_logprobs(shape, echo, started)
            fields["logprobs"] = {
                key: prompt_lists[key] + fields["logprobs"][key] for key in prompt_lists
            }
    fields |= _finish(shape, choice.finish_reason, choice.stop_match)
    if shape.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(_scores(started), shape.prompt_logprobs)
    if shape.token_ids and started is not None:
        fields["prompt_token_ids"] = started.prompt_ids
        fields["token_ids"] = [] if shape.scores_prompt else choice.token_ids
    return fields


def _finish(shape: TextShape, reason: str, match: str | int | None) -> dict[str, Any]:
    if shape.scores_prompt and reason == "stop":
        return finish_fields("length", None)
    return finish_fields(reason, match)


def _scores(started: Started | None) -> Sequence[TokenLogprob | None]:
    return () if started is None else started.prompt_logprobs or ()


def _echo_logprobs(shape: TextShape, echo: EchoedPrompt, started: Started | None) -> dict[str, Any]:
    """The prompt's part of the lists; its first token has no logprob."""
    tokens = [
        TokenLogprob(token, *token_name(shape.own_tokenizer, token), math.nan)
        if one is None
        else one
        for token, one in zip(echo.ids, _scores(started), strict=True)
    ]
    return shape.listed().lists(tokens, echo.offsets)


class TextStream:
    """Frames of one streamed completion."""

    keepalive = KEEPALIVE

    def __init__(self, shape: TextShape) -> None:
        self.shape = shape
        total = shape.num_choices * shape.num_prompts
        # per choice: characters sent, and the lists of its tokens
        self.lengths = [0] * total
        self.listed: list[LegacyLogprobs | None] = [None] * total
        self.spent = RunningUsage() if shape.continuous_usage else None
        needs_dicts = shape.logprobs is not None or shape.token_ids or shape.scores_prompt
        self.plain = not needs_dicts and self.spent is None
        self._prompt_of = {shape.part_id(i): i for i in range(shape.num_prompts)}
        # these are known at the first event
        self._head, self._before = b"", list[bytes]()
        self._tail = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"
        self._after = b',"logprobs":null,"finish_reason":null}' + self._tail

    def render(self, event: Event) -> bytes:
        if self.spent is not None:
            self.spent.take(event)
        if not self._head:
            self._set_head()
        if type(event) is Delta:
            if self.plain and event.finish_reason is None:
                if not event.text:
                    return b""
                return self._before[event.choice] + encode(event.text) + self._after
            return self._delta(event)
        if isinstance(event, Started) and (self.shape.echo or self.shape.token_ids):
            return self._begin(event)
        if isinstance(event, Finished):
            if not self.shape.include_usage:
                return DONE
            usage = {"choices": [], "usage": self.shape.usage(event.usage)}
            return frame(self.shape.head() | usage | metadata_of(event)) + DONE
        return b""

    def error(self, error: CoterieError) -> bytes:
        return error_frame(error, self.shape.id)

    def _set_head(self) -> None:
        self._head = b"data: " + encode(self.shape.head())[:-1] + b',"choices":['
        total = len(self.lengths)
        self._before = [self._head + b'{"index":%d,"text":' % index for index in range(total)]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        if self.spent is None:
            return self._head + encode(choice) + self._tail
        return self._head + encode(choice) + b'],"usage":' + encode(self.spent.fields()) + b"}\n\n"

    def _begin(self, event: Started) -> bytes:
        # a request that moves to another worker sends Started again; its prompt is sent once
        prompt = self._prompt_of.pop(event.request_id, None)
        if prompt is None:
            return b""
        shape, frames = self.shape, []
        echo = shape.echoed(prompt, event) if shape.echo else None
        for offset in range(shape.num_choices):
            index = prompt * shape.num_choices + offset
            choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None}
            choice["finish_reason"] = None
            if echo is not None:
                self.lengths[index] = len(echo.text)
                choice["text"] = echo.text
                if shape.logprobs is not None:
                    choice["logprobs"] = _echo_logprobs(shape, echo, event)
            if shape.token_ids:
                choice["prompt_token_ids"] = event.prompt_ids
            frames.append(self._chunk(choice))
        return b"".join(frames)

    def _delta(self, event: Delta) -> bytes:
        shape = self.shape
        choice: dict[str, Any] = {
            "index": event.choice,
            "text": event.text,
            "logprobs": None,
            "finish_reason": None,
        }
        if shape.scores_prompt:
            choice["text"] = ""
        else:
            if shape.logprobs is not None:
                choice["logprobs"] = self._logprobs(event)
            if shape.token_ids:
                choice["token_ids"] = event.token_ids
        if event.finish_reason is not None:
            choice |= _finish(shape, event.finish_reason, event.stop_match)
        elif shape.scores_prompt or not (
            event.text or shape.logprobs is not None or shape.token_ids
        ):
            return b""
        return self._chunk(choice)

    def _logprobs(self, event: Delta) -> dict[str, Any] | None:
        listed = self.listed[event.choice]
        if listed is None:
            listed = self.listed[event.choice] = self.shape.listed(self.lengths[event.choice])
        self.lengths[event.choice] += len(event.text)
        if not event.logprobs:
            return None
        end = None if event.finish_reason is None else self.lengths[event.choice]
        return listed.fields(event.logprobs, end)
