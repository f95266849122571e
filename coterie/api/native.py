"""Endpoints that belong to no vendor: tokenizer, health, metrics, version, and the model list."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.api.anthropic import model_fields
from coterie.api.body import parse
from coterie.api.errors import ANTHROPIC, encode
from coterie.api.exchange import exchange_of
from coterie.api.inference import AUTO, ModelCard, chat_of
from coterie.api.native_types import DetokenizeBody, TokenizeBody
from coterie.api.openai_parse import continues, message_of
from coterie.api.openai_render import model_card
from coterie.core.errors import InvalidRequest, NotFound, Unavailable
from coterie.core.request import Chat

if TYPE_CHECKING:
    from coterie.models.tokenizer import Tokenizer
    from coterie.service.pipeline import Pipeline

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def answer(payload: Any, status: int = 200) -> Response:
    return Response(encode(payload), status, media_type=JSON)


class NativeEndpoints:
    def __init__(self, pipeline: Pipeline, max_body_bytes: int) -> None:
        self.pipeline = pipeline
        self.max_body_bytes = max_body_bytes

    async def models(self, request: Request) -> Response:
        """List the models, in the shape of the vendor whose client asks."""
        cards = self.pipeline.models()
        if "anthropic-version" not in request.headers:
            return answer({"object": "list", "data": [_openai_card(card) for card in cards]})
        data = [model_fields(card) for card in cards]
        ids = [card.name for card in cards] or [None]
        return answer({"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        name = request.path_params["model"]
        anthropic = "anthropic-version" in request.headers
        if anthropic:
            exchange_of(request.scope).dialect = ANTHROPIC
        for card in self.pipeline.models():
            if card.name == name:
                return answer(model_fields(card) if anthropic else _openai_card(card))
        raise NotFound("no model of this name is served here", param="model")

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat."""
        body = await parse(request, TokenizeBody, self.max_body_bytes)
        tokenizer, card = self._find(body.model)
        ids = await asyncio.to_thread(_encode, tokenizer, body)
        payload: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": card.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            texts = [tokenizer.decode([token], skip_special=False) for token in ids]
            payload["token_strs"] = texts
        return answer(payload)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = await parse(request, DetokenizeBody, self.max_body_bytes)
        tokenizer, _ = self._find(body.model)
        for index, token in enumerate(body.tokens):
            if token >= tokenizer.vocab_size:
                raise InvalidRequest(
                    f"tokens.{index}: the vocabulary has {tokenizer.vocab_size} tokens",
                    param=f"tokens.{index}",
                )
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special=False)
        return answer({"prompt": text})

    def _find(self, model: str | None) -> tuple[Tokenizer, ModelCard]:
        cards = self.pipeline.models()
        if not cards:
            raise Unavailable("no model is ready yet", retry_after_s=1.0)
        name = cards[0].name if model in (None, AUTO) else model
        for card in cards:
            if card.name == name:
                return self.pipeline.tokenizer(card.name), card
        raise NotFound(f"The model `{name}` does not exist", param="model")

    async def health(self, request: Request) -> Response:
        """Health with details per specialist: 200 when every request can be served, else 503."""
        health = self.pipeline.health()
        status = 200 if health.ready else 503
        return answer(
            {"live": health.live, "ready": health.ready, "specialists": health.details}, status
        )

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
        """Prometheus text."""
        return Response(self.pipeline.metrics_text(), headers={"content-type": PROMETHEUS})

    async def version(self, request: Request) -> Response:
        """The version of this server."""
        return answer({"version": __version__})


def _openai_card(card: ModelCard) -> Any:
    return model_card(card.name, card.created, card.root, card.parent, card.max_model_len)


def _encode(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, special=body.add_special_tokens)
    return tokenizer.encode_prompt(_chat(body))


def _chat(body: TokenizeBody) -> Chat:
    return chat_of(
        (message_of(message, index) for index, message in enumerate(body.messages or ())),
        continue_final=continues(body.continue_final_message, body.add_generation_prompt),
        template_kwargs=body.chat_template_kwargs or {},
    )
