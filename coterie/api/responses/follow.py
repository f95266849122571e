"""The events of a response that is kept, or of one that runs in the background until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.api.door import Exchange, log_fault
from coterie.api.openai.render import KEEPALIVE
from coterie.api.responses.render import (
    IN_PROGRESS,
    QUEUED,
    EventFrames,
    ResponseFields,
    error_fields,
    replayed,
)
from coterie.api.transport.sse import KEEPALIVE_S, WhileConnected
from coterie.core.errors import CoterieError, InternalError
from coterie.core.job import Job
from coterie.service.jobs.service import Progress

Find = Callable[[], Coroutine[Any, Any, ResponseFields]]
Follow = Callable[[], AsyncGenerator[Progress, None]]


class BackgroundEvents(Response):
    """Sends the first events at once and all others when the response has ended, with comments in
    between. Event N of a response is always the same, so that a client can continue after N."""

    media_type = "text/event-stream"

    def __init__(
        self,
        response: ResponseFields,
        find: Find,
        follow: Follow,
        starting_after: int | None,
        exchange: Exchange,
    ) -> None:
        """`response` as it is now; `find` reads it again, `follow` yields the progress of its
        job."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # the body's length is not known
        del self.headers["content-length"]
        self.response, self.find, self.follow = response, find, follow
        self.next = 0 if starting_after is None else starting_after + 1
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with WhileConnected(receive):
            await self._run(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, send: Send) -> None:
        try:
            if self.response["status"] in (QUEUED, IN_PROGRESS):
                await self._write(send, self._first())
                await self._wait(send)
                self.response = await self.find()
            await self._write(send, self._all())
        except CoterieError as error:
            await self._failed(send, error)
        except Exception as error:
            log_fault(error, self.exchange.request_id)
            await self._failed(send, InternalError("the server failed to tell the events"))

    def _all(self) -> list[bytes]:
        frames = b"".join(replayed(self.response, bool(self.response.get("background"))))
        return [frame + b"\n\n" for frame in frames.split(b"\n\n")[:-1]]

    def _first(self) -> list[bytes]:
        """The events that are known before a response has ended."""
        return self._all()[:2]

    async def _write(self, send: Send, frames: Sequence[bytes]) -> None:
        """Send those of all `frames` from the first on that were not sent."""
        new = b"".join(frames[self.next :])
        self.next = max(self.next, len(frames))
        if new:
            await _send(send, new)

    async def _wait(self, send: Send) -> None:
        """Until the job has ended."""
        async with aclosing(self.follow()) as progress:
            coming: asyncio.Future[Progress] | None = None
            try:
                while True:
                    coming = coming or asyncio.ensure_future(anext(progress))
                    await asyncio.wait({coming}, timeout=KEEPALIVE_S)
                    if not coming.done():
                        await _send(send, KEEPALIVE)
                        continue
                    item, coming = coming.result(), None
                    if isinstance(item, Job):
                        return
            finally:
                if coming is not None:
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)

    async def _failed(self, send: Send, error: CoterieError) -> None:
        """The response may still end well; only this stream has failed."""
        frames = EventFrames()
        frames.number = self.next
        await _send(send, frames.event("error", **error_fields(error), param=error.param))


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
