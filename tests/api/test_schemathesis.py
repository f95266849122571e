"""A slice of the OpenAPI document against the server: no 5xx, every status and body as declared."""

from __future__ import annotations

from typing import Any

from tests.helpers.serving.schema_requests import document, tame, wanted
from tests.helpers.serving.server_process import Served

SLICE = document(2, coverage=False)
CHECKS = wanted()


@SLICE.parametrize()
def test_a_slice_of_what_can_be_sent(case: Any, server: Served) -> None:
    tame(case)
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)
