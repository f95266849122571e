"""The synchronous client: each call waits for its answer.

Sends what `calls.py` makes; `aio.py` is the same for asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from coterie_client.streams import InferStream

if TYPE_CHECKING:
    from typing import Unpack

    from coterie_client import types

T = TypeVar("T")
ACTIVE = ("queued", "processing")


class ExpertClient:
    """Client for a Coterie server. Safe to share between threads.

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
        http_client: httpx.Client | None = None,
    ) -> None:
        self.settings = settings(base_url, api_key, admin_key, timeout, max_retries)
        limits = httpx.Limits(keepalive_expiry=IDLE_S)
        self.http = http_client or httpx.Client(limits=limits)
        self.experts = Experts(self)

    def with_options(
        self, *, timeout: float | None = None, max_retries: int | None = None
    ) -> ExpertClient:
        """The same client with the same connections, but other timeouts and retries."""
        old = self.settings
        other = ExpertClient(base_url=old.base_url, http_client=self.http)
        other.settings = replace(
            old,
            timeout_s=old.timeout_s if timeout is None else timeout,
            max_retries=old.max_retries if max_retries is None else max_retries,
        )
        return other

    def infer(self, prompt: str, **options: Unpack[types.InferOptions]) -> types.InferenceResult:
        """Answers a prompt; `types.InferOptions` lists all other options."""
        return self.send(calls.infer(prompt, options))

    def infer_stream(self, prompt: str, **options: Unpack[types.InferOptions]) -> InferStream:
        """The answer in parts: chunks with `text`. Closing the stream cancels the request."""
        return self._stream(calls.infer(prompt, options, stream=True))

    def submit(self, prompt: str, **options: Unpack[types.InferOptions]) -> types.JobSubmission:
        """Starts a job that answers the prompt later; get its result with `wait` or `job`."""
        return self.send(calls.submit(prompt, options))

    def job(self, job_id: str) -> types.JobView:
        """The state of a job: its text so far, and its result once it has ended."""
        return self.send(calls.job(job_id))

    def jobs(
        self, *, status: str | None = None, user_id: str | None = None, page_size: int = 50
    ) -> Iterator[types.JobView]:
        """All jobs, newest first; pages are fetched when needed."""
        after = None
        while True:
            page = self.send(calls.jobs(after, page_size, status=status, user_id=user_id))
            yield from page.data
            after = page.next
            if after is None:
                return

    def cancel(self, job_id: str) -> types.DeletedJob:
        """Cancels a job that has not ended; deletes one that has."""
        return self.send(calls.cancel(job_id))

    def wait(self, job_id: str, timeout: float | None = None) -> types.JobView:
        """The job once it has ended, successfully or not. Raises `Timeout` after `timeout`
        seconds."""
        polls = Polls(timeout)
        while True:
            try:
                job = self.job(job_id)
            except (ConnectionFailed, Unavailable) as error:
                polls.no_answer(error)
            else:
                polls.answered()
                if job.status not in ACTIVE:
                    return job
            time.sleep(polls.next_pause_s())

    def job_events(self, job_id: str) -> InferStream:
        """Follows a job: its text so far, then what follows. Closing the stream does not cancel the
        job."""
        return self._stream(calls.job_events(job_id))

    def feedback(
        self, job_id: str, verdict: Verdict, comment: str | None = None
    ) -> types.FeedbackAnswer:
        """Says whether an answer was good; once per job."""
        return self.send(calls.feedback(job_id, verdict, comment))

    def inferences(
        self, *, expert: str | None = None, since: float | None = None, page_size: int = 50
    ) -> Iterator[types.InferenceMetrics]:
        """The log of your requests, newest first."""
        after = None
        while True:
            page = self.send(calls.inferences(after, page_size, expert=expert, since=since))
            yield from page.data
            after = page.next
            if after is None:
                return

    def send(self, call: Call[T]) -> T:
        response = self._open(call, self.settings, whole=True)
        return decode_answer(call, response.status_code, response.content)

    def _stream(self, call: Call[Any]) -> InferStream:
        return InferStream(partial(self._open, call, self.settings), self.settings)

    def _open(self, call: Call[Any], settings: Settings, whole: bool = False) -> httpx.Response:
        attempts = Attempts(call, settings)
        while True:
            try:
                request = self.http.build_request(**attempts.request())
                response = self.http.send(request, stream=True)
                if whole or not response.is_success:
                    response.read()
                if response.is_success:
                    return response
            except httpx.TransportError as error:
                pause_s = attempts.failed(error)
            else:
                pause_s = attempts.refused(response)
            time.sleep(pause_s)

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> ExpertClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Experts:
    """The experts on the server. Needs an admin key."""

    def __init__(self, client: ExpertClient) -> None:
        self._client = client

    def list(self) -> types.ExpertList:
        return self._client.send(calls.experts())

    def show(self, name: str) -> types.ShownExpert:
        """`name` or `name@version`."""
        return self._client.send(calls.expert(name))

    def install(self, package: bytes | PathLike[str], *, now: bool = False) -> types.Expert:
        """Uploads an `.expert` file from this machine. The first version of a name becomes
        current; a later one is staged until it is promoted, or current at once with `now`."""
        data = package if isinstance(package, bytes) else Path(package).read_bytes()
        return self._client.send(calls.upload_expert(data, now))

    def install_from(self, path: str, **options: Unpack[types.InstallOptions]) -> types.Expert:
        """Installs a file or directory on the server's machine, by its absolute path."""
        return self._client.send(calls.install_expert(path, options))

    def remove(self, name: str) -> types.DeletedExpert:
        return self._client.send(calls.remove_expert(name))

    def pin(self, name: str) -> types.ChangedExpert:
        return self._client.send(calls.act_on_expert(name, "pin"))

    def unpin(self, name: str) -> types.ChangedExpert:
        return self._client.send(calls.act_on_expert(name, "unpin"))

    def promote(self, name: str) -> types.ChangedExpert:
        """Lets a staged version answer: as a canary where checks or a floor can judge it, else it
        becomes current at once. `name` alone means the version that was installed last."""
        return self._client.send(calls.act_on_expert(name, "promote"))

    def rollback(self, name: str) -> types.ChangedExpert:
        return self._client.send(calls.act_on_expert(name, "rollback"))

    def use(self, name: str, version: str) -> types.Expert:
        """Makes an installed version the current one of `name`."""
        return self._client.send(calls.change_expert(name, {"version": version}))

    def alias(self, alias: str, name: str) -> types.Expert:
        """Gives `name` or `name@version` another name."""
        return self._client.send(calls.change_expert(name, {"alias": alias}))
