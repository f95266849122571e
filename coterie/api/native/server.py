"""Endpoints that belong to no vendor: tokenizer, health, metrics, version, and the model list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.api.anthropic.endpoints import model_fields
from coterie.api.auth import ADMIN_TENANT, AccessKeys, Headers, OriginCheck
from coterie.api.body import QueryParameters, parse, query_of
from coterie.api.dialect import ModelCard
from coterie.api.door import exchange_of
from coterie.api.errors import ANTHROPIC, encode
from coterie.api.openai.parse import chat_prompt, tool_fields
from coterie.api.openai.render import model_card
from coterie.api.openai.types import DetokenizeBody, TokenizeBody, TokenizerQuery
from coterie.core.errors import CoterieError, Forbidden, InvalidRequest, UnsupportedFeature
from coterie.core.request import RouteHints, Text

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.service.pipeline import Pipeline

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


# when a health probe may try again
RETRY = {"retry-after": "1"}


def answer(payload: Any, status: int = 200) -> Response:
    return Response(encode(payload), status, RETRY if status == 503 else None, JSON)


class NativeEndpoints:
    def __init__(
        self, pipeline: Pipeline, max_body_bytes: int, keys: AccessKeys, origins: OriginCheck
    ) -> None:
        self.pipeline = pipeline
        self.keys, self.origins = keys, origins
        self.max_body_bytes = max_body_bytes

    async def about(self, request: Request) -> Response:
        """What this server is, and the paths of its main endpoints."""
        facts = {
            "name": "Coterie",
            "version": __version__,
            "ready": self.pipeline.health().ready,
            "openai_base_url": "/v1",
            "anthropic_base_url": "/",
            "routes": "/openapi.json",
            "health": "/health",
            "models": "/v1/models",
            "dashboard": "/dashboard",
        }
        response = answer(facts)
        response.headers["vary"] = "accept"
        return response

    async def models(self, request: Request) -> Response:
        """List the models, in the format of the vendor whose client asks."""
        query = query_of(request, ModelQuery)
        cards = self.pipeline.models(exchange_of(request.scope).tenant)
        if exchange_of(request.scope).dialect != ANTHROPIC:
            return answer({"object": "list", "data": [self._openai_card(card) for card in cards]})
        page, has_more = _page(cards, query)
        data = [model_fields(card) for card in page]
        first, last = (page[0].name, page[-1].name) if page else (None, None)
        return answer({"data": data, "has_more": has_more, "first_id": first, "last_id": last})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        name = request.path_params["model"].rstrip("/")
        if not name:
            return await self.models(request)
        exchange = exchange_of(request.scope)
        anthropic = exchange.dialect == ANTHROPIC
        card = self.pipeline.model(name, exchange.tenant)
        return answer(model_fields(card) if anthropic else self._openai_card(card))

    def _openai_card(self, card: ModelCard) -> Any:
        name = self.pipeline.encoder_name(card.name)
        kind = "encoder" if name in self.pipeline.encoders.served else "text"
        return model_card(card, kind)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat."""
        body = await parse(request, TokenizeBody, self.max_body_bytes)
        tokenizer, card = self._find(request, body.model)
        ids = await self._ids(body, card.name)
        payload: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": card.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            payload["token_strs"] = await asyncio.to_thread(_token_texts, tokenizer, ids)
        if body.with_pieces:
            payload["tokens"] = await asyncio.to_thread(_pieces, tokenizer, ids)
        return answer(payload)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = await parse(request, DetokenizeBody, self.max_body_bytes)
        tokenizer, _ = self._find(request, body.model)
        if max(body.tokens, default=0) >= tokenizer.vocab_size:
            over = (i for i, token in enumerate(body.tokens) if token >= tokenizer.vocab_size)
            param = f"tokens.{next(over)}"
            message = f"{param}: the vocabulary has {tokenizer.vocab_size} tokens"
            raise InvalidRequest(message, param=param)
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special=False)
        # llama.cpp's name for it too
        return answer({"prompt": text, "content": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's settings: special tokens, added tokens, chat template."""
        tokenizer, card = self._find(request, query_of(request, TokenizerQuery).model)
        return answer(tokenizer.facts() | {"model_max_length": card.max_model_len})

    async def load(self, request: Request) -> Response:
        """How many requests are running or waiting."""
        return answer({"server_load": self.pipeline.num_open})

    async def _ids(self, body: TokenizeBody, specialist: str) -> list[int]:
        if [body.prompt, body.messages, body.content].count(None) != 2:
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if not body.parse_special:
            text = "parse_special: names of special tokens always mean these tokens here"
            raise UnsupportedFeature(text, param="parse_special")
        if body.content is not None:
            return await self.pipeline.tokenise(specialist, Text(body.content, body.add_special))
        if body.messages is not None:
            prompt = replace(chat_prompt(body), tools=tool_fields(body.tools or ()))
            return await self.pipeline.tokenise(specialist, prompt, RouteHints(body.model))
        special = body.add_special_tokens is not False
        return await self.pipeline.tokenise(specialist, Text(body.prompt or "", special))

    def _find(self, request: Request, model: str | None) -> tuple[Tokenizer, ModelCard]:
        """The tokenizer of the specialist that the caller may use under this name, and its card."""
        tenant = exchange_of(request.scope).tenant
        specialist = self.pipeline.resolve(RouteHints(model), tenant=tenant)
        return self.pipeline.tokenizer(specialist), self.pipeline.model(specialist)

    async def health(self, request: Request) -> Response:
        """Health with details per specialist: 200 when every request can be served, else 503. The
        details need a key, if keys are needed, and the server's own Host and Origin."""
        tenant = self._reader(request.scope["headers"])
        health = self.pipeline.health(None if tenant == ADMIN_TENANT else tenant)
        facts: dict[str, Any] = {"live": health.live, "ready": health.ready}
        if tenant is not None:
            facts["specialists"] = health.specialists
        return answer(facts, 200 if health.ready else 503)

    def _reader(self, headers: Headers) -> str | None:
        try:
            self.origins.check(headers)
        except CoterieError:
            return None
        return self.keys.reader(headers)

    async def live(self, request: Request) -> Response:
        """Whether the process should be left running."""
        live = self.pipeline.health().live
        return answer({"live": live}, 200 if live else 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests can be served now."""
        ready = self.pipeline.health().ready
        return answer({"ready": ready}, 200 if ready else 503)

    async def ping(self, request: Request) -> Response:
        """The same as /health/ready, without a body."""
        return Response(status_code=200 if self.pipeline.health().ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text: figures of the whole server, with the names of what it serves."""
        tenant = exchange_of(request.scope).tenant
        has_keys = self.keys.callers is not None
        if has_keys and tenant != ADMIN_TENANT and self.pipeline.is_limited(tenant):
            raise Forbidden(
                "the metrics name every specialist and expert, and this key may not use all of "
                "them: send an admin key, or one of a tenant without `specialists` and `experts`"
            )
        return Response(self.pipeline.metrics_text(), headers={"content-type": PROMETHEUS})

    async def version(self, request: Request) -> Response:
        """The version of this server."""
        return answer({"version": __version__})


class ModelQuery(QueryParameters):
    """Anthropic's paging. OpenAI's list is always whole and ignores it."""

    # the vendor may add parameters
    model_config = ConfigDict(extra="ignore")

    limit: int = Field(20, ge=1, le=1000)
    before_id: str | None = Field(None, max_length=512)
    after_id: str | None = Field(None, max_length=512)


def _page(cards: Sequence[ModelCard], query: ModelQuery) -> tuple[Sequence[ModelCard], bool]:
    """The cards after `after_id`, or the last ones before `before_id`; and whether there are more
    in that direction."""
    names = [card.name for card in cards]
    for param, name in (("after_id", query.after_id), ("before_id", query.before_id)):
        if name is not None and name not in names:
            raise InvalidRequest(f"{param}: no such model is listed", param=param)
    begin = 0 if query.after_id is None else names.index(query.after_id) + 1
    if query.before_id is None:
        end = begin + query.limit
        return cards[begin:end], end < len(cards)
    end = names.index(query.before_id)
    begin = max(begin, end - query.limit)
    return cards[begin:end], begin > 0


def _token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special=False) for token in ids]


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[dict[str, Any]]:
    """llama.cpp's: the text of each token, or its bytes if they are no text alone."""
    return [{"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in ids]


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
