"""Receives a large body piece by piece, as long as it keeps arriving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request

from coterie.api.body import pass_over
from coterie.api.door import ClientGone
from coterie.api.transport.connections import SECONDS_PER_BYTE
from coterie.core.errors import CoterieError, InvalidRequest, RequestTooLarge


class LargeBody:
    """The body of a request, in pieces. As a context: if the body is refused before its end, the
    rest is read and dropped for a while, so that the client can read the answer."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._is_read = False

    async def __aenter__(self) -> LargeBody:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, CoterieError) and not self._is_read:
            await pass_over(self._request)

    async def pieces(self, limit_bytes: int) -> AsyncGenerator[bytes, None]:
        """Raises RequestTooLarge past the limit, InvalidRequest if the body comes too slowly, and
        ClientGone if the client disconnects."""
        request = self._request
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:19]) > limit_bytes:
            raise _too_large(limit_bytes)
        seconds: float = request.app.state.body_timeout_s
        deadline, size = asyncio.get_running_loop().time() + seconds, 0
        while not self._is_read:
            try:
                async with asyncio.timeout_at(deadline + size * SECONDS_PER_BYTE):
                    message = await request.receive()
            except TimeoutError:
                # nothing more is to be waited for
                self._is_read = True
                raise InvalidRequest("the body arrived too slowly") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece, self._is_read = message.get("body", b""), not message.get("more_body", False)
            size += len(piece)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            if piece:
                yield piece


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than the limit of {limit_bytes} bytes")
