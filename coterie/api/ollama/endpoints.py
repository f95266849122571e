"""The Ollama endpoints: parse the body, run it through the pipeline, write the answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.api.body import parse
from coterie.api.dialect import (
    ParsedRequest,
    PlannedAnswer,
    WholeAnswer,
    answering_name,
    caller_of,
    planned_answer,
)
from coterie.api.door import Exchange, exchange_of, new_id
from coterie.api.embeddings.endpoints import EmbeddingEndpoints, off_loop_if_large
from coterie.api.embeddings.types import EmbeddingBody
from coterie.api.errors import encode
from coterie.api.ollama import render
from coterie.api.ollama.models import (
    KeepAlives,
    known_name,
    list_fields,
    running_fields,
    show_fields,
)
from coterie.api.ollama.parse import ignored_options, keep_alive_s, parse_chat, parse_generate
from coterie.api.ollama.render import OllamaShape, OllamaStream
from coterie.api.ollama.types import (
    OllamaChatBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaFields,
    OllamaGenerateBody,
    OllamaOldEmbedBody,
    OllamaOptions,
    OllamaShowBody,
)
from coterie.api.tools.read import TEXT_ONLY, AnswerSyntax, answer_syntax_of, with_answer_grammar
from coterie.api.tools.read import tool_events as events_with_format
from coterie.api.transport.sse import LineStream
from coterie.api.truncate import ANSWER_SHARE, fitted
from coterie.core.errors import InvalidRequest, UnsupportedFeature
from coterie.core.request import AUTO, Chat, InferenceRequest, RouteHints, Tokens
from coterie.models.text.fill import GapText, fill_prompt
from coterie.obs.log import log
from coterie.service.encoders.service import shaped

if TYPE_CHECKING:
    from coterie.service.pipeline import Pipeline

JSON = "application/json"
# the release of Ollama whose API this is; clients compare it with the oldest that they work with
OLLAMA_VERSION = "0.12.11"
# a message has this many tokens beside its text, or fewer
_TURN_TOKENS = 64


class OllamaDialect:
    def __init__(self, service: Pipeline, max_body_bytes: int) -> None:
        self.service = service
        self.max_body_bytes = max_body_bytes
        self._encoders = EmbeddingEndpoints(service, max_body_bytes)
        self._kept = KeepAlives()
        # ignored options that the log has named
        self._logged: set[str] = set()

    async def ollama_chat(self, request: Request) -> Response:
        """Answer a conversation, whole or as lines of JSON."""
        body = await parse(request, OllamaChatBody, self.max_body_bytes)
        exchange = exchange_of(request.scope)
        name = self._known(body.model, exchange)
        if not body.messages:
            return self._loaded(body, name, exchange)
        parsed = parse_chat(body, name, caller_of(request), new_id("chat-"))
        parsed = await self._shortened(body, parsed)
        return await self._answer(body, parsed, parsed, exchange)

    async def ollama_generate(self, request: Request) -> Response:
        """Answer a prompt, whole or as lines of JSON."""
        body = await parse(request, OllamaGenerateBody, self.max_body_bytes)
        exchange = exchange_of(request.scope)
        name = self._known(body.model, exchange)
        parsed = parse_generate(body, name, caller_of(request), new_id("gen-"))
        if not body.prompt and not body.suffix:
            return self._loaded(body, name, exchange)
        if body.suffix:
            parsed = await self._filling(parsed, body.prompt or "", body.suffix)
        prompted = await self._continued(parsed, body.context) if body.context else parsed
        return await self._answer(body, parsed, prompted, exchange)

    async def ollama_tags(self, request: Request) -> Response:
        """List the models."""
        return _json(list_fields(self.service, exchange_of(request.scope).tenant))

    async def ollama_ps(self, request: Request) -> Response:
        """List the models that are in memory."""
        return _json(running_fields(self.service, exchange_of(request.scope).tenant, self._kept))

    async def ollama_show(self, request: Request) -> Response:
        """Describe one model."""
        body = await parse(request, OllamaShowBody, self.max_body_bytes)
        exchange = exchange_of(request.scope)
        if (name := body.model or body.name) is None:
            raise InvalidRequest("model: is required", param="model")
        known = self._known(name, exchange)
        return _json(show_fields(self.service, known, exchange.tenant))

    async def ollama_version(self, request: Request) -> Response:
        """The release of Ollama whose API this is."""
        return _json({"version": OLLAMA_VERSION, "coterie": __version__})

    async def ollama_push(self, request: Request) -> Response:
        """Refused: this server publishes nothing."""
        raise UnsupportedFeature("push: this server does not publish models")

    async def ollama_create(self, request: Request) -> Response:
        """Refused: models are made outside of this server."""
        body = await parse(request, OllamaCreateBody, self.max_body_bytes)
        if body.quantize or body.quantization:
            raise UnsupportedFeature(
                "quantize: weights stay in their stored bits; serve a file of the type that you "
                "want, or start the server with --dtype int8 or int4",
                param="quantize",
            )
        raise UnsupportedFeature(
            "create: models are not made over HTTP; name a model's file in the server's settings"
        )

    async def ollama_embed(self, request: Request) -> Response:
        """Embed texts: one vector each."""
        body = await parse(request, OllamaEmbedBody, self.max_body_bytes)
        if not body.input:
            self._load(body, request)
            return _json({"model": body.model, "embeddings": []} | render.embed_figures(0, 0))
        cut = body.truncate is not False
        wanted = self._embedding(request, body.model, body.input, cut, body.dimensions)
        began = time.perf_counter_ns()
        served, answer = await self._encoders.encoded(request, wanted)
        self._keep(body.keep_alive, served.name, exchange_of(request.scope))

        def written() -> bytes:
            vectors = shaped(answer.vectors, served.normalise, body.dimensions)
            spent_ns = time.perf_counter_ns() - began
            return render.embeddings(body.model, vectors, spent_ns, answer.total_tokens)

        return Response(await off_loop_if_large(answer, written), media_type=JSON)

    async def ollama_embeddings(self, request: Request) -> Response:
        """Embed one text; Ollama's older form."""
        body = await parse(request, OllamaOldEmbedBody, self.max_body_bytes)
        if not body.prompt:
            self._load(body, request)
            return _json({"embedding": []})
        wanted = self._embedding(request, body.model, body.prompt, True)
        served, answer = await self._encoders.encoded(request, wanted)
        self._keep(body.keep_alive, served.name, exchange_of(request.scope))
        vectors = shaped(answer.vectors, served.normalise, None)
        return _json({"embedding": vectors[0].tolist()})

    def _embedding(
        self,
        request: Request,
        model: str,
        texts: str | list[str],
        cut: bool,
        dimensions: int | None = None,
    ) -> EmbeddingBody:
        """The same request in OpenAI's form; its fields are checked already."""
        name = self._known(model, exchange_of(request.scope))
        fields = {"model": name, "input": texts, "truncate": cut, "dimensions": dimensions}
        return EmbeddingBody.model_validate(fields)

    def _known(self, name: str, exchange: Exchange) -> str:
        exchange.model = name
        return known_name(self.service, name, exchange.tenant)

    def _loaded(self, body: OllamaFields, name: str, exchange: Exchange) -> Response:
        """A request without a prompt loads a model, or unloads it. Here a model is loaded already,
        and stays: other callers use it."""
        self.service.model(name, exchange.tenant)
        self._keep(body.keep_alive, self._specialist(name, exchange), exchange)
        is_unload = body.keep_alive is not None and keep_alive_s(body.keep_alive) == 0
        generates = isinstance(body, OllamaGenerateBody)
        shape = OllamaShape("", body.model, name, name, is_generate=generates)
        answer = render.loaded(shape, "unload" if is_unload else "load")
        return Response(answer, media_type=JSON)

    def _load(self, body: OllamaEmbedBody | OllamaOldEmbedBody, request: Request) -> None:
        """The same for a request without a text to embed."""
        exchange = exchange_of(request.scope)
        name = self._known(body.model, exchange)
        self.service.model(name, exchange.tenant)
        self._keep(body.keep_alive, self._specialist(name, exchange), exchange)

    def _specialist(self, name: str, exchange: Exchange) -> str:
        encoder = self.service.encoder_name(name)
        if encoder is not None and encoder in self.service.encoders.names():
            return encoder
        return self.service.resolve(RouteHints(name), tenant=exchange.tenant)

    def _keep(self, wanted: float | str | None, specialist: str, exchange: Exchange) -> None:
        seconds = None if wanted is None else keep_alive_s(wanted)
        self._kept.note(exchange.tenant, specialist, seconds)

    def _note_ignored(self, options: OllamaOptions | None) -> None:
        """Say once in the log which options have no effect here."""
        for name in ignored_options(options):
            if name not in self._logged:
                self._logged.add(name)
                reason = f"{name}: is not available; the answer is drawn without it"
                log("option_ignored", level="warning", reason=reason)

    async def _shortened(self, body: OllamaChatBody, parsed: ParsedRequest) -> ParsedRequest:
        """Without the oldest turns, if they do not fit; Ollama's default."""
        if body.truncate is False or not self._may_be_long(parsed.request):
            return parsed
        try:
            request = await fitted(self.service, parsed.request, "truncate")
        except UnsupportedFeature:
            # the tokens of a model on another server are not known: that one says if it fits
            if body.truncate:
                raise
            return parsed
        return replace(parsed, request=request)

    def _may_be_long(self, request: InferenceRequest) -> bool:
        """A token has at least one byte: most chats fit, and need not be counted."""
        chat = request.prompt
        assert isinstance(chat, Chat)
        if chat.tools:
            return True
        smallest = min((item.context for item in self.service.fleet.served.values()), default=0)
        room = min(smallest, request.limits.context_size or smallest)
        room -= request.limits.max_tokens or room // ANSWER_SHARE
        size = sum(len(turn.content.encode()) + _TURN_TOKENS for turn in chat.messages)
        return size > room

    async def _filling(self, parsed: ParsedRequest, before: str, after: str) -> ParsedRequest:
        request = parsed.request
        specialist = self.service.resolve(request.hints, tenant=request.tenant)
        tokenizer = self.service.tokenizer(specialist)
        context, gap = self.service.model(specialist).max_model_len, GapText(before, after)
        ids = await asyncio.to_thread(fill_prompt, tokenizer, gap, context, "suffix")
        return self._with_tokens(parsed, specialist, ids)

    async def _continued(self, parsed: ParsedRequest, context: list[int]) -> ParsedRequest:
        """The new turn after the tokens of the ones before."""
        request, prompt = parsed.request, parsed.request.prompt
        specialist = self.service.resolve(request.hints, prompt, request.tenant)
        if isinstance(prompt, Chat):
            # a system prompt is at the start of the tokens before
            prompt = replace(prompt, adds_system=False)
        ids = await self.service.tokenise(specialist, prompt)
        return self._with_tokens(parsed, specialist, (*context, *ids))

    def _with_tokens(
        self, parsed: ParsedRequest, specialist: str, ids: tuple[int, ...]
    ) -> ParsedRequest:
        """The request with its prompt as tokens of this specialist, which then has to answer."""
        hints = self.service.named(parsed.request.hints)
        if hints.model == AUTO and not hints.adapters:
            hints = replace(hints, model=specialist)
        return replace(parsed, request=replace(parsed.request, prompt=Tokens(ids), hints=hints))

    async def _answer(
        self, body: OllamaFields, parsed: ParsedRequest, prompted: ParsedRequest, exchange: Exchange
    ) -> Response:
        """`parsed` is the request as a chat where it is one, `prompted` the one that runs."""
        planned = planned_answer(self.service, prompted.request, exchange)
        self._check(body, planned)
        self._keep(body.keep_alive, planned.plan.specialist, exchange)
        self._note_ignored(body.options)
        syntax = await self._syntax(parsed, planned)
        shape = OllamaShape(
            parsed.request.id,
            body.model,
            parsed.request.hints.model or "",
            answering_name(planned.hints, planned.plan),
            is_generate=isinstance(body, OllamaGenerateBody),
            logprobs=bool(body.logprobs),
            with_context=_sends_context(body, planned),
            syntax=syntax,
        )
        prompted = await with_answer_grammar(prompted, planned.tokenizer, syntax)
        events = events_with_format(self.service, prompted, planned, exchange, shape)
        if parsed.stream:
            return LineStream(events, OllamaStream(shape), exchange)
        return WholeAnswer(events, 1, partial(render.whole, shape), exchange)

    def _check(self, body: OllamaFields, planned: PlannedAnswer) -> None:
        """What depends on the model."""
        tokenizer = planned.tokenizer
        if body.think and tokenizer is not None and tokenizer.reasoning is None:
            raise UnsupportedFeature(f'"{body.model}" does not support thinking', param="think")

    async def _syntax(self, parsed: ParsedRequest, planned: PlannedAnswer) -> AnswerSyntax:
        if not isinstance(parsed.request.prompt, Chat):
            return TEXT_ONLY
        return await answer_syntax_of(parsed, planned.tokenizer)


def _sends_context(body: OllamaFields, planned: PlannedAnswer) -> bool:
    if not isinstance(body, OllamaGenerateBody) or body.raw:
        return False
    return planned.tokenizer is not None


def _json(payload: object) -> Response:
    return Response(encode(payload), media_type=JSON)
