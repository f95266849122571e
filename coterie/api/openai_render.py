"""OpenAI's wire shapes that chat and plain completions share: choices, usage, finish reasons.

Values in, plain dicts or bytes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.api import errors
from coterie.api.errors import encode
from coterie.core.errors import CoterieError
from coterie.core.events import Finished, TokenLogprob, Usage
from coterie.core.telemetry import metadata

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"
# JSON has no minus infinity
LOWEST_LOGPROB = -9999.0

# the vendor knows no other word for an answer that was cut short
FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length", "abort": "length"}


def finish_fields(
    reason: str, stop_match: str | int | None, called: bool = False
) -> dict[str, Any]:
    """`finish_reason`, and vLLM's `stop_reason` where there is more to say."""
    fields: dict[str, Any] = {"finish_reason": FINISH_REASONS[reason]}
    # a stop string may have cut a call short
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
    """Our own field beside the vendor's, in the frame that carries the usage."""
    return metadata(event)


def frame(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def error_frame(error: CoterieError, request_id: str) -> bytes:
    return b"data: " + errors.body_of(error, errors.OPENAI, request_id) + b"\n\n"


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        _chat_token(token.text, token.data, token.logprob)
        | {"top_logprobs": [_chat_token(text, data, lp) for _, text, data, lp in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(text: str, data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}


class LegacyLogprobs:
    """The four parallel lists of /v1/completions, with offsets that run on through a stream."""

    def __init__(self) -> None:
        self.offset = 0

    def fields(self, tokens: Sequence[TokenLogprob | None], first: str = "") -> dict[str, Any]:
        """`first` is the text of a None: the prompt's first token has no probability."""
        texts = [first if token is None else token.text for token in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [
                None if t is None else max(t.logprob, LOWEST_LOGPROB) for t in tokens
            ],
            "top_logprobs": [None if t is None else _top(t) for t in tokens],
            "text_offset": offsets,
        }


def _top(token: TokenLogprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for _, text, _, logprob in token.top:
        top.setdefault(text, max(logprob, LOWEST_LOGPROB))
    top.setdefault(token.text, max(token.logprob, LOWEST_LOGPROB))
    return top


def model_card(name: str, created: int, root: str, parent: str | None, length: int) -> Any:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "coterie",
        "root": root,
        "parent": parent,
        "max_model_len": length,
    }
