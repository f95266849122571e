"""Makes the OpenAPI 3.1 document from the route table.

Every status that a route can answer is declared, and every JSON body has a schema: SDK types are
generated from it, and the fuzz tests check the server against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.api.answer_types import ExpertPlan
from coterie.api.door import reads_any_type
from coterie.api.transport.sse import NDJSON
from coterie.core.events import InferenceMetrics, InferenceResult, ValidationResult
from coterie.core.plan import AdapterChoice, Candidate, ClassifierInput, RouteTrace

JSON, SSE = "application/json", "text/event-stream"
_TEMPLATE = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_WHY = {
    400: "A field is wrong; the error names it",
    401: "No key, or a wrong one",
    403: "Not allowed with this key, or for pages of this origin",
    404: "No such model, expert or job",
    409: "Done already",
    413: "The body is too large",
    415: "The body does not say that it is JSON, or a form where one is wanted",
    421: "Sent to a host name that is not this server's",
    429: "The queue is full, or the user's rate is spent; Retry-After says when to come again",
    500: "The server failed",
    503: "Models still load, or no worker is healthy; Retry-After says when to come again",
    504: "The deadline passed before the first token",
    529: "Models still load, or no worker is healthy; Retry-After says when to come again",
}


# all fields of these types are always written, also fields with a default
_WHOLE = (
    AdapterChoice,
    Candidate,
    InferenceMetrics,
    InferenceResult,
    RouteTrace,
    ValidationResult,
)
# a segment of a path is never empty
_SEGMENT: dict[str, Any] = {"type": "string", "minLength": 1}
_SEGMENTS = {"action": {"enum": ["pin", "unpin", "rollback"]}}


@dataclass(frozen=True, slots=True)
class RouteReplies:
    """The answers of a route."""

    # bodies with `status`; several if they depend on the caller's dialect
    answers: tuple[type[Any], ...] = ()
    refusals: tuple[int, ...] = ()
    status: int = 200
    # for an answer that is not JSON
    media_type: str = ""
    # name of a stream's event -> its data; empty = as the vendor defines it
    events: Mapping[str, type[Any]] | None = None
    # a stream of JSON objects, one on each line
    lines: type[Any] | None = None
    # other statuses that are not errors
    also: Mapping[int, type[Any] | None] = field(default_factory=dict)


def document(rows: Sequence[RouteRow]) -> dict[str, Any]:
    """The document; always the same for the same version."""
    paths: dict[str, Any] = {}
    for row in rows:
        if row.documented:
            path = paths.setdefault(_PARAMETER.sub(r"{\1}", row.path), {})
            # HEAD is GET without the body: it is not documented
            for method in (name for name in row.methods if name != "HEAD"):
                path[method.lower()] = _operation(row, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Coterie",
            "summary": "Many experts served as one model",
            "version": __version__,
        },
        "paths": paths,
        "components": {"schemas": _schemas(rows), "securitySchemes": _SECURITY},
    }


def _operation(row: RouteRow, method: str) -> dict[str, Any]:
    summary, _, _ = (row.endpoint.__doc__ or "").partition("\n")
    name = row.endpoint.__name__
    operation: dict[str, Any] = {
        "tags": [row.tag],
        "summary": summary.rstrip("."),
        "operationId": name if method == row.methods[0] else f"{name}_{method.lower()}",
        "security": _security(row),
    }
    parameters = [*_path_parameters(row), *_query_parameters(row), *_header_parameters(row)]
    if parameters:
        operation["parameters"] = parameters
    if row.body is not None:
        content: dict[str, Any] = {JSON: {"schema": _ref(row.body)}}
        if row.takes_file:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    if row.form is not None:
        form = {"multipart/form-data": {"schema": _ref(row.form)}}
        operation["requestBody"] = {"required": True, "content": form}
    operation["responses"] = _responses(row)
    return operation


def _security(row: RouteRow) -> list[dict[str, list[str]]]:
    if row.tag == "experts":
        return [{"admin": []}]
    # a key is optional, because a server without a key file needs none
    return [] if 401 not in row.replies.refusals else [{"bearer": []}, {"key": []}, {}]


def _path_parameters(row: RouteRow) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _SEGMENTS.get(name, _SEGMENT)}
        for name in _PARAMETER.findall(row.path)
    ]


def _query_parameters(row: RouteRow) -> list[dict[str, Any]]:
    if row.query is None:
        return []
    schema = row.query.model_json_schema()
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "schema": {key: value for key, value in _given(field).items() if key != "title"},
        }
        for name, field in schema["properties"].items()
    ]


def _given(field: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without null: null is only the default of a parameter that is left out."""
    for choice in field.get("anyOf", ()):
        if choice != {"type": "null"}:
            return {**choice, **{key: field[key] for key in ("description",) if key in field}}
    return field


