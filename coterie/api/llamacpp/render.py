"""Writes an answer of /completion or /infill, whole or as server-sent events. There is no [DONE]:
the last event has `stop: true`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.api import errors
from coterie.api.dialect import CollectedAnswer
from coterie.api.errors import encode
from coterie.api.openai.render import KEEPALIVE, LOWEST_LOGPROB
from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Event, Finished, Timings, TokenLogprob, Usage, metadata

# no slot: sequences have no fixed place here
_SLOT = -1


@dataclass(slots=True)
class LlamaShape:
    id: str
    # may change until the first event: another specialist may answer
    model: str
    prompt: str
    settings: dict[str, Any]
    # only these fields; empty = all
    fields: tuple[str, ...] = ()
    with_tokens: bool = False
    with_probabilities: bool = False
    # only the prompt is read: the engine's token is dropped
    reads_only: bool = False

    def final(
        self, words: str, ids: Sequence[int], end: tuple[str, str | int | None], done: Finished
    ) -> dict[str, Any]:
        """`words` and `ids` are what was not sent before; `end` is why and at which word."""
        usage = done.usage
        word = end[1] if end[0] == "stop" and isinstance(end[1], str) else ""
        return {
            "index": 0,
            "content": words,
            "tokens": list(ids) if self.with_tokens else [],
            "id_slot": _SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": self.predicted(usage),
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": self.settings,
            "prompt": self.prompt,
            "truncated": False,
            "stop_type": "limit" if end[0] != "stop" or self.reads_only else "eos",
            "stopping_word": word,
            "tokens_cached": usage.cached_tokens,
            "timings": timing_fields(usage, done.timings),
        } | ({"stop_type": "word"} if word else {})

    def predicted(self, usage: Usage) -> int:
        return 0 if self.reads_only else usage.completion_tokens

    def chosen(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The fields that were asked for; of `a/b` the field b of a, with that name."""
        if not self.fields:
            return payload
        found: dict[str, Any] = {}
        for name in self.fields:
            value: Any = payload
            for step in name.split("/"):
                value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                found[name] = value
        return found


_MISSING = object()


def timing_fields(usage: Usage, timings: Timings) -> dict[str, Any]:
    read = usage.prompt_tokens - usage.cached_tokens
    fields: dict[str, Any] = {"cache_n": usage.cached_tokens}
    for name, count, seconds in (
        ("prompt", read, timings.prefill_s),
        ("predicted", usage.completion_tokens, timings.decode_s),
    ):
        fields |= {
            f"{name}_n": count,
            f"{name}_ms": round(seconds * 1000, 3),
            f"{name}_per_token_ms": round(seconds * 1000 / count, 3) if count else 0.0,
            f"{name}_per_second": round(count / seconds, 3) if seconds else 0.0,
        }
    return fields


def probability_fields(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        _scored(token.token_id, token.text, token.data, token.logprob)
        | {"top_logprobs": [_scored(*item) for item in token.top]}
        for token in tokens
    ]


def _scored(token_id: int, name: str, data: bytes, logprob: float) -> dict[str, Any]:
    logprob = max(logprob, LOWEST_LOGPROB)
    return {"id": token_id, "token": name, "bytes": list(data), "logprob": logprob}


def whole(shape: LlamaShape, answer: CollectedAnswer) -> bytes:
    choice = answer.choices[0]
    words = "" if shape.reads_only else "".join(choice.text)
    ids = [] if shape.reads_only else choice.token_ids
    end = (choice.finish_reason, choice.stop_match)
    payload = shape.final(words, ids, end, answer.finished)
    if shape.with_probabilities:
        scores = () if shape.reads_only else choice.logprobs
        payload["completion_probabilities"] = probability_fields(scores)
    return encode(shape.chosen(payload | answer.metadata))


class LlamaStream:
    """Events of one streamed answer."""

    keepalive = KEEPALIVE

    def __init__(self, shape: LlamaShape) -> None:
        self.shape = shape
        self._end: tuple[str, str | int | None] = ("stop", None)
        self._predicted = 0

    def render(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Finished):
            payload = self.shape.final("", (), self._end, event) | metadata(event)
            return _frame(self.shape.chosen(payload))
        return b""

    def error(self, error: CoterieError) -> bytes:
        return b"data: " + errors.body_of(error, errors.OPENAI, self.shape.id) + b"\n\n"

    def _delta(self, event: Delta) -> bytes:
        self._predicted += len(event.token_ids)
        if event.finish_reason is not None:
            self._end = (event.finish_reason, event.stop_match)
        scores = event.logprobs if self.shape.with_probabilities else None
        if self.shape.reads_only or not (event.text or scores):
            return b""
        payload = {
            "index": 0,
            "content": event.text,
            "tokens": list(event.token_ids),
            "stop": False,
            "id_slot": _SLOT,
            "tokens_predicted": self._predicted,
        }
        if scores:
            payload["completion_probabilities"] = probability_fields(scores)
        return _frame(payload)


def _frame(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"
