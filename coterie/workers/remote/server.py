"""The HTTP side of a remote server: connections, key, limits. Knows nothing of queues.

Redirects are not followed, compressed answers are refused, and every size and wait has a bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from coterie import __version__
from coterie.core.ensemble import RemoteSettings
from coterie.core.errors import ConfigError, InvalidRequest, MissingDependency
from coterie.core.plan import RemoteAssignment
from coterie.workers.remote.failure import RETRY_S, RemoteFailure, refused

if TYPE_CHECKING:
    import httpx

    from coterie.workers.remote.reading import SlicedStream

MAX_LINE_BYTES = 1 << 20
MAX_BODY_BYTES = 16 << 20
MAX_FAULT_BYTES = 1 << 16
# an answer may have so many bytes and so many pieces and lines, whatever was asked for, and so many
# for each token; a token takes at most so many seconds
LEAST_BYTES, TOKEN_BYTES, SCORE_BYTES = 1 << 21, 1 << 10, 1 << 8
LEAST_PARTS, TOKEN_PARTS = 1 << 14, 16
TOKEN_S = 1.0
# bytes that a server sends without a chunk of its answer, as comments are, keep a connection this
# many times as long as silence would
STALLED = 10
CONNECT_S, PROBE_S = 10.0, 5.0
# after the last chunk: how long the end of the stream may take before the connection is closed
DRAIN_S = 1.0
IDLE_S = 30.0
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """What the answer to one request may take."""

    bytes: int
    # pieces in which it comes, and its lines
    parts: int
    # from sending the request to the end of the answer
    seconds: float


def limits_of(assignment: RemoteAssignment, settings: RemoteSettings) -> AnswerLimits:
    sampling, asked = assignment.sampling, assignment.limits.max_tokens
    each = asked if assignment.is_limited and asked else settings.context
    tokens = each * (sampling.n or 1)
    num_scores = 0 if sampling.logprobs is None else sampling.logprobs + 1
    return AnswerLimits(
        bytes=LEAST_BYTES + tokens * (TOKEN_BYTES + num_scores * SCORE_BYTES),
        parts=LEAST_PARTS + tokens * TOKEN_PARTS,
        seconds=STALLED * settings.timeout_s + tokens * TOKEN_S,
    )


class RemoteServer:
    def __init__(self, name: str, settings: RemoteSettings) -> None:
        self.name, self._settings = name, settings
        self._base = settings.url.rstrip("/")
        parts = urlsplit(self._base)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.key = ""
        self._client: httpx.AsyncClient | None = None
        # requests that were sent a second time because an idle connection had been closed
        self.num_resent = 0

    async def open(self) -> None:
        """Read the key and make the client; connects to nothing."""
        await self.read_key()
        if self._client is None:
            self._client = await asyncio.to_thread(self._make_client)

    async def read_key(self) -> None:
        self.key = await asyncio.to_thread(key_of, self._settings)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def probe(self) -> None:
        """Raises RemoteFailure if the server cannot answer now. A server without a list of models
        is there too."""
        import httpx

        try:
            async with (
                asyncio.timeout(min(self._settings.timeout_s, PROBE_S)),
                self._opened().stream("GET", f"{self._base}/models", headers=self._headers()) as it,
            ):
                status, headers = it.status_code, it.headers
                # all of it, so that the connection can be used again
                _stream_of(it).allow(2 * MAX_LINE_BYTES)
                raw = await _limited(_counted(it, LEAST_PARTS, self), MAX_LINE_BYTES)
        except TimeoutError:
            raise self._silent("a probe") from None
        except httpx.HTTPError as error:
            raise self._lost(error, "a probe") from None
        if status not in (200, 404, 405, 429):
            raise refused(status, headers, raw, self.name, self.key)

    @asynccontextmanager
    async def answer(
        self,
        path: str,
        body: dict[str, Any],
        limits: AnswerLimits,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RemoteAnswer]:
        """The answer to a request, once its status is 200. Leaving the block closes it.
        `headers`: those of a trace."""
        try:
            content = msgspec.json.encode(body)
        except (TypeError, ValueError, RecursionError):
            raise InvalidRequest("the request holds a text that cannot be sent") from None
        whole = asyncio.timeout(limits.seconds)
        try:
            async with whole, self._responding(path, content, headers or {}) as response:
                _stream_of(response).allow(limits.bytes)
                status = response.status_code
                if status != 200:
                    pieces = _counted(response, LEAST_PARTS, self)
                    raw = await _limited(pieces, MAX_FAULT_BYTES)
                    raise refused(status, response.headers, raw, self.name, self.key)
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise self.bad("compressed its answer, although it was told not to")
                yield RemoteAnswer(self, response, self._settings.timeout_s, limits)
        except TimeoutError:
            if not whole.expired():
                raise
            text = f"{self.name} did not end its answer in {limits.seconds:.0f} s"
            raise RemoteFailure("unavailable", text, RETRY_S, kind="timeouts") from None

    @asynccontextmanager
    async def _responding(
        self, path: str, content: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        import httpx

        response = await self._sent(path, content, headers)
        try:
            yield response
        except httpx.TimeoutException:
            raise self._silent("the answer") from None
        except httpx.HTTPError as error:
            raise self._lost(error, "the answer") from None
        finally:
            await response.aclose()

    async def _sent(self, path: str, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """The response with its headers. A connection that was closed while it was idle is noticed
        only now: then the request is sent again, once."""
        import httpx

        client, last = self._opened(), False
        request = client.build_request(
            "POST", self._base + path, content=content, headers={**headers, **self._headers()}
        )
        while True:
            try:
                async with asyncio.timeout(STALLED * self._settings.timeout_s):
                    return await client.send(request, stream=True)
            except (TimeoutError, httpx.TimeoutException) as error:
                if isinstance(error, httpx.ConnectTimeout):
                    raise self._lost(error, "the request") from None
                raise self._silent("the request") from None
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if last:
                    raise self._lost(error, "the request") from None
                last = True
                self.num_resent += 1
            except httpx.HTTPError as error:
                raise self._lost(error, "the request") from None

    def bad(self, what: str) -> RemoteFailure:
        return RemoteFailure("unavailable", f"{self.name} {what}", RETRY_S, kind="bad_answers")

    def _silent(self, during: str) -> RemoteFailure:
        text = f"{self.name} sent nothing in time ({during})"
        return RemoteFailure("unavailable", text, RETRY_S, kind="timeouts")

    def _lost(self, error: Exception, during: str) -> RemoteFailure:
        import httpx

        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return RemoteFailure(
                "unavailable", f"{self.name} cannot be reached", RETRY_S, is_down=True
            )
        kind = type(error).__name__
        text = f"the connection to {self.name} was lost during {during} ({kind})"
        return RemoteFailure("unavailable", text, RETRY_S, kind="cut_answers")

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            raise RemoteFailure("unavailable", f"{self.name} is not connected")
        return self._client

    def _headers(self) -> dict[str, str]:
        headers = {
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": f"coterie/{__version__}",
        }
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return headers

    def _make_client(self) -> httpx.AsyncClient:
        try:
            import httpx
        except ImportError:
            raise MissingDependency("a remote specialist needs httpx: pip install httpx") from None
        # they would write a line for every request
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        settings = self._settings
        timeout = httpx.Timeout(
            settings.timeout_s, connect=min(settings.timeout_s, CONNECT_S), pool=None
        )
        # one more for a probe
        most = settings.max_running + 1
        limits = httpx.Limits(
            max_connections=most, max_keepalive_connections=most, keepalive_expiry=IDLE_S
        )
        # reading the certificates takes long, and http needs none
        verify = self._base.startswith("https:")
        # needs httpcore, which httpx brings
        from coterie.workers.remote.reading import SlicedBackend

        client = httpx.AsyncClient(
            timeout=timeout, limits=limits, verify=verify, follow_redirects=False, trust_env=verify
        )
        # httpx has no argument for it; one transport for each proxy of the environment
        for transport in (client._transport, *client._mounts.values()):
            if isinstance(transport, httpx.AsyncHTTPTransport):
                pool = transport._pool
                pool._network_backend = SlicedBackend(pool._network_backend)
        return client


class RemoteAnswer:
    """An answer that has begun."""

    def __init__(
        self, server: RemoteServer, response: httpx.Response, timeout_s: float, limits: AnswerLimits
    ) -> None:
        self._server, self._response = server, response
        self._stall_s = STALLED * timeout_s
        self._max_parts = limits.parts

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The JSON texts of a stream, or the one of a whole body; then an empty one. Behind that
        the end of the stream is read, so that the connection can be used again."""
        kind = self._response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            body = await _limited(self._pieces(), MAX_BODY_BYTES + 1)
            if len(body) > MAX_BODY_BYTES:
                raise self._server.bad(f"sent a body of more than {MAX_BODY_BYTES} bytes")
            yield body
            yield b""
            return
        if kind != "text/event-stream":
            raise self._server.bad("sent neither JSON nor a stream of events")
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == DONE:
                    break
                if data:
                    yield data
            yield b""
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    async for _ in lines:
                        pass

    def _pieces(self) -> AsyncGenerator[bytes, None]:
        return _counted(self._response, self._max_parts, self._server)

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        pending, searched, num_lines = bytearray(), 0, 0
        last_at = time.monotonic()
        async for piece in self._pieces():
            pending += piece
            while (end := pending.find(b"\n", searched)) >= 0:
                line = bytes(pending[:end])
                del pending[: end + 1]
                searched = 0
                num_lines += 1
                if num_lines > self._max_parts:
                    raise self._server.bad("sent too many lines for what was asked")
                if line.startswith(b"data:") and len(line) > len(b"data: "):
                    last_at = time.monotonic()
                yield line
            searched = len(pending)
            if searched > MAX_LINE_BYTES:
                raise self._server.bad(f"sent a line of more than {MAX_LINE_BYTES} bytes")
            if time.monotonic() - last_at > self._stall_s:
                raise self._server.bad("sends bytes, but nothing of an answer")
        if pending:
            yield bytes(pending)


