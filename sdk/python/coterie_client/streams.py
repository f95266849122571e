"""An answer in parts: iterators over chunks. Closing one cancels the request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from types import TracebackType

import httpx

from coterie_client.attempts import broken
from coterie_client.frames import Chunk, Frames
from coterie_client.settings import Settings
from coterie_client.types import InferenceResult


class InferStream:
    """The request is sent when the first chunk is needed. Use it in a `with`, or close it to
    stop."""

    def __init__(self, open_: Callable[[], httpx.Response], settings: Settings) -> None:
        self._open, self._settings = open_, settings
        self._chunks = self._run()
        # the whole answer, once it has ended
        self.result: InferenceResult | None = None

    def _run(self) -> Generator[Chunk, None, None]:
        response = self._open()
        frames = Frames(response.headers.get("x-request-id"))
        try:
            for data in response.iter_bytes():
                for chunk in frames.feed(data):
                    self.result = frames.result
                    yield chunk
            frames.end()
        except httpx.TransportError as error:
            raise broken(error, self._settings) from error
        finally:
            response.close()

    def __iter__(self) -> InferStream:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()

    def __enter__(self) -> InferStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncInferStream:
    """The same for asyncio: `async for`, `async with`, `aclose`."""

    def __init__(self, open_: Callable[[], Awaitable[httpx.Response]], settings: Settings) -> None:
        self._open, self._settings = open_, settings
        self._chunks = self._run()
        self.result: InferenceResult | None = None

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        response = await self._open()
        frames = Frames(response.headers.get("x-request-id"))
        try:
            async for data in response.aiter_bytes():
                for chunk in frames.feed(data):
                    self.result = frames.result
                    yield chunk
            frames.end()
        except httpx.TransportError as error:
            raise broken(error, self._settings) from error
        finally:
            await response.aclose()

    def __aiter__(self) -> AsyncInferStream:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._chunks.aclose()

    async def __aenter__(self) -> AsyncInferStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
