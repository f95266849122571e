"""Whole bodies and answers: taken and sent in one step, with the bytes and the state of uvicorn."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from coterie.api.transport.whole import send_whole, whole_body

DATE = (b"date", b"Mon, 16 Nov 2026 12:00:00 GMT")


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data, self.num_writes, self.is_closed = b"", 0, False

    def write(self, data: bytes) -> None:
        self.data += data
        self.num_writes += 1

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def cycle_of(wire: Any, method: str, keep_alive: bool, ended: list[int]) -> Any:
    logger = logging.getLogger("test")
    return RequestResponseCycle(
        scope={"type": "http", "method": method},  # type: ignore[typeddict-item]
        transport=wire,
        flow=FlowControl(wire),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[DATE],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: ended.append(1),
    )


def state(cycle: Any) -> tuple[Any, ...]:
    return (
        cycle.response_started,
        cycle.response_complete,
        cycle.chunked_encoding,
        cycle.expected_content_length,
        cycle.keep_alive,
        cycle.message_event.is_set(),
    )


async def both(
    method: str, keep_alive: bool, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> Wire:
    wires, ends = (Wire(), Wire()), (list[int](), list[int]())
    cycles = [
        cycle_of(wire, method, keep_alive, end) for wire, end in zip(wires, ends, strict=True)
    ]
    await send_whole(cycles[0].send, status, headers, body)
    length = (b"content-length", str(len(body)).encode())
    await cycles[1].send(
        {"type": "http.response.start", "status": status, "headers": [length, *headers]}
    )
    await cycles[1].send({"type": "http.response.body", "body": body, "more_body": False})
    states = [state(cycle) for cycle in cycles]
    assert wires[0].data == wires[1].data
    assert wires[0].is_closed == wires[1].is_closed
    assert states[0] == states[1]
    assert ends[0] == ends[1] == [1]
    return wires[0]


def test_one_write_has_the_bytes_of_two() -> None:
    rng = random.Random()
    for _ in range(50):
        count, size = rng.randrange(8), rng.choice((0, 1, 900, 70_000))
        headers = [(b"x-%d" % n, rng.randbytes(6).hex().encode()) for n in range(count)]
        wire = asyncio.run(
            both("POST", rng.random() < 0.5, rng.choice((200, 404, 529)), headers, bytes(size))
        )
        assert wire.num_writes == 1


@pytest.mark.parametrize("header", [(b"connection", b"close"), (b"X-Capital", b"b")])
def test_what_is_not_simple_is_left_to_the_server(header: tuple[bytes, bytes]) -> None:
    assert asyncio.run(both("POST", True, 200, [header], b"body")).num_writes == 2


def test_an_answer_to_head_has_no_body() -> None:
    assert asyncio.run(both("HEAD", True, 200, [], b"body")).data.endswith(b"\r\n\r\n")


def test_a_header_with_a_line_break_is_refused() -> None:
    with pytest.raises(RuntimeError, match="header value"):
        asyncio.run(both("POST", True, 200, [(b"a", b"b\r\nc: d")], b"body"))


def test_a_body_that_is_there_is_what_the_server_receives() -> None:
    async def received() -> None:
        cycles = [cycle_of(Wire(), "POST", True, []) for _ in range(2)]
        for cycle in cycles:
            # nothing has arrived yet, then a part, then the rest
            assert whole_body(cycle.receive) is None
            cycle.body += b"some"
            cycle.message_event.set()
            assert whole_body(cycle.receive) is None
            cycle.body += b" text"
            cycle.more_body = False
        message = await cycles[0].receive()
        assert message["type"] == "http.request" and not message["more_body"]
        assert whole_body(cycles[1].receive) == message["body"] == b"some text"
        assert state(cycles[0]) == state(cycles[1])
        # it was taken
        assert whole_body(cycles[1].receive) is None
        cycles[1].disconnected = True
        cycles[1].message_event.set()
        assert whole_body(cycles[1].receive) is None

    asyncio.run(received())


def test_a_caller_that_waits_for_permission_gets_it() -> None:
    async def received() -> None:
        cycle = cycle_of(Wire(), "POST", True, [])
        cycle.more_body, cycle.waiting_for_100_continue = False, True
        cycle.message_event.set()
        assert whole_body(cycle.receive) is None

    asyncio.run(received())
