"""Sends the spans of ended requests to a receiver, in batches, from a thread of its own.

A request is never slower or worse for it: what ends is put into a bounded queue, and dropped and
counted if that is full. A receiver that is down or slow is asked again a few times, later and
later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.core.errors import MissingDependency
from coterie.obs.log import log
from coterie.obs.tracing.context import RandomIds
from coterie.obs.tracing.otlp import Attributes, encoded, export_request, rejected_spans
from coterie.obs.tracing.spans import RequestTrace, spans_of

if TYPE_CHECKING:
    import httpx

# requests in a batch, and how long one waits for others
MAX_BATCH, BATCH_S = 64, 1.0
# attempts to send a batch, the pause after the first one, and the longest
MAX_TRIES, PAUSE_S, MAX_PAUSE_S = 4, 1.0, 30.0
# answers after which the same batch may be sent again
_AGAIN = frozenset((429, 502, 503, 504))
MAX_ANSWER_BYTES = 1 << 16
CLOSE_S = 3.0


@dataclass(frozen=True, slots=True)
class TraceReceiver:
    """Where spans are sent."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    # of this program
    version: str


@dataclass(slots=True)
class SpanCounts:
    """Each is written by one thread and read by others."""

    sent: int = 0
    # the queue was full
    dropped: int = 0
    # the receiver did not take them
    lost: int = 0


class SpanExporter:
    def __init__(self, receiver: TraceReceiver, resource: Attributes, max_queue: int) -> None:
        """`max_queue`: requests that wait to be sent."""
        self._receiver, self._resource, self._max_queue = receiver, resource, max_queue
        # a short queue must not stay full for as long as a batch may wait
        self._batch = min(MAX_BATCH, max_queue)
        self.counts = SpanCounts()
        self._queue: deque[RequestTrace] = deque()
        # there is something to send; there is a whole batch; the server ends
        self._filled, self._full = threading.Event(), threading.Event()
        self._closing = threading.Event()
        self._give_up_at = float("inf")
        self._thread: threading.Thread | None = None
        self._client: httpx.Client | None = None
        self._ids = RandomIds()
        self._is_down = False

    def start(self) -> None:
        """Raises MissingDependency if spans cannot be sent."""
        try:
            import httpx  # noqa: F401
        except ImportError:
            raise MissingDependency("tracing needs httpx: pip install httpx") from None
        # they would write a line for every batch
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()

    def put(self, trace: RequestTrace) -> None:
        """Never waits."""
        queue = self._queue
        if len(queue) >= self._max_queue or self._closing.is_set():
            self.counts.dropped += trace.num_spans
            return
        queue.append(trace)
        if not self._filled.is_set():
            self._filled.set()
        if len(queue) >= self._batch and not self._full.is_set():
            self._full.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits, within the time; what is left is lost."""
        self._give_up_at = time.monotonic() + timeout_s
        self._closing.set()
        self._filled.set()
        self._full.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)
        while self._queue:
            self.counts.lost += self._queue.popleft().num_spans

    def _run(self) -> None:
        while True:
            self._filled.wait()
            self._full.wait(BATCH_S)
            batch = self._taken()
            if batch:
                try:
                    self._send(batch)
                except Exception as error:
                    # whatever it is, the thread goes on with the next ones
                    log("trace_export_failed", level="error", error=error)
                    self.counts.lost += sum(trace.num_spans for trace in batch)
            elif self._closing.is_set():
                break
        if self._client is not None:
            self._client.close()

    def _taken(self) -> list[RequestTrace]:
        queue = self._queue
        batch = [queue.popleft() for _ in range(min(len(queue), self._batch))]
        # cleared first and looked at afterwards: what comes in between is seen
        self._filled.clear()
        self._full.clear()
        is_closing = self._closing.is_set()
        if queue or is_closing:
            self._filled.set()
        if len(queue) >= self._batch or is_closing:
            self._full.set()
        return batch

    def _send(self, batch: list[RequestTrace]) -> None:
        spans: list[bytes] = []
        for trace in batch:
            spans += [encoded(span) for span in spans_of(trace, self._ids)]
            # lets the event loop run, which would wait for the interpreter
            time.sleep(0)
        body = export_request(spans, self._resource, self._receiver.version)
        pause_s = PAUSE_S
        for attempt in range(1, MAX_TRIES + 1):
            left_s = self._give_up_at - time.monotonic()
            if left_s <= 0:
                break
            result = self._post(body, min(self._receiver.timeout_s, left_s))
            if result.is_taken:
                lost = min(result.num_rejected, len(spans))
                self.counts.sent += len(spans) - lost
                self.counts.lost += lost
                self._is_back()
                return
            self._went_down(result.reason)
            if not result.may_retry or attempt == MAX_TRIES:
                break
            wait_s = min(max(pause_s, result.retry_after_s), MAX_PAUSE_S)
            # a server that ends does not wait
            self._closing.wait(wait_s)
            pause_s *= 2
        self.counts.lost += len(spans)

    def _post(self, body: bytes, timeout_s: float) -> _PostResult:
        import httpx

        give_up_at = time.monotonic() + timeout_s
        headers = {"content-type": "application/x-protobuf", **self._receiver.headers}
        try:
            with self._opened().stream(
                "POST", self._receiver.url, content=body, headers=headers, timeout=timeout_s
            ) as answer:
                raw = bytearray()
                for piece in answer.iter_raw():
                    raw += piece
                    # each byte could come just in time
                    if len(raw) > MAX_ANSWER_BYTES or time.monotonic() > give_up_at:
                        break
                status, retry_after = answer.status_code, answer.headers.get("retry-after", "")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _PostResult(False, type(error).__name__, may_retry=True)
        if 200 <= status < 300:
            return _PostResult(True, num_rejected=rejected_spans(bytes(raw)))
        retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
        return _PostResult(False, f"status {status}", status in _AGAIN, retry_after_s)

    def _opened(self) -> httpx.Client:
        if self._client is None:
            import httpx

            is_https = self._receiver.url.startswith("https:")
            agent = f"coterie/{self._receiver.version}"
            # reading the certificates takes long, and http needs none
            self._client = httpx.Client(
                verify=is_https,
                trust_env=is_https,
                follow_redirects=False,
                headers={"user-agent": agent, "accept-encoding": "identity"},
            )
        return self._client

    def _went_down(self, reason: str) -> None:
        if not self._is_down:
            self._is_down = True
            log("trace_receiver_down", level="warning", reason=reason)

    def _is_back(self) -> None:
        if self._is_down:
            self._is_down = False
            log("trace_receiver_back")


@dataclass(frozen=True, slots=True)
class _PostResult:
    is_taken: bool
    reason: str = ""
    may_retry: bool = False
    retry_after_s: float = 0.0
    num_rejected: int = 0
