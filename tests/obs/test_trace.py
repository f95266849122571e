"""obs/log.py: lines are JSON, and nothing a caller sent can reach them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from coterie.core.errors import InvalidRequest
from coterie.obs.log import configure, log


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    captured = io.StringIO()
    configure("info", captured)
    yield captured
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_fields_and_request_id(stream: io.StringIO) -> None:
    log("request_finished", request_id="r-1", prompt_tokens=3, code=None)
    log("quiet", level="debug", request_id="r-2")
    logging.getLogger("uvicorn.error").warning("line\nbreak")
    first, second = lines(stream)
    assert first["event"] == "request_finished" and first["level"] == "info"
    assert first["request_id"] == "r-1" and first["prompt_tokens"] == 3 and "code" not in first
    assert second["logger"] == "uvicorn.error" and second["event"] == "line\nbreak"


@pytest.mark.parametrize("name", ["prompt", "messages", "text", "authorization", "api_key"])
def test_there_is_no_field_for_prompts_or_keys(stream: io.StringIO, name: str) -> None:
    with pytest.raises(ValueError, match="not a log field"):
        fields: dict[str, Any] = {name: "secret"}
        log("x", **fields)
    assert stream.getvalue() == ""


def test_tracebacks_do_not_quote_the_request(stream: io.StringIO) -> None:
    try:
        raise InvalidRequest("messages[0] is 'my secret prompt'")
    except InvalidRequest as error:
        log("refused", level="error", error=error, request_id="r-3")
    assert "secret" not in stream.getvalue()
    (line,) = lines(stream)
    assert line["error"]["type"] == "InvalidRequest"
    assert line["error"]["code"] == "invalid_request"
    assert any("test_tracebacks" in frame for frame in line["error"]["frames"])
