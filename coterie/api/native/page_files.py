"""Pages for a browser: the chat page at `/`, and how the files of a page are sent.

A page is a few files of the package, read once at start. The files are public and contain no
tenant data: what a page shows comes from endpoints that ask for a key.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.auth import accepts_html
from coterie.core.errors import NotFound

_PACKAGE = Path(__file__).parents[2]
CHAT_PAGE, DASHBOARD = _PACKAGE / "chat_page", _PACKAGE / "dashboard"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# what a page may do: load its own files, and call this server
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
PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # always ask whether the file has changed: a new server may run under the same address
    "cache-control": "no-cache",
    # `/` is JSON for programs
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    media_type: str
    plain: bytes
    packed: bytes
    etag: str


class PageFiles:
    """The files of one page by name."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, PageFile] = {}
        for path in sorted(folder.iterdir()):
            media_type = _TYPES.get(path.suffix)
            if media_type is not None:
                data = path.read_bytes()
                etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
                packed = gzip.compress(data, mtime=0)
                self._files[path.name] = PageFile(media_type, data, packed, etag)

    def response(self, name: str, request: Request) -> Response:
        """The file, compressed if the client takes that, or 304 if the client has it."""
        file = self._files.get(name)
        if file is None:
            raise NotFound("this page has no such file", param="file")
        headers = dict(PAGE_HEADERS) | {"etag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(file.packed, 200, headers, file.media_type)
        return Response(file.plain, 200, headers, file.media_type)


class ChatPageEndpoints:
    def __init__(
        self, files: PageFiles, about_server: Callable[[Request], Awaitable[Response]]
    ) -> None:
        """`about_server`: what programs get at `/`."""
        self.files, self.about_server = files, about_server

    async def root(self, request: Request) -> Response:
        """What this server is, and the paths of its main endpoints; the chat page for a client that
        accepts HTML."""
        if accepts_html(request.scope["headers"]):
            return self.files.response("index.html", request)
        return await self.about_server(request)

    async def chat_file(self, request: Request) -> Response:
        """A file of the chat page."""
        return self.files.response(request.path_params["file"], request)
