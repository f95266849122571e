"""The WebSocket /v1/infer/ws: checks of key and origin, then requests and their events.

A browser cannot set headers on a WebSocket, so it sends its key as a subprotocol. A browser also
connects to foreign origins without a preflight request, so pages of other origins are refused here.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from coterie.api.auth import AccessKeys, OriginCheck
from coterie.api.body import aside, decode
from coterie.api.dialect import CallerInfo
from coterie.api.door import (
    CLIENT_CLOSED,
    Exchange,
    RefusalReceipts,
    error_response,
    log_exchange,
    log_fault,
    new_id,
    note_receipt,
    refusal_receipt,
)
from coterie.api.errors import OPENAI, encode, status_of
from coterie.api.native.infer_answer import ERROR, InferencePipeline, RunningInference, error_fields
from coterie.api.native.infer_body import InferBodyReader
from coterie.core.errors import (
    CoterieError,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from coterie.core.receipt import reason_of
from coterie.obs.tracing.tracer import RequestTracer

PATH = "/v1/infer/ws"
# the subprotocol of this server, and the prefix of a subprotocol that carries a key
SUBPROTOCOL, KEY_MARK = "coterie", "coterie-key."
MAX_CONNECTIONS = 1024
RETRY_S = 5.0


class InferSocket:
    def __init__(
        self,
        service: InferencePipeline,
        body_reader: InferBodyReader,
        keys: AccessKeys,
        origins: OriginCheck,
        idle_timeout_s: float,
        refusals: RefusalReceipts | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.service, self.refusals, self.tracer = service, refusals, tracer
        self.body_reader = body_reader
        self.keys = keys
        self.origins = origins
        self.idle_timeout_s = idle_timeout_s
        self._num_open = 0

    async def connect(self, websocket: WebSocket) -> None:
        """Serve requests and their events on one connection."""
        exchange = Exchange(new_id("req_"), OPENAI, time.monotonic())
        try:
            exchange.tenant = self._admit(websocket)
        except CoterieError as error:
            exchange.status = status_of(error, OPENAI)
            exchange.reason = reason_of(error)
            log_exchange(exchange, websocket.scope, "WEBSOCKET")
            await _refuse(websocket, error_response(error, exchange))
            return
        offered = websocket.scope.get("subprotocols", ())
        await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        self._num_open += 1
        try:
            handler = SocketHandler(
                websocket,
                self.service,
                self.body_reader,
                exchange.tenant,
                self.idle_timeout_s,
                self.refusals,
                self.tracer,
            )
            await handler.run()
        finally:
            self._num_open -= 1
            exchange.status = 101
            log_exchange(exchange, websocket.scope, "WEBSOCKET")

    def _admit(self, websocket: WebSocket) -> str:
        headers = list(websocket.scope["headers"])
        self.origins.check(headers)
        for offer in websocket.scope.get("subprotocols", ()):
            if offer.startswith(KEY_MARK):
                headers.append((b"x-api-key", offer.removeprefix(KEY_MARK).encode("latin-1")))
        tenant = self.keys.tenant(PATH, headers)
        if self._num_open >= MAX_CONNECTIONS:
            raise Overloaded(
                f"{MAX_CONNECTIONS} connections are open already", retry_after_s=RETRY_S
            )
        return tenant


async def _refuse(websocket: WebSocket, response: Response) -> None:
    """Refuse the handshake, with a status and a body if the server supports that."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:
        await websocket.close(1008)


# requests that may run at the same time on one connection
MAX_OVERLAP = 16
MAX_TAG = 128
# messages of one connection that may be refused in this time
MAX_REFUSALS, REFUSALS_S = 128, 10.0
# close codes of RFC 6455
GOING_AWAY, POLICY_VIOLATION = 1001, 1008


