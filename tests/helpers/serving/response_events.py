"""Events of the Responses API, checked against the openai package's own types."""

from __future__ import annotations

from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent

from tests.helpers.serving.server_process import Reply, frames


def _kinds() -> dict[str, Any]:
    """The package's class for each type of event."""
    union = get_args(ResponseStreamEvent)[0]
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(union)}


KINDS = _kinds()
BEGIN = ["response.created", "response.in_progress"]
MESSAGE = ["response.output_item.added", "response.content_part.added"]
MESSAGE_END = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def checked_events(reply: Reply) -> list[Any]:
    """All events of a stream as the package's values. Every field that the types require is there,
    every literal is one they know, the numbers have no gap."""
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = frames(reply.body)
    assert all(name == data["type"] for name, data in found)
    numbers = [data["sequence_number"] for _, data in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return [KINDS[data["type"]].model_validate(data, strict=True) for _, data in found]


def checked_response(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    return Response.model_validate(reply.json)


def kinds_of(events: list[Any]) -> list[str]:
    """Types in order; neighbours of one type once."""
    kinds = [event.type for event in events]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
