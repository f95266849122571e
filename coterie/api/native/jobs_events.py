"""A job's events as server-sent frames: started, delta, finished or error, with keepalives.

Leaving the stream leaves the job alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.api.exchange import Exchange, log_fault
from coterie.api.native.infer_answer import (
    DELTA,
    ERROR,
    FINISHED,
    STARTED,
    Frame,
    answer_fields,
    error_fields,
    sse,
    started_fields,
)
from coterie.api.transport.sse import KEEPALIVE_S, while_connected
from coterie.core.errors import CoterieError, InternalError, InvalidRequest, from_code
from coterie.core.job import CANCELLED, Job
from coterie.core.plan import RoutePlan
from coterie.service.jobs.service import Progress

KEEPALIVE = b": keepalive\n\n"


class JobEvents(Response):
    media_type = "text/event-stream"

    def __init__(
        self, progress: AsyncGenerator[Progress, None], job_id: str, exchange: Exchange
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # the body's length is not known
        del self.headers["content-length"]
        self.progress = progress
        self.job_id = job_id
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._run(send))
        finally:
            await self.progress.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, send: Send) -> None:
        coming: asyncio.Future[Progress] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(self.progress))
                await asyncio.wait({coming}, timeout=KEEPALIVE_S)
                if not coming.done():
                    await _write(send, KEEPALIVE)
                    continue
                item, coming = coming.result(), None
                await _write(send, sse(*frame_of(self.job_id, item)))
                if isinstance(item, Job):
                    return
        except CoterieError as error:
            await _write(send, self._error(error))
        except Exception as error:
            log_fault(error, self.exchange.request_id)
            await _write(send, self._error(InternalError("the server failed to tell the events")))
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    def _error(self, error: CoterieError) -> bytes:
        return sse(ERROR, error_fields(error))


def frame_of(job_id: str, item: Progress) -> Frame:
    """What `item` says to whoever follows; raises what a job without a result ended with."""
    if isinstance(item, str):
        return DELTA, {"text": item}
    if isinstance(item, RoutePlan):
        return STARTED, started_fields(job_id, item)
    if item.result is not None:
        return FINISHED, answer_fields(item.result)
    if item.status == CANCELLED:
        raise InvalidRequest("the job was cancelled")
    assert item.error is not None, "a job that failed says why"
    raise from_code(item.error.code, item.error.message)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