def _stream_of(response: httpx.Response) -> SlicedStream:
    stream: SlicedStream = response.extensions["network_stream"]
    return stream


async def _counted(
    response: httpx.Response, most: int, server: RemoteServer
) -> AsyncGenerator[bytes, None]:
    """The pieces of a body, as the server cut them. Each costs the same, however small."""
    num_pieces = 0
    async for piece in response.aiter_raw():
        num_pieces += 1
        if num_pieces > most:
            raise server.bad("sent its answer in too many pieces")
        yield piece


async def _limited(pieces: AsyncIterator[bytes], most: int) -> bytes:
    """The first `most` bytes of a body."""
    body = bytearray()
    async for piece in pieces:
        body += piece[: most - len(body)]
        if len(body) >= most:
            break
    return bytes(body)


def key_of(settings: RemoteSettings) -> str:
    """The key, from the environment or from its file. Errors do not name it."""
    if settings.key_env:
        key = os.environ.get(settings.key_env, "").strip()
    elif settings.key_file:
        try:
            key = Path(settings.key_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            text = f"remote.key_file: cannot read {settings.key_file}: {type(error).__name__}"
            raise ConfigError(text, param="remote.key_file") from None
    else:
        return ""
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError("remote: the key is empty or no ASCII text", param="remote.key_file")
    return key
