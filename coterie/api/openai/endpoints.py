"""The OpenAI endpoints: parse the body, run it through the pipeline, write the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import parse
from coterie.api.dialect import (
    DialectPipeline,
    ParsedRequest,
    PlannedAnswer,
    WholeAnswer,
    answering_name,
    caller_of,
    events_of,
    merged,
    planned_answer,
)
from coterie.api.door import exchange_of, new_id
from coterie.api.openai import chat, text
from coterie.api.openai.chat import ChatShape, ChatStream
from coterie.api.openai.parse import (
    echoed,
    parse_chat,
    parse_completion,
    refuse_token_fields,
    scores_prompt,
)
from coterie.api.openai.text import TextShape, TextStream
from coterie.api.openai.types import ChatBody, CompletionBody, CompletionFields
from coterie.api.response_format import format_named
from coterie.api.tools.read import answer_syntax_of, tool_events, with_answer_grammar
from coterie.api.transport.sse import EventStream


class OpenAIDialect:
    def __init__(self, service: DialectPipeline, max_body_bytes: int) -> None:
        self.service = service
        self.max_body_bytes = max_body_bytes

    async def chat(self, request: Request) -> Response:
        """Create a chat completion, whole or as a stream of chunks."""
        body = await parse(request, ChatBody, self.max_body_bytes)
        exchange = exchange_of(request.scope)
        parsed = parse_chat(body, caller_of(request), new_id("chatcmpl-"))
        planned = planned_answer(self.service, parsed.request, exchange)
        if planned.tokenizer is None:
            refuse_token_fields(body)
        shape = await self._chat_shape(body, parsed, planned)
        parsed = await with_answer_grammar(parsed, planned.tokenizer, shape.syntax)
        events = tool_events(self.service, parsed, planned, exchange, shape)
        if parsed.stream:
            return EventStream(events, ChatStream(shape), exchange)
        return WholeAnswer(events, shape.num_choices, partial(chat.whole, shape), exchange)

    async def completions(self, request: Request) -> Response:
        """Complete text or token ids, whole or as a stream of chunks."""
        body = await parse(request, CompletionBody, self.max_body_bytes)
        exchange, answer_id = exchange_of(request.scope), new_id("cmpl-")
        parts = parse_completion(body, caller_of(request), answer_id)
        # plan all prompts without a pause, so that a name means the same for all of them
        planned = [planned_answer(self.service, part.request, exchange) for part in parts]
        shape = self._text_shape(body, answer_id, parts, planned[0])
        field = parts[0].format_field
        sources = []
        for one in planned:
            # the answer has one name: that of its first prompt
            named = shape if one is planned[0] else None
            events = events_of(self.service, one, exchange, named)
            sources.append(format_named(events, field))
        events = sources[0] if len(sources) == 1 else merged(sources, shape.num_choices)
        if body.stream:
            return EventStream(events, TextStream(shape), exchange)
        total = shape.num_choices * shape.num_prompts
        return WholeAnswer(events, total, partial(text.whole, shape), exchange)

    async def _chat_shape(
        self, body: ChatBody, parsed: ParsedRequest, planned: PlannedAnswer
    ) -> ChatShape:
        return ChatShape(
            id=parsed.request.id,
            created=int(time.time()),
            model=answering_name(planned.hints, planned.plan),
            num_choices=body.n or 1,
            include_usage=includes_usage(body),
            continuous_usage=sends_usage(body),
            logprobs=bool(body.logprobs),
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            names_ids=bool(body.return_tokens_as_token_ids),
            echo=echoed(body),
            syntax=await answer_syntax_of(parsed, planned.tokenizer),
        )

    def _text_shape(
        self,
        body: CompletionBody,
        answer_id: str,
        parts: Sequence[ParsedRequest],
        planned: PlannedAnswer,
    ) -> TextShape:
        first = parts[0].request
        if planned.tokenizer is None:
            refuse_token_fields(body)
        return TextShape(
            id=answer_id,
            created=int(time.time()),
            model=answering_name(planned.hints, planned.plan),
            num_choices=body.n or 1,
            prompts=tuple(part.request.prompt for part in parts),
            tokenizer=planned.tokenizer,
            include_usage=includes_usage(body),
            continuous_usage=sends_usage(body),
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            names_ids=bool(body.return_tokens_as_token_ids),
            skip_special=first.limits.text.skip_special,
            scores_prompt=scores_prompt(body),
            echo=bool(body.echo),
        )


def includes_usage(body: CompletionFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def sends_usage(body: CompletionFields) -> bool:
    """Whether every chunk includes the usage."""
    options = body.stream_options
    return options is not None and bool(options.include_usage and options.continuous_usage_stats)
