"""Parts of OpenAI's format that chat and text completions share: usage, finish reason, logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from coterie.api import errors
from coterie.api.dialect import ModelCard
from coterie.api.errors import encode
from coterie.core.errors import CoterieError
from coterie.core.events import Delta, Event, Finished, Started, TokenLogprob, Usage, metadata
from coterie.engine.detokenize import TextOffsets

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
# JSON has no minus infinity
LOWEST_LOGPROB = -9999.0

# OpenAI's word for every answer that was cut short is "length"
FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length", "abort": "length"}


def finish_fields(
    reason: str, stop_match: str | int | None, called: bool = False
) -> dict[str, Any]:
    """`finish_reason`, and vLLM's `stop_reason` if there are more details."""
    fields: dict[str, Any] = {"finish_reason": FINISH_REASONS[reason]}
    # if a stop string ended the answer, a call may be incomplete
    if called and reason == "stop" and not isinstance(stop_match, str):
        fields["finish_reason"] = "tool_calls"
    if reason in ("timeout", "abort"):
        fields["stop_reason"] = reason
    elif stop_match is not None:
        fields["stop_reason"] = stop_match
    return fields


def usage_fields(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": max(usage.reasoning_tokens, reasoning_tokens)
        },
    }


def metadata_of(event: Finished) -> dict[str, Any]:
    """The field `coterie` beside OpenAI's fields, in the frame that has the usage."""
    return metadata(event)


def frame(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def error_frame(error: CoterieError, request_id: str) -> bytes:
    return b"data: " + errors.body_of(error, errors.OPENAI, request_id) + b"\n\n"


def token_label(token_id: int, name: str, as_id: bool) -> str:
    """The name of a token in logprobs: its text, or its id for `return_tokens_as_token_ids`
    (vLLM)."""
    return f"token_id:{token_id}" if as_id else name


def chat_logprobs(tokens: Sequence[TokenLogprob], as_ids: bool = False) -> dict[str, Any]:
    content = [
        _chat_token(token_label(token.token_id, token.text, as_ids), token.data, token.logprob)
        | {
            "top_logprobs": [
                _chat_token(token_label(other, name, as_ids), data, logprob)
                for other, name, data, logprob in token.top
            ]
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(name: str, data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}


def prompt_logprobs(
    tokens: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's format: for each token of the prompt, itself and its likeliest alternatives, by id."""
    return [None if token is None else _ranked(token, num_top) for token in tokens]


def _ranked(token: TokenLogprob, num_top: int) -> dict[str, Any]:
    ranked = {
        str(other): _rank(name, logprob, rank)
        for rank, (other, name, _, logprob) in enumerate(token.top[:num_top], 1)
    }
    return {str(token.token_id): _rank(token.text, token.logprob, token.rank)} | ranked


def _rank(name: str, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": name}


class LegacyLogprobs:
    """The four parallel lists of /v1/completions; offsets continue from chunk to chunk."""

    def __init__(self, offsets: TextOffsets, num_top: int, as_ids: bool = False) -> None:
        self._offsets, self._num_top, self._as_ids = offsets, num_top, as_ids

    def fields(self, tokens: Sequence[TokenLogprob], end: int | None = None) -> dict[str, Any]:
        """`end`: length of the text, when it is known. A stop string may have cut it."""
        offsets = [self._offsets.push(token.token_id) for token in tokens]
        return self.lists(tokens, offsets if end is None else [min(at, end) for at in offsets])

    def lists(self, tokens: Sequence[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
        """The lists. NaN means that a token has no logprob: the first token of a prompt."""
        scored = [not math.isnan(token.logprob) for token in tokens]
        return {
            "tokens": [token_label(token.token_id, token.text, self._as_ids) for token in tokens],
            "token_logprobs": [
                max(token.logprob, LOWEST_LOGPROB) if known else None
                for token, known in zip(tokens, scored, strict=True)
            ],
            "top_logprobs": [
                self._top(token) if known else None
                for token, known in zip(tokens, scored, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, name, _, logprob in token.top[: self._num_top]:
            label = token_label(other, name, self._as_ids)
            top.setdefault(label, max(logprob, LOWEST_LOGPROB))
        own = token_label(token.token_id, token.text, self._as_ids)
        top.setdefault(own, max(token.logprob, LOWEST_LOGPROB))
        return top


class RunningUsage:
    """The usage of a stream so far, for chunks that include it (`continuous_usage_stats`)."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self._started = set[str]()

    def take(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.completion_tokens += len(event.token_ids)
        elif isinstance(event, Started) and event.request_id not in self._started:
            # a request that moves to another worker sends Started again
            self._started.add(event.request_id)
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens

    def fields(self) -> dict[str, Any]:
        return usage_fields(Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens))


def model_card(card: ModelCard, kind: str) -> Any:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "coterie",
        "root": card.root,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        "kind": kind,
        "sampling": card.sampling,
        "system_prompt": card.system_prompt or None,
        "weight_bytes": card.weight_bytes or None,
    }