def _header_parameters(row: RouteRow) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "schema": schema}
        for name, schema in row.headers.items()
    ]


def _responses(row: RouteRow) -> dict[str, Any]:
    replies = row.replies
    responses = {str(replies.status): {"description": "The answer", **_content(replies)}}
    for status, kind in replies.also.items():
        schema = {} if kind is None else {"content": {JSON: {"schema": _ref(kind)}}}
        responses[str(status)] = {"description": _ALSO[status], **schema}
    for status in _refusals(row):
        responses[str(status)] = _refusal(status, _ERROR_NAMES.get(row.tag, "OpenAIError"))
    return responses


def _refusals(row: RouteRow) -> list[int]:
    """The error statuses of the row, and those of the door before it."""
    given = set(row.replies.refusals)
    if 401 in given:
        given |= {403, 421}
    if row.body is not None and not reads_any_type(row.path):
        given.add(415)
    return sorted(given)


def _content(replies: RouteReplies) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if replies.answers:
        schemas = [_ref(answer) for answer in replies.answers]
        content[JSON] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    if replies.media_type:
        content[replies.media_type] = {"schema": {"type": "string"}}
    if replies.events is not None:
        content[SSE] = {"schema": _event(replies.events)}
    if replies.lines is not None:
        content[NDJSON] = {"schema": _ref(replies.lines)}
    return {"content": content} if content else {}


def _event(events: Mapping[str, type[Any]]) -> dict[str, Any]:
    """One server-sent event; its data is JSON as text."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON}
    if not events:
        return _object(["data"], data=data)
    kinds = {name: _ref(kind) for name, kind in events.items()}
    kinds["error"] = {"$ref": _TEMPLATE.format(model="OpenAIError")}
    choices = [
        _object(["event", "data"], event={"const": name}, data=data | {"contentSchema": schema})
        for name, schema in kinds.items()
    ]
    return {"oneOf": choices}


# by the tag of a route; OpenAI's for all others
_ERROR_NAMES = {"anthropic": "AnthropicError", "ollama": "OllamaError"}
_ALSO = {202: "Accepted: the job is answered later", 503: "Not now"}


def _refusal(status: int, name: str) -> dict[str, Any]:
    schema = {"$ref": _TEMPLATE.format(model=name)}
    refusal: dict[str, Any] = {"description": _WHY[status], "content": {JSON: {"schema": schema}}}
    if status == 429:
        seconds = {"description": "Seconds", "schema": {"type": "integer"}}
        refusal["headers"] = {"Retry-After": seconds}
    return refusal


def _ref(kind: type[Any]) -> dict[str, Any]:
    return {"$ref": _TEMPLATE.format(model=kind.__name__)}


def _schemas(rows: Sequence[RouteRow]) -> dict[str, Any]:
    given = [kind for row in rows for kind in (row.body, row.form)]
    bodies = dict.fromkeys(kind for kind in given if kind is not None)
    answers = dict.fromkeys(kind for row in rows for kind in _written(row.replies))
    adapters: list[Any] = [(kind, "validation", TypeAdapter(kind)) for kind in bodies]
    adapters += [(kind, "serialization", TypeAdapter(kind)) for kind in answers]
    _, made = TypeAdapter.json_schemas(adapters, ref_template=_TEMPLATE)
    schemas: dict[str, Any] = made["$defs"]
    # what callers are not shown
    schemas.pop(ClassifierInput.__name__)
    del schemas[RouteTrace.__name__]["properties"]["classified"]
    for kind in _WHOLE:
        schema = schemas[kind.__name__]
        schema["required"] = list(schema["properties"])
    result = schemas[InferenceResult.__name__]
    result["required"].remove("plan")
    result["properties"]["plan"] = _ref(ExpertPlan)
    return dict(sorted((schemas | _ERRORS).items()))


def _written(replies: RouteReplies) -> list[type[Any]]:
    kinds = (*replies.answers, *(replies.events or {}).values(), *replies.also.values())
    return [kind for kind in kinds if kind is not None]


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
    "OllamaError": _object(["error"], error=_TEXT),
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "admin": {"type": "http", "scheme": "bearer", "description": "A key of the admin key file."},
}


Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class RouteRow:
    methods: tuple[str, ...]
    path: str
    endpoint: Endpoint
    tag: str
    replies: RouteReplies
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    # name -> schema, for request headers that the route reads
    headers: Mapping[str, Any] = field(default_factory=dict)
    # False for a second path of the same route
    documented: bool = True
    # the body may also be the bytes of a file
    takes_file: bool = False
    # the body is a multipart form, not JSON
    form: type[BaseModel] | None = None
