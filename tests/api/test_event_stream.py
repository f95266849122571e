"""The stream itself, driven through ASGI: keepalives, late refusals, disconnects, slow clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from coterie.api.dialect import WholeAnswer
from coterie.api.door import ClientGone, Exchange
from coterie.api.openai.chat import ChatShape, ChatStream
from coterie.api.transport import sse
from coterie.api.transport.sse import Events, EventStream
from coterie.core.errors import CoterieError, DeadlineExceeded, Overloaded
from coterie.core.events import Delta, Failed, Finished, Started, Timings, Usage

DONE = Finished("i", ("length",), Usage(3, 1), Timings())


class Connection:
    """One client: what it was sent, and when it goes away."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("more_body") is False:
            # uvicorn reports a disconnect after the last byte
            self.gone.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def talk(events: Callable[[], Events], client: Callable[[Connection], Any] | None = None) -> Any:
    """Runs a stream to its end and returns the connection, with the error it raised if any."""

    async def run() -> tuple[Connection, Exception | None]:
        connection = Connection()
        stream = EventStream(
            events(), ChatStream(ChatShape("i", 0, "m", 1)), Exchange("req", "openai", 0.0)
        )
        other = asyncio.ensure_future(client(connection)) if client else None
        try:
            await stream({}, connection.receive, connection.send)
        except (CoterieError, ClientGone) as error:
            return connection, error
        finally:
            if other is not None:
                await other
        return connection, None

    return asyncio.run(run())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "COMMIT_S", 0.05)
    monkeypatch.setattr(sse, "KEEPALIVE_S", 0.04)


def test_a_refusal_is_raised_before_anything_is_sent() -> None:
    async def events() -> Events:
        raise Overloaded("full", retry_after_s=2)
        yield DONE

    connection, error = talk(events)
    assert isinstance(error, Overloaded) and connection.sent == []


def test_a_stream_that_was_read_to_its_end_is_not_a_client_that_left(quick: None) -> None:
    async def events() -> Events:
        yield Started("i", "r", 3, 0)
        # longer than it takes to begin to watch the connection
        await asyncio.sleep(0.1)
        yield Delta("i", 0, "a", (1,), None, "length")
        yield DONE

    connection, error = talk(events)
    assert error is None and connection.body.endswith(b"data: [DONE]\n\n")
    assert connection.sent[-1]["more_body"] is False


def test_a_deadline_before_the_first_token_is_a_refusal() -> None:
    async def events() -> Events:
        yield Delta("i", 0, "", (), None, "timeout")
        yield DONE

    connection, error = talk(events)
    assert isinstance(error, DeadlineExceeded) and connection.sent == []


def test_a_queued_request_is_kept_alive(quick: None) -> None:
    async def events() -> Events:
        await asyncio.sleep(0.25)
        yield Started("i", "r", 3, 0)
        yield Delta("i", 0, "a", (1,), None, "length")
        yield DONE

    connection, error = talk(events)
    assert error is None and connection.sent[0]["status"] == 200
    assert 2 <= connection.body.count(b": keepalive\n\n") <= 8
    assert connection.body.startswith(b": keepalive\n\ndata: ") or b"\n\ndata: " in connection.body
    assert connection.body.endswith(b"data: [DONE]\n\n")
    assert connection.sent[-1]["more_body"] is False


def test_a_late_refusal_is_a_frame(quick: None) -> None:
    async def events() -> Events:
        await asyncio.sleep(0.1)
        raise Overloaded("full", retry_after_s=2)
        yield DONE

    connection, error = talk(events)
    assert error is None and connection.sent[0]["status"] == 200
    assert b'data: {"error":' in connection.body and b"[DONE]" not in connection.body


@pytest.mark.parametrize("fault", [Failed("i", "worker_crashed", "twice"), ValueError("a prompt")])
def test_a_failure_midway_is_a_frame(fault: Any) -> None:
    async def events() -> Events:
        yield Started("i", "r", 3, 0)
        yield Delta("i", 0, "some words", (1,))
        if isinstance(fault, Exception):
            raise fault
        yield fault

    connection, error = talk(events)
    assert error is None
    assert b"some words" in connection.body and b"[DONE]" not in connection.body
    assert connection.body.count(b'{"error":') == 1
    assert b"a prompt" not in connection.body


@pytest.mark.parametrize("after", [0, 3], ids=["while it waits", "midway"])
def test_a_client_that_leaves_closes_the_source(after: int) -> None:
    closed: list[bool] = []

    async def events() -> Events:
        try:
            for index in range(after):
                yield Delta("i", 0, str(index), (1,))
            await asyncio.sleep(60)
            yield DONE
        finally:
            closed.append(True)

    async def client(connection: Connection) -> None:
        await asyncio.sleep(0.05)
        connection.gone.set()

    _, error = talk(events, client)
    assert isinstance(error, ClientGone) and closed == [True]


@pytest.mark.parametrize(("leaves", "cancelled"), [(True, False), (False, True), (True, True)])
def test_a_whole_answer_that_is_given_up_is_closed(leaves: bool, cancelled: bool) -> None:
    """By a client that leaves, by a server that ends, or by both at once: the server's word counts,
    and the answer's events are closed before anything is raised."""
    closed: list[str] = []

    async def endless() -> Events:
        try:
            yield Started("i", "r", 3, 0)
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            closed.append("i")

    async def run() -> None:
        connection = Connection()
        answer = WholeAnswer(endless(), 1, lambda _: b"{}", Exchange("req", "openai", 0.0))
        task = asyncio.ensure_future(answer({}, connection.receive, connection.send))
        await asyncio.sleep(0.01)
        if leaves:
            connection.gone.set()
            # the watcher ends, and its callback cancels
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if cancelled:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ClientGone):
            await task
        assert closed == ["i"] and not connection.sent

    asyncio.run(run())
