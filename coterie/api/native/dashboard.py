"""The dashboard: its page, and the one stream that keeps it up to date.

The page is a few files of the package, read once at start, that need no key: they hold nothing.
What they show comes from `/v1/dashboard/events`, which asks for a key as other endpoints do.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie import __version__
from coterie.api.auth import ADMIN_TENANT, AccessKeys
from coterie.api.body import QueryParameters, query_of
from coterie.api.door import exchange_of
from coterie.api.errors import encode
from coterie.api.transport.sse import WhileConnected
from coterie.core.errors import CoterieError, NotFound
from coterie.service.dashboard.feed import INTERVAL_S, DashboardFeed, DashboardListener

FOLDER = Path(__file__).parents[2] / "dashboard"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# what the page may do: its own files, and questions to this server
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # always ask whether the file has changed: a new server may run under the same address
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


class EventsQuery(QueryParameters):
    once: bool = Field(False, description="One whole snapshot instead of a stream.")


@dataclass(frozen=True, slots=True)
class PageFile:
    media_type: str
    plain: bytes
    packed: bytes
    etag: str


def read_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """The files of the page by name."""
    found: dict[str, PageFile] = {}
    for path in sorted(folder.iterdir()):
        media_type = _TYPES.get(path.suffix)
        if media_type is not None:
            data = path.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            packed = gzip.compress(data, mtime=0)
            found[path.name] = PageFile(media_type, data, packed, etag)
    return found


class DashboardEndpoints:
    def __init__(self, feed: DashboardFeed, keys: AccessKeys, page: Mapping[str, PageFile]) -> None:
        self.feed, self.keys, self.page = feed, keys, page

    async def dashboard(self, request: Request) -> Response:
        """The dashboard, for a browser."""
        return self._file("index.html", request)

    async def dashboard_folder(self, request: Request) -> Response:
        """The page's links are relative to the path without a slash."""
        return Response(status_code=308, headers=_HEADERS | {"location": "../dashboard"})

    async def dashboard_file(self, request: Request) -> Response:
        """A file of the dashboard's page."""
        return self._file(request.path_params["file"], request)

    def _file(self, name: str, request: Request) -> Response:
        file = self.page.get(name)
        if file is None:
            raise NotFound("the dashboard has no such file", param="file")
        headers = _HEADERS | {"etag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(file.packed, 200, headers, file.media_type)
        return Response(file.plain, 200, headers, file.media_type)

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
