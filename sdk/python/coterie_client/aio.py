"""The client for asyncio: `client.py` with awaits. Requests and answers are in `calls.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from coterie_client import calls
from coterie_client.attempts import Attempts, Polls
from coterie_client.calls import Call, Verdict
from coterie_client.decode import decode_answer
from coterie_client.errors import ConnectionFailed, Unavailable
from coterie_client.settings import IDLE_S, Settings, settings
from coterie_client.streams import AsyncInferStream

if TYPE_CHECKING:
    from typing import Unpack

    from coterie_client import types

T = TypeVar("T")
ACTIVE = ("queued", "processing")


class AsyncExpertClient:
    """Client for a Coterie server. For one event loop.

    `api_key`, `admin_key` and `base_url` default to COTERIE_API_KEY, COTERIE_ADMIN_KEY and
    COTERIE_BASE_URL. `timeout` is in seconds, for each wait for the server's next bytes; the time
    for a whole answer is limited by `timeout_ms` of the request.
    """

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        *,
        admin_key: str | None = None,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self.settings = settings(base_url, api_key, admin_key, timeout, max_retries)
        limits = httpx.Limits(keepalive_expiry=IDLE_S)
        self.http = http_client or httpx.AsyncClient(limits=limits)
        self.experts = AsyncExperts(self)

    def with_options(
        self, *, timeout: float | None = None, max_retries: int | None = None
    ) -> AsyncExpertClient:
        """The same client with the same connections, but other timeouts and retries."""
        old = self.settings
        other = AsyncExpertClient(base_url=old.base_url, http_client=self.http)
        other.settings = replace(
            old,
            timeout_s=old.timeout_s if timeout is None else timeout,
            max_retries=old.max_retries if max_retries is None else max_retries,
        )
        return other

    async def infer(
        self, prompt: str, **options: Unpack[types.InferOptions]
    ) -> types.InferenceResult:
        """Answers a prompt; `types.InferOptions` lists all other options."""
        return await self.send(calls.infer(prompt, options))

    def infer_stream(self, prompt: str, **options: Unpack[types.InferOptions]) -> AsyncInferStream:
        """The answer in parts: chunks with `text`. Closing the stream cancels the request."""
        return self._stream(calls.infer(prompt, options, stream=True))

    async def submit(
        self, prompt: str, **options: Unpack[types.InferOptions]
    ) -> types.JobSubmission:
        """Starts a job that answers the prompt later; get its result with `wait` or `job`."""
        return await self.send(calls.submit(prompt, options))

    async def job(self, job_id: str) -> types.JobView:
        """The state of a job: its text so far, and its result once it has ended."""
        return await self.send(calls.job(job_id))

    async def jobs(
        self, *, status: str | None = None, user_id: str | None = None, page_size: int = 50
    ) -> AsyncIterator[types.JobView]:
        """All jobs, newest first; pages are fetched when needed."""
        after = None
        while True:
            page = await self.send(calls.jobs(after, page_size, status=status, user_id=user_id))
            for item in page.data:
                yield item
            after = page.next
            if after is None:
                return

    async def cancel(self, job_id: str) -> types.DeletedJob:
        """Cancels a job that has not ended; deletes one that has."""
        return await self.send(calls.cancel(job_id))

    async def wait(self, job_id: str, timeout: float | None = None) -> types.JobView:
        """The job once it has ended, successfully or not. Raises `Timeout` after `timeout`
        seconds."""
        polls = Polls(timeout)
        while True:
            try:
                job = await self.job(job_id)
            except (ConnectionFailed, Unavailable) as error:
                polls.no_answer(error)
            else:
                polls.answered()
                if job.status not in ACTIVE:
                    return job
            await asyncio.sleep(polls.next_pause_s())

    def job_events(self, job_id: str) -> AsyncInferStream:
        """Follows a job: its text so far, then what follows. Closing the stream does not cancel the
        job."""
        return self._stream(calls.job_events(job_id))

    async def feedback(
        self, job_id: str, verdict: Verdict, comment: str | None = None
    ) -> types.FeedbackAnswer:
        """Says whether an answer was good; once per job."""
        return await self.send(calls.feedback(job_id, verdict, comment))

    async def inferences(
        self, *, expert: str | None = None, since: float | None = None, page_size: int = 50
    ) -> AsyncIterator[types.InferenceMetrics]:
        """The log of your requests, newest first."""
        after = None
        while True:
            page = await self.send(calls.inferences(after, page_size, expert=expert, since=since))
            for item in page.data:
                yield item
            after = page.next
            if after is None:
                return

    async def send(self, call: Call[T]) -> T:
        response = await self._open(call, self.settings, whole=True)
        return decode_answer(call, response.status_code, response.content)

    def _stream(self, call: Call[Any]) -> AsyncInferStream:
        return AsyncInferStream(partial(self._open, call, self.settings), self.settings)

    async def _open(
        self, call: Call[Any], settings: Settings, whole: bool = False
    ) -> httpx.Response:
        attempts = Attempts(call, settings)
        while True:
            try:
                request = self.http.build_request(**attempts.request())
                response = await self.http.send(request, stream=True)
                if whole or not response.is_success:
                    await response.aread()
                if response.is_success:
                    return response
            except httpx.TransportError as error:
                pause_s = attempts.failed(error)
            else:
                pause_s = attempts.refused(response)
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        await self.http.aclose()

    async def __aenter__(self) -> AsyncExpertClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class AsyncExperts:
    """The experts on the server. Needs an admin key."""

    def __init__(self, client: AsyncExpertClient) -> None:
        self._client = client

    async def list(self) -> types.ExpertList:
        return await self._client.send(calls.experts())

    async def show(self, name: str) -> types.ShownExpert:
        """`name` or `name@version`."""
        return await self._client.send(calls.expert(name))

    async def install(self, package: bytes | PathLike[str], *, now: bool = False) -> types.Expert:
        """Uploads an `.expert` file from this machine. The first version of a name becomes
        current; a later one is staged until it is promoted, or current at once with `now`."""
        data = package if isinstance(package, bytes) else Path(package).read_bytes()
        return await self._client.send(calls.upload_expert(data, now))

    async def install_from(
        self, path: str, **options: Unpack[types.InstallOptions]
    ) -> types.Expert:
        """Installs a file or directory on the server's machine, by its absolute path."""
        return await self._client.send(calls.install_expert(path, options))

    async def remove(self, name: str) -> types.DeletedExpert:
        return await self._client.send(calls.remove_expert(name))

    async def pin(self, name: str) -> types.ChangedExpert:
        return await self._client.send(calls.act_on_expert(name, "pin"))

    async def unpin(self, name: str) -> types.ChangedExpert:
        return await self._client.send(calls.act_on_expert(name, "unpin"))

    async def promote(self, name: str) -> types.ChangedExpert:
        """Lets a staged version answer: as a canary where checks or a floor can judge it, else it
        becomes current at once. `name` alone means the version that was installed last."""
        return await self._client.send(calls.act_on_expert(name, "promote"))

    async def rollback(self, name: str) -> types.ChangedExpert:
        return await self._client.send(calls.act_on_expert(name, "rollback"))

    async def use(self, name: str, version: str) -> types.Expert:
        """Makes an installed version the current one of `name`."""
        return await self._client.send(calls.change_expert(name, {"version": version}))

    async def alias(self, alias: str, name: str) -> types.Expert:
        """Gives `name` or `name@version` another name."""
        return await self._client.send(calls.change_expert(name, {"alias": alias}))
