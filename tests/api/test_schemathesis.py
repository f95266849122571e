"""The OpenAPI document against the server: no 5xx, every status and body as declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from schemathesis import checks
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig

from coterie.api.routes import reference
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, own_home

SEED = 20261115
# a caller's own deadline is the one thing that may end in a 5xx; it has tests of its own
DEADLINE = "x-deadline-ms"
# longer answers say nothing more
MAX_TOKENS = 3
GENERATING = ("/v1/infer", "/v1/chat/completions", "/v1/completions", "/v1/messages")


def document(max_examples: int, *, coverage: bool) -> Any:
    settings = {
        "seed": SEED,
        "generation": {"max-examples": max_examples},
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
    body = case.body
    if not isinstance(body, dict):
        return
    model = body.get("model")
    if isinstance(model, str) and 0 < len(model) <= 512:
        body["model"] = "tiny"
    if case.operation.path in GENERATING:
        limit = body.get("max_tokens")
        may_be_left_out = case.operation.path != "/v1/messages"
        if (limit is None and may_be_left_out) or (
            isinstance(limit, int) and MAX_TOKENS < limit <= 200_000
        ):
            body["max_tokens"] = MAX_TOKENS


SLICE, WHOLE = document(2, coverage=False), document(100, coverage=True)
CHECKS = wanted()
ADMIN = "key-of-the-fuzzer"


@pytest.fixture(scope="module")
def admin_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose experts may be changed by what the fuzzer makes up."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "admins.txt").write_text(f"{ADMIN}\n")
    served = Served(
        str(tiny_checkpoint("llama")),
        *("--name", "tiny", "--admin-key-file", str(folder / "admins.txt"), "--allow-unsigned"),
        COTERIE_HOME=str(own_home(folder / "home")),
    )
    yield served
    served.stop()


@SLICE.parametrize()
def test_a_slice_of_what_can_be_sent(case: Any, server: Served) -> None:
    tame(case)
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)


@pytest.mark.full
@WHOLE.parametrize()
def test_whatever_can_be_sent(case: Any, admin_server: Served) -> None:
    tame(case)
    keys = {"authorization": f"Bearer {ADMIN}"}
    case.call_and_validate(base_url=admin_server.url, checks=CHECKS, headers=keys, timeout=60)
    assert admin_server.process.poll() is None
