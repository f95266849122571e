"""llama.cpp's endpoints: parse the body, run it through the pipeline, write the answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.api.body import parse, query_of
from coterie.api.dialect import (
    ParsedRequest,
    PlannedAnswer,
    WholeAnswer,
    answering_name,
    caller_of,
    events_of,
    planned_answer,
)
from coterie.api.door import Exchange, exchange_of, new_id
from coterie.api.errors import encode
from coterie.api.llamacpp import render
from coterie.api.llamacpp.parse import (
    completion_prompt,
    infill_prompt,
    parse_completion,
    with_prompt,
)
from coterie.api.llamacpp.render import LlamaShape, LlamaStream
from coterie.api.llamacpp.types import (
    ApplyTemplateBody,
    InfillBody,
    LlamaCompletionBody,
    LlamaFields,
)
from coterie.api.openai.parse import chat_prompt, tool_fields
from coterie.api.openai.types import TokenizeBody, TokenizerQuery
from coterie.api.response_format import format_named
from coterie.api.transport.sse import EventStream
from coterie.core.errors import UnsupportedFeature
from coterie.core.request import AUTO, Chat, Prompt, RouteHints, Sampling, Text
from coterie.models.text.tokenizer import Tokenizer, is_long

if TYPE_CHECKING:
    from coterie.service.pipeline import Pipeline

JSON = "application/json"


class LlamaDialect:
    def __init__(self, service: Pipeline, max_body_bytes: int) -> None:
        self.service = service
        self.max_body_bytes = max_body_bytes

    async def llama_completion(self, request: Request) -> Response:
        """Complete a text or tokens, whole or as a stream of events."""
        body = await parse(request, LlamaCompletionBody, self.max_body_bytes)
        parsed = self._parsed(body, request)
        specialist = self.service.resolve(
            parsed.request.hints, tenant=exchange_of(request.scope).tenant
        )
        context = self.service.model(specialist).max_model_len
        prompt = await completion_prompt(body, self._tokenizer(specialist), context)
        parsed = self._pinned(parsed, specialist, prompt)
        return await self._answer(body, parsed, exchange_of(request.scope))

    async def llama_infill(self, request: Request) -> Response:
        """Fill a gap between two texts, for models that were trained to."""
        body = await parse(request, InfillBody, self.max_body_bytes)
        parsed = self._parsed(body, request)
        specialist = self.service.resolve(
            parsed.request.hints, tenant=exchange_of(request.scope).tenant
        )
        context = self.service.model(specialist).max_model_len
        prompt = await infill_prompt(body, self.service.tokenizer(specialist), context)
        parsed = self._pinned(parsed, specialist, prompt)
        return await self._answer(body, parsed, exchange_of(request.scope))

    async def llama_props(self, request: Request) -> Response:
        """Properties of the server and of a model."""
        name, tenant = query_of(request, TokenizerQuery).model, exchange_of(request.scope).tenant
        specialist = self.service.resolve(RouteHints(name), tenant=tenant)
        card = self.service.model(name or specialist, tenant)
        served = self.service.fleet.find(specialist)
        facts: dict[str, Any] = {} if served.tokenizer is None else served.tokenizer.facts()
        values: dict[str, Any] = {field: item.value for field, item in card.sampling.items()}
        params = _settings(Sampling(**values), None, False, card.max_model_len)
        payload = {
            "default_generation_settings": {"n_ctx": card.max_model_len, "params": params},
            "total_slots": served.max_sequences,
            "model_alias": card.name,
            "model_path": served.model,
            "chat_template": facts.get("chat_template") or "",
            "bos_token": facts.get("bos_token", ""),
            "eos_token": facts.get("eos_token", ""),
            "modalities": {"vision": False, "audio": False},
            "build_info": f"coterie-{__version__}",
            "is_sleeping": False,
        }
        return Response(encode(payload), media_type=JSON)

    async def apply_template(self, request: Request) -> Response:
        """The prompt that a model's template makes of a chat."""
        body = await parse(request, ApplyTemplateBody, self.max_body_bytes)
        hints, tenant = RouteHints(body.model), exchange_of(request.scope).tenant
        specialist = self.service.resolve(hints, tenant=tenant)
        tokenizer = self.service.tokenizer(specialist)
        told = TokenizeBody.model_validate(body.model_dump(exclude_unset=True, exclude={"tools"}))
        chat = replace(chat_prompt(told), tools=tool_fields(body.tools or ()))
        prompt = self.service.readable(specialist, chat, hints)
        assert isinstance(prompt, Chat)
        if is_long(prompt):
            text = await asyncio.to_thread(tokenizer.render, prompt)
        else:
            text = tokenizer.render(prompt)
        return Response(encode({"prompt": text}), media_type=JSON)

    def _parsed(self, body: LlamaFields, request: Request) -> ParsedRequest:
        exchange_of(request.scope).model = body.model or ""
        return parse_completion(body, caller_of(request), new_id("cmpl-"))

    def _tokenizer(self, specialist: str) -> Tokenizer | None:
        """None for a specialist on another server."""
        try:
            return self.service.tokenizer(specialist)
        except UnsupportedFeature:
            return None

    def _pinned(self, parsed: ParsedRequest, specialist: str, prompt: Prompt) -> ParsedRequest:
        """With its prompt; tokens are those of one specialist, which then has to answer."""
        parsed = with_prompt(parsed, prompt)
        request = parsed.request
        hints = self.service.named(request.hints)
        if isinstance(prompt, Text) or hints.model not in (None, AUTO):
            return parsed
        return replace(parsed, request=replace(request, hints=replace(hints, model=specialist)))

    async def _answer(
        self, body: LlamaFields, parsed: ParsedRequest, exchange: Exchange
    ) -> Response:
        planned = planned_answer(self.service, parsed.request, exchange)
        shape = self._shape(body, parsed, planned)
        events = events_of(self.service, planned, exchange, shape)
        events = format_named(events, parsed.format_field)
        if parsed.stream:
            return EventStream(events, LlamaStream(shape), exchange)
        return WholeAnswer(events, 1, partial(render.whole, shape), exchange)

    def _shape(
        self, body: LlamaFields, parsed: ParsedRequest, planned: PlannedAnswer
    ) -> LlamaShape:
        prompt = parsed.request.prompt
        context = self.service.model(planned.plan.specialist).max_model_len
        return LlamaShape(
            parsed.request.id,
            answering_name(planned.hints, planned.plan),
            prompt.text if isinstance(prompt, Text) else "",
            _settings(planned.plan.sampling, body, parsed.stream, context),
            tuple(body.response_fields or ()),
            with_tokens=bool(body.return_tokens),
            with_probabilities=bool(body.n_probs),
            reads_only=body.most == 0,
        )


def _settings(
    sampling: Sampling, body: LlamaFields | None, stream: bool, context: int
) -> dict[str, Any]:
    """The values that hold; None = the model's."""
    most = None if body is None else body.most
    return {
        "n_ctx": context,
        "n_predict": -1 if most is None else most,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list((body.stop if body is not None else None) or ()),
        "ignore_eos": bool(body is not None and body.ignore_eos),
        "n_probs": (body.n_probs if body is not None else None) or 0,
        "stream": stream,
    }
