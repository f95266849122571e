"""The explicit list of routes, and the OpenAPI text that describes them.

Bodies are read and checked by the endpoints themselves (a body limit must hold while reading), so
their schemas are joined to the document here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.api.anthropic import AnthropicDialect
from coterie.api.anthropic_types import CountBody, MessagesBody
from coterie.api.experts import ExpertEndpoints
from coterie.api.experts_types import ExpertPatch, InstallBody, LoadLoraBody, UnloadLoraBody
from coterie.api.infer import InferEndpoints
from coterie.api.infer_types import InferBody
from coterie.api.native import NativeEndpoints
from coterie.api.native_types import DetokenizeBody, TokenizeBody
from coterie.api.openai import OpenAIDialect
from coterie.api.openai_types import ChatBody, CompletionBody

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
_REF = "#/components/schemas/{model}"
# endpoints are only described, never called
_NOBODY: Any = None
_GET, _POST, _PROBE = ("GET",), ("POST",), ("GET", "HEAD")
_TEXT_PLAIN = "text/plain"


@dataclass(frozen=True, slots=True)
class RouteRow:
    methods: tuple[str, ...]
    path: str
    endpoint: Endpoint
    tag: str
    body: type[BaseModel] | None = None
    media_type: str = "application/json"
    # False for a second spelling of a route
    documented: bool = True
    # the body may also be a file's bytes
    takes_file: bool = False


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Who answers the routes."""

    openai: OpenAIDialect
    anthropic: AnthropicDialect
    native: NativeEndpoints
    experts: ExpertEndpoints
    infer: InferEndpoints


def routes(ends: Endpoints) -> Sequence[RouteRow]:
    openai, anthropic, native = ends.openai, ends.anthropic, ends.native
    return (
        RouteRow(_POST, "/v1/infer", ends.infer.infer, "native", InferBody),
        RouteRow(_POST, "/v1/chat/completions", openai.chat, "openai", ChatBody),
        RouteRow(_POST, "/v1/completions", openai.completions, "openai", CompletionBody),
        RouteRow(_GET, "/v1/models", native.models, "openai"),
        RouteRow(_GET, "/v1/models/{model:path}", native.model, "openai"),
        RouteRow(_POST, "/v1/messages", anthropic.messages, "anthropic", MessagesBody),
        RouteRow(
            _POST, "/v1/messages/count_tokens", anthropic.count_tokens, "anthropic", CountBody
        ),
        RouteRow(_POST, "/tokenize", native.tokenize, "native", TokenizeBody),
        RouteRow(_POST, "/detokenize", native.detokenize, "native", DetokenizeBody),
        RouteRow(_PROBE, "/health", native.health, "native"),
        RouteRow(_PROBE, "/health/live", native.live, "native"),
        RouteRow(_PROBE, "/health/ready", native.ready, "native"),
        RouteRow(("GET", "HEAD", "POST"), "/ping", native.ping, "native"),
        RouteRow(_GET, "/metrics", native.metrics, "native", media_type="text/plain"),
        RouteRow(_GET, "/version", native.version, "native"),
        *_expert_routes(ends.experts),
    )


def _expert_routes(experts: ExpertEndpoints) -> Sequence[RouteRow]:
    one, act = "/v1/experts/{name}", experts.act_on_expert
    load, unload = experts.load_lora_adapter, experts.unload_lora_adapter
    return (
        RouteRow(_GET, "/v1/experts", experts.list_experts, "experts"),
        RouteRow(
            _POST, "/v1/experts", experts.install_expert, "experts", InstallBody, takes_file=True
        ),
        RouteRow(_POST, one + ":{action}", act, "experts", documented=False),
        RouteRow(_POST, one + "/{action}", act, "experts"),
        RouteRow(_GET, one, experts.show_expert, "experts"),
        RouteRow(("PATCH",), one, experts.change_expert, "experts", ExpertPatch),
        RouteRow(("DELETE",), one, experts.delete_expert, "experts"),
        RouteRow(_POST, "/v1/load_lora_adapter", load, "experts", LoadLoraBody, _TEXT_PLAIN),
        RouteRow(_POST, "/v1/unload_lora_adapter", unload, "experts", UnloadLoraBody, _TEXT_PLAIN),
    )


def add_routes(app: FastAPI, rows: Sequence[RouteRow]) -> None:
    for row in rows:
        summary, _, _ = (row.endpoint.__doc__ or "").partition("\n")
        for method in row.methods:
            app.add_api_route(
                row.path,
                row.endpoint,
                methods=[method],
                summary=summary.rstrip("."),
                description="",
                tags=[row.tag],
                response_class=Response,
                operation_id=row.endpoint.__name__,
                openapi_extra=_extra(row),
                include_in_schema=row.documented and method == row.methods[0],
            )


def _extra(row: RouteRow) -> dict[str, Any]:
    answer = {"description": "The answer", "content": {row.media_type: {}}}
    if row.body is None:
        return {"responses": {"200": answer}}
    if row.tag in ("openai", "anthropic") and row.body is not CountBody:
        answer["content"] = {row.media_type: {}, "text/event-stream": {}}
    error = "AnthropicError" if row.tag == "anthropic" else "OpenAIError"
    refusal = {
        "description": "A typed error; docs/api.md lists status, type and code",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model=error)}}},
    }
    content: dict[str, Any] = {
        "application/json": {"schema": {"$ref": _REF.format(model=row.body.__name__)}}
    }
    if row.takes_file:
        content["application/octet-stream"] = {}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": {"200": answer, "4XX": refusal, "5XX": refusal},
    }


def described() -> Sequence[RouteRow]:
    """The rows without a server; nobody answers them."""
    return routes(
        Endpoints(
            OpenAIDialect(_NOBODY, 0),
            AnthropicDialect(_NOBODY, 0),
            NativeEndpoints(_NOBODY, 0),
            ExpertEndpoints(_NOBODY, 0, 0),
            InferEndpoints(_NOBODY, _NOBODY, 0),
        )
    )


def reference() -> dict[str, Any]:
    """The document without a server: only the endpoints' names and texts are read."""
    app, rows = FastAPI(), described()
    add_routes(app, rows)
    return document(app, rows)


def document(app: FastAPI, rows: Sequence[RouteRow]) -> dict[str, Any]:
    """The OpenAPI 3.1 document, the same for the same version."""
    document: dict[str, Any] = get_openapi(
        title="Coterie",
        version=__version__,
        summary="Many experts served as one model",
        routes=app.routes,
    )
    bodies = [row.body for row in rows if row.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components |= schemas["$defs"] | _ERRORS
    return document


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


_TEXT, _MAYBE = {"type": "string"}, {"type": ["string", "null"]}
_ERRORS = {
    "OpenAIError": _object(
        ["error"],
        error=_object(
            ["message", "type", "param", "code"],
            message=_TEXT,
            type=_TEXT,
            param=_MAYBE,
            code=_MAYBE,
        ),
    ),
    "AnthropicError": _object(
        ["type", "error", "request_id"],
        type={"const": "error"},
        error=_object(["type", "message"], type=_TEXT, message=_TEXT),
        request_id=_TEXT,
    ),
}
