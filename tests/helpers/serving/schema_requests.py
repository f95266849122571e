"""Requests made up from the OpenAPI document, and what is checked of their answers."""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import checks
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig

from coterie.api.routes import reference

SEED = 20261115
# a caller's own deadline is the one thing that may end in a 5xx; it has tests of its own
DEADLINE = "x-deadline-ms"
# longer answers say nothing more
MAX_TOKENS = 3
EVENTS = "/v1/dashboard/events"
REFUSALS = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429"]
# path -> the field that limits the answer
GENERATING = {
    "/v1/infer": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}


def document(max_examples: int, *, coverage: bool) -> Any:
    settings = {
        "seed": SEED,
        "generation": {"max-examples": max_examples},
        # the library's own list without 5xx, and 413: a body may be too large before its schema is
        # looked at
        "checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}},
        "phases": {
            "examples": {"enabled": False},
            "coverage": {"enabled": coverage},
            "stateful": {"enabled": False},
        },
    }
    return schemathesis.openapi.from_dict(
        reference(), config=SchemathesisConfig.from_dict(settings)
    )


def wanted() -> list[Any]:
    """Everything but what no schema can say: rules between fields, and the server's keys."""
    load_all_checks()
    names = (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
    )
    return checks.CHECKS.get_by_names(list(names))


def tame(case: Any) -> None:
    """Names that exist and short answers; what is out of its range stays so."""
    if case.headers is not None:
        case.headers.pop(DEADLINE, None)
    if case.operation.path == EVENTS:
        # a stream would not end
        case.query = (case.query or {}) | {"once": "true"}
    body = case.body
    if not isinstance(body, dict):
        return
    model = body.get("model")
    if isinstance(model, str) and 0 < len(model) <= 512:
        body["model"] = "tiny"
    if case.operation.path in GENERATING:
        field = GENERATING[case.operation.path]
        limit = body.get(field)
        may_be_left_out = case.operation.path != "/v1/messages"
        if (limit is None and may_be_left_out) or (
            isinstance(limit, int) and MAX_TOKENS < limit <= 200_000
        ):
            body[field] = MAX_TOKENS
