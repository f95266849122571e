"""The OpenAI endpoints: parse, ask the pipeline, write. Translation lives in the modules beside."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import parse
from coterie.api.dialect import (
    DialectPipeline,
    ParsedRequest,
    PlannedAnswer,
    answering_name,
    collect,
    events_of,
    inference_request,
    merged,
    note_usage,
    planned_answer,
    request_headers,
)
from coterie.api.door import Exchange, new_id
from coterie.api.openai import chat, text
from coterie.api.openai.chat import ChatShape, ChatStream
from coterie.api.openai.parse import echoed, parse_chat, parse_completion, scores_prompt
from coterie.api.openai.text import TextShape, TextStream, part_id
from coterie.api.openai.types import ChatBody, CompletionBody, CompletionFields
from coterie.api.response_format import format_named
from coterie.api.tools.read import answer_syntax_of, tool_events, with_answer_grammar
from coterie.api.transport.sse import Events, EventStream, while_connected

JSON = "application/json"


class OpenAIDialect:
    def __init__(self, service: DialectPipeline, max_body_bytes: int) -> None:
        self.service = service
        self.max_body_bytes = max_body_bytes

    async def chat(self, request: Request) -> Response:
        """Create a chat completion, whole or as a stream of chunks."""
        body = await parse(request, ChatBody, self.max_body_bytes)
        steering = request_headers(request)
        ask = parse_chat(body, steering)
        asked = inference_request(ask, steering, new_id("chatcmpl-"))
        planned = planned_answer(self.service, asked, steering.exchange)
        shape = await self._chat_shape(body, ask, planned)
        ask = await with_answer_grammar(ask, planned.tokenizer, shape.reading)
        events = tool_events(self.service, ask, planned, steering.exchange)
        if body.stream:
            return EventStream(events, ChatStream(shape), steering.exchange)
        answer = await while_connected(request.receive, collect(events, shape.num_choices))
        note_usage(steering.exchange, answer.finished)
        return Response(chat.whole(shape, answer), media_type=JSON)

    async def completions(self, request: Request) -> Response:
        """Complete text or token ids, whole or as a stream of chunks."""
        body = await parse(request, CompletionBody, self.max_body_bytes)
        steering = request_headers(request)
        asks = parse_completion(body, steering)
        answer_id = new_id("cmpl-")
        # in one go: no name can change its meaning between two prompts
        planned = [
            planned_answer(
                self.service,
                inference_request(ask, steering, part_id(answer_id, index, len(asks))),
                steering.exchange,
            )
            for index, ask in enumerate(asks)
        ]
        shape = self._text_shape(answer_id, body, asks, planned[0])
        events = self._text_events(shape, asks, planned, steering.exchange)
        if body.stream:
            return EventStream(events, TextStream(shape), steering.exchange)
        total = shape.num_choices * shape.num_prompts
        answer = await while_connected(request.receive, collect(events, total))
        note_usage(steering.exchange, answer.finished)
        return Response(text.whole(shape, answer), media_type=JSON)

    async def _chat_shape(
        self, body: ChatBody, ask: ParsedRequest, planned: PlannedAnswer
    ) -> ChatShape:
        return ChatShape(
            id=planned.plan.request_id,
            created=int(time.time()),
            model=answering_name(ask.hints, planned.plan),
            num_choices=body.n or 1,
            include_usage=includes_usage(body),
            continuous_usage=tells_usage(body),
            logprobs=bool(body.logprobs),
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            names_ids=bool(body.return_tokens_as_token_ids),
            echo=echoed(body),
            reading=await answer_syntax_of(ask, planned.tokenizer),
        )

    def _text_shape(
        self,
        answer_id: str,
        body: CompletionBody,
        asks: Sequence[ParsedRequest],
        planned: PlannedAnswer,
    ) -> TextShape:
        return TextShape(
            id=answer_id,
            created=int(time.time()),
            model=answering_name(asks[0].hints, planned.plan),
            num_choices=body.n or 1,
            prompts=tuple(ask.prompt for ask in asks),
            tokenizer=planned.tokenizer,
            include_usage=includes_usage(body),
            continuous_usage=tells_usage(body),
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            names_ids=bool(body.return_tokens_as_token_ids),
            skip_special=asks[0].limits.text.skip_special,
            scores_prompt=scores_prompt(body),
            echo=bool(body.echo),
        )

    def _text_events(
        self,
        shape: TextShape,
        asks: Sequence[ParsedRequest],
        planned: Sequence[PlannedAnswer],
        exchange: Exchange,
    ) -> Events:
        sources = [
            format_named(events_of(self.service, one, exchange), asks[0].format_field)
            for one in planned
        ]
        return sources[0] if len(sources) == 1 else merged(sources, shape.num_choices)


def includes_usage(body: CompletionFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def tells_usage(body: CompletionFields) -> bool:
    """In every chunk."""
    options = body.stream_options
    return options is not None and bool(options.include_usage and options.continuous_usage_stats)
