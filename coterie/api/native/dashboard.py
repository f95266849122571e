"""The dashboard: its page, and the one stream that keeps it up to date.

What the page shows comes from `/v1/dashboard/events`, which asks for a key as other endpoints do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie import __version__
from coterie.api.auth import ADMIN_TENANT, AccessKeys
from coterie.api.body import QueryParameters, query_of
from coterie.api.door import exchange_of
from coterie.api.errors import encode
from coterie.api.native.page_files import PAGE_HEADERS, PageFiles
from coterie.api.transport.sse import WhileConnected
from coterie.core.errors import CoterieError
from coterie.service.dashboard.feed import INTERVAL_S, DashboardFeed, DashboardListener


class EventsQuery(QueryParameters):
    once: bool = Field(False, description="One whole snapshot instead of a stream.")


class DashboardEndpoints:
    def __init__(self, feed: DashboardFeed, keys: AccessKeys, files: PageFiles) -> None:
        self.feed, self.keys, self.files = feed, keys, files

    async def dashboard(self, request: Request) -> Response:
        """The dashboard, for a browser."""
        return self.files.response("index.html", request)

    async def dashboard_folder(self, request: Request) -> Response:
        """The page's links are relative to the path without a slash."""
        headers = dict(PAGE_HEADERS) | {"location": "../dashboard"}
        return Response(status_code=308, headers=headers)

    async def dashboard_file(self, request: Request) -> Response:
        """A file of the dashboard's page."""
        return self.files.response(request.path_params["file"], request)

    async def dashboard_events(self, request: Request) -> Response:
        """Follow the state of the server: your own requests, or with an admin key those of all."""
        query = query_of(request, EventsQuery)
        tenant = exchange_of(request.scope).tenant
        has_keys = self.keys.callers is not None or self.keys.admins is not None
        is_operator = tenant == ADMIN_TENANT or not has_keys
        seen = None if is_operator else tenant
        hello = {
            "view": "operator" if tenant == ADMIN_TENANT else "tenant" if has_keys else "local",
            "controls": tenant == ADMIN_TENANT,
            "has_admins": self.keys.admins is not None,
            "asks_key": self.keys.callers is not None,
            "version": __version__,
            "interval_s": INTERVAL_S,
        }
        head = b"event: hello\ndata: " + encode(hello) + b"\n\n"
        if query.once:
            frame = head + await self.feed.once(seen)
            return Response(frame, headers={"cache-control": "no-store"}, media_type=_SSE)
        rings = self.keys.callers, self.keys.admins
        path, headers = request.scope["path"], request.scope["headers"]

        def may_stay() -> bool:
            """Whether the key means the same as when the stream began."""
            if rings == (self.keys.callers, self.keys.admins):
                return True
            try:
                return self.keys.tenant(path, headers) == tenant
            except CoterieError:
                return False

        return DashboardEvents(self.feed, self.feed.listen(seen, may_stay), head)


_SSE = "text/event-stream"


class DashboardEvents(Response):
    """The stream of one listener."""

    media_type = _SSE

    def __init__(self, feed: DashboardFeed, listener: DashboardListener, head: bytes) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        # the body's length is not known
        del self.headers["content-length"]
        self.feed, self.listener, self.head = feed, listener, head
        self.frames: AsyncGenerator[bytes, None] = feed.frames(listener)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # bypass the middleware: it only needs the start of a response
        write = exchange_of(scope).send or send
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with WhileConnected(receive):
                await _write(write, self.head)
                async for frame in self.frames:
                    await _write(write, frame)
            await write({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.frames.aclose()
            # a stream that was closed before its first frame
            self.feed.leave(self.listener)


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