class SocketHandler:
    def __init__(
        self,
        websocket: WebSocket,
        service: InferencePipeline,
        body_reader: InferBodyReader,
        tenant: str,
        idle_timeout_s: float,
        refusals: RefusalReceipts | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`idle_timeout_s`: how long a client without running requests may stay silent.
        `refusals`: makes receipts of requests that cannot be read. `tracer`: None without
        traces."""
        self._refusals, self._tracer = refusals, tracer
        self._websocket, self._idle_timeout_s = websocket, idle_timeout_s
        self._service, self._body_reader, self._tenant = service, body_reader, tenant
        self._running: dict[str, asyncio.Task[None]] = {}
        self._is_open = True
        self._idle = asyncio.timeout(idle_timeout_s)
        self._num_refusals, self._refusals_since = 0, -REFUSALS_S

    async def run(self) -> None:
        """Serve until the client disconnects or is idle for too long."""
        try:
            async with self._idle:
                while True:
                    message = await self._websocket.receive()
                    self._idle.reschedule(None)
                    if message["type"] == "websocket.disconnect":
                        return
                    await self._take(message.get("bytes") or (message.get("text") or "").encode())
                    if self._num_refusals >= MAX_REFUSALS:
                        reason = f"{MAX_REFUSALS} messages were refused within {REFUSALS_S:g} s"
                        await self._websocket.close(POLICY_VIOLATION, reason)
                        return
                    self._start_idle_timer()
        except WebSocketDisconnect:
            return
        except TimeoutError:
            with suppress(WebSocketDisconnect):
                await self._websocket.close(GOING_AWAY, "idle for too long")
        finally:
            self._is_open = False
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start_idle_timer(self) -> None:
        """Start the idle timer if nothing runs."""
        if self._is_open and not self._running:
            self._idle.reschedule(asyncio.get_running_loop().time() + self._idle_timeout_s)

    def _ended(self, job_id: str) -> None:
        self._running.pop(job_id, None)
        self._start_idle_timer()

    async def _take(self, raw: bytes) -> None:
        """Handle one message: a request body, or `{"cancel": job_id}`."""
        exchange, tag = Exchange(new_id("req_"), OPENAI, time.monotonic(), self._tenant), None
        exchange.refusals = self._refusals
        if self._tracer is not None:
            headers = self._websocket.scope["headers"]
            exchange.trace = self._tracer.begin(headers, exchange.arrived_at)
        try:
            payload = await aside(len(raw), decode, raw)
            if isinstance(payload, dict):
                if "cancel" in payload:
                    exchange.refusals = exchange.trace = None
                    self._cancel(payload)
                    return
                tag = _tag(payload)
            if len(self._running) >= MAX_OVERLAP:
                raise Overloaded(
                    f"{MAX_OVERLAP} requests run on this connection already", retry_after_s=1.0
                )
            caller = CallerInfo(self._tenant, exchange.arrived_at)
            parsed = await self._body_reader.receive(payload, caller, len(raw))
            exchange.model = parsed.request.hints.model or ""
            inference = RunningInference(self._service, parsed, partial(note_receipt, exchange))
        except Exception as error:
            await self._refuse(_typed(error, ""), exchange, tag)
            return
        exchange.request_id = inference.job_id
        task = asyncio.create_task(self._answer(inference, exchange, tag))
        self._running[inference.job_id] = task
        task.add_done_callback(lambda _: self._ended(inference.job_id))
        # let the task start: if it is cancelled before its start, it would send no last frame
        await asyncio.sleep(0)

    async def _refuse(self, error: CoterieError, exchange: Exchange, tag: str | None) -> None:
        self._count_refusal()
        exchange.status, exchange.reason = status_of(error, OPENAI), reason_of(error)
        receipt = refusal_receipt(error, exchange)
        log_exchange(exchange, self._websocket.scope, "WEBSOCKET")
        marks = {"request_id": tag} if tag else {}
        if receipt is not None:
            marks["receipt_id"] = receipt.request_id
        await self._send(ERROR, error_message(error), marks)

    def _count_refusal(self) -> None:
        now = time.monotonic()
        if now - self._refusals_since >= REFUSALS_S:
            self._num_refusals, self._refusals_since = 0, now
        self._num_refusals += 1

    def _cancel(self, payload: dict[str, Any]) -> None:
        job_id = payload["cancel"]
        if len(payload) > 1 or not isinstance(job_id, str):
            raise InvalidRequest('a cancellation is {"cancel": job_id}', param="cancel")
        task = self._running.get(job_id)
        if task is None or task.cancelling():
            raise NotFound("no such job runs on this connection", param="job_id")
        task.cancel()

    async def _answer(
        self, inference: RunningInference, exchange: Exchange, tag: str | None
    ) -> None:
        marks = {"job_id": inference.job_id} | ({"request_id": tag} if tag else {})
        exchange.status = 200
        try:
            async with aclosing(inference.events) as events:
                async for event in events:
                    frame = inference.frame(event)
                    if frame is not None:
                        await self._send(*frame, marks)
        except asyncio.CancelledError:
            # if it had ended, the last frame is already being sent
            if not inference.answer.ended:
                exchange.status = CLIENT_CLOSED
                if self._is_open:
                    await self._send(*inference.aborted(), marks)
        except Exception as error:
            typed = _typed(error, inference.job_id)
            if isinstance(typed, (InvalidRequest, NotFound)):
                self._count_refusal()
            exchange.status, exchange.reason = status_of(typed, OPENAI), reason_of(typed)
            await self._send(ERROR, error_message(typed), marks)
        finally:
            exchange.prompt_tokens, exchange.completion_tokens = inference.tokens()
            log_exchange(exchange, self._websocket.scope, "WEBSOCKET")

    async def _send(self, name: str, fields: dict[str, Any], marks: dict[str, Any]) -> None:
        """Send one event. Does nothing if the client is gone; `run` then ends its requests."""
        if self._websocket.application_state is WebSocketState.CONNECTED:
            with suppress(WebSocketDisconnect):
                await self._websocket.send_text(encode({"event": name} | marks | fields).decode())


def _typed(error: Exception, job_id: str) -> CoterieError:
    if isinstance(error, CoterieError):
        return error
    log_fault(error, job_id)
    return InternalError("the server failed to answer")


def error_message(error: CoterieError) -> dict[str, Any]:
    """The error as in a stream, with the retry time that HTTP sends in a header."""
    fields = error_fields(error)
    if error.retry_after_s is not None:
        fields["retry_after_ms"] = round(error.retry_after_s * 1000)
    return fields


def _tag(payload: dict[str, Any]) -> str | None:
    """The caller's name for a request; every event of it carries this name."""
    tag = payload.pop("request_id", None)
    if tag is not None and not (isinstance(tag, str) and 0 < len(tag) <= MAX_TAG):
        raise InvalidRequest(
            f"request_id: must be a text of 1 to {MAX_TAG} characters", param="request_id"
        )
    return tag
