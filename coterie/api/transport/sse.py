"""Streams of encoded frames, and answers that are cancelled when their client disconnects.

An error before the first event gets its HTTP status; an error after it becomes a frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.api.door import ClientGone, Exchange, log_fault
from coterie.core.errors import CoterieError, DeadlineExceeded, InternalError, from_code
from coterie.core.events import Delta, Event, Failed, Finished

# how long to wait for an error that could still get an HTTP status; then the headers are sent
COMMIT_S = 2.0
KEEPALIVE_S = 5.0
# from then on it is noticed at once that a client has disconnected
WATCH_AFTER_S = 0.01

NDJSON = "application/x-ndjson"

Events = AsyncGenerator[Event, None]


class StreamRenderer(Protocol):
    """Turns the events of one request into the frames of one dialect."""

    keepalive: bytes

    def render(self, event: Event) -> bytes:
        """The frames of an event; empty if there are none."""

    def error(self, error: CoterieError) -> bytes:
        """The last frame of a stream that failed."""


class WhileConnected:
    """Cancels the `with` block when the client disconnects, and raises ClientGone."""

    __slots__ = ("_is_gone", "_receive", "_starting", "_task", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_gone = False
        self._watcher: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        # a task for an answer that comes at once would take longer than the answer
        loop = asyncio.get_running_loop()
        self._starting = loop.call_later(WATCH_AFTER_S, self._watch)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._starting.cancel()
        watcher = self._watcher
        if watcher is not None:
            watcher.remove_done_callback(self._cancel)
            await _end(watcher)
        if not self._is_gone or not (kind is None or issubclass(kind, asyncio.CancelledError)):
            return
        # the task may also have been cancelled by other code
        if self._task.uncancel():
            raise asyncio.CancelledError
        raise ClientGone

    def _watch(self) -> None:
        self._watcher = asyncio.ensure_future(_disconnect(self._receive))
        self._watcher.add_done_callback(self._cancel)

    def _cancel(self, _: asyncio.Future[None]) -> None:
        self._is_gone = True
        self._task.cancel()


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """A `text/event-stream` response of a pipeline's events; closing it closes them."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, renderer: StreamRenderer, exchange: Exchange) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type=self.media_type,
        )
        # the body's length is not known
        del self.headers["content-length"]
        self.events = events
        self.renderer = renderer
        self.exchange = exchange
        # loop time of the last frame; 0, so that a queued request gets its first keepalive at once
        self.last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with WhileConnected(receive):
                write = await self._run(send)
            # outside: after its last byte a connection counts as disconnected
            await write({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()

    async def _run(self, send: Send) -> Send:
        """Sends everything but the end; returns the function that sends."""
        first = asyncio.ensure_future(anext(self.events))
        beat: asyncio.Future[None] | None = None
        try:
            await asyncio.wait({first}, timeout=COMMIT_S)
            if first.done():
                refuse(first.result())
                self.exchange.headers["x-coterie-queue-ms"] = f"{self.exchange.elapsed_ms():.0f}"
                self.last_sent = asyncio.get_running_loop().time()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # bypass the middleware: it only needs the start of a response
            write = self.exchange.send or send
            beat = asyncio.ensure_future(self._keep_alive(write))
            await self._forward(first, write)
            return write
        finally:
            if beat is not None:
                await _end(beat)
            await _end(first)

    async def _forward(self, first: asyncio.Future[Event], send: Send) -> None:
        render, now = self.renderer.render, asyncio.get_running_loop().time
        try:
            event = await first
            refuse(event)
            await self._write(render(event), send)
            if self._ends(event):
                return
            async for event in self.events:
                frames = render(event)
                if frames:
                    self.last_sent = now()
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                if type(event) is not Delta and self._ends(event):
                    return
        except Exception as error:
            await self._write(self.renderer.error(self._typed(error)), send)

    async def _write(self, frames: bytes, send: Send) -> None:
        if frames:
            self.last_sent = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": frames, "more_body": True})

    def _ends(self, event: Event) -> bool:
        if isinstance(event, Failed):
            raise from_code(event.code, event.message, retry_after_s=event.retry_after_s)
        if isinstance(event, Finished):
            self.exchange.prompt_tokens = event.usage.prompt_tokens
            self.exchange.completion_tokens = event.usage.completion_tokens
            return True
        return False

    def _typed(self, error: Exception) -> CoterieError:
        if isinstance(error, CoterieError):
            return error
        log_fault(error, self.exchange.request_id)
        return InternalError("the server failed in the middle of the answer")

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            quiet_s = loop.time() - self.last_sent
            if quiet_s >= KEEPALIVE_S:
                await self._write(self.renderer.keepalive, send)
                quiet_s = 0.0
            await asyncio.sleep(KEEPALIVE_S - quiet_s)


class LineStream(EventStream):
    """The same as JSON objects, one on each line."""

    media_type = NDJSON


def refuse(event: Event) -> None:
    """Raises the error if the first event is the failure of a request that never ran."""
    if isinstance(event, Failed):
        raise from_code(event.code, event.message, retry_after_s=event.retry_after_s)
    if isinstance(event, Delta) and event.finish_reason == "timeout" and not event.token_ids:
        raise DeadlineExceeded("the deadline passed before the first token")
