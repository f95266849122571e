"""The Anthropic endpoints: parse the body, run it through the pipeline, write the answer."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.anthropic import render
from coterie.api.anthropic.parse import hints_of, parse_messages, prompt_of
from coterie.api.anthropic.render import MessageShape, MessageStream
from coterie.api.anthropic.types import CountBody, MessagesBody
from coterie.api.body import parse
from coterie.api.dialect import (
    DialectPipeline,
    ModelCard,
    WholeAnswer,
    answering_name,
    caller_of,
    planned_answer,
)
from coterie.api.door import exchange_of, new_id
from coterie.api.errors import encode
from coterie.api.tools.read import answer_syntax_of, tool_events, with_answer_grammar
from coterie.api.transport.sse import EventStream

JSON = "application/json"


class AnthropicDialect:
    def __init__(self, service: DialectPipeline, max_body_bytes: int) -> None:
        self.service = service
        self.max_body_bytes = max_body_bytes

    async def messages(self, request: Request) -> Response:
        """Create a message, whole or as a stream of events."""
        body = await parse(request, MessagesBody, self.max_body_bytes)
        exchange, caller = exchange_of(request.scope), caller_of(request)
        if body.thread is not None:
            exchange.reason = "thread: conversations are not kept here"
            refusal = render.thread_refusal(exchange.request_id)
            return Response(refusal, status_code=400, media_type=JSON)
        parsed = parse_messages(body, caller, new_id("msg_"))
        planned = planned_answer(self.service, parsed.request, exchange)
        shape = MessageShape(
            id=parsed.request.id,
            model=answering_name(planned.hints, planned.plan),
            request_id=exchange.request_id,
            syntax=await answer_syntax_of(parsed, planned.tokenizer),
        )
        parsed = await with_answer_grammar(parsed, planned.tokenizer, shape.syntax)
        events = tool_events(self.service, parsed, planned, exchange, shape)
        if parsed.stream:
            return EventStream(events, MessageStream(shape), exchange)
        return WholeAnswer(events, 1, partial(render.whole, shape), exchange)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens a message's prompt would have."""
        body = await parse(request, CountBody, self.max_body_bytes)
        chat = prompt_of(body)
        caller = caller_of(request)
        hints = hints_of(body, caller)
        specialist = self.service.resolve(hints, chat, caller.tenant)
        ids = await self.service.tokenise(specialist, chat, hints)
        return Response(encode({"input_tokens": len(ids)}), media_type=JSON)


def model_fields(card: ModelCard) -> dict[str, Any]:
    """A model as Anthropic's model list shows it."""
    created = datetime.fromtimestamp(card.created, UTC)
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
