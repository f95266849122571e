"""POST /v1/infer: whole, as a stream, or accepted as a job. Receives, asks, writes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import decode, read
from coterie.api.errors import encode
from coterie.api.exchange import Exchange, exchange_of
from coterie.api.infer_answer import Inference, InferStream, Service, answer_fields
from coterie.api.infer_parse import Asked, Caller, Reception
from coterie.api.inference import steering_of
from coterie.api.sse import EventStream, while_connected
from coterie.core.plan import RoutePlan

JSON = "application/json"


class InferEndpoints:
    def __init__(self, service: Service, reception: Reception, max_body_bytes: int) -> None:
        self.service = service
        self.reception = reception
        self.max_body_bytes = max_body_bytes

    async def infer(self, request: Request) -> Response:
        """Answer a prompt with the experts that suit it: whole, streamed, or later as a job."""
        asked = self._receive(request, await read(request, self.max_body_bytes))
        exchange = exchange_of(request.scope)
        inference = Inference(self.service, asked)
        receipt(exchange, inference.plan)
        if asked.stream:
            return EventStream(inference.events, InferStream(inference), exchange)
        result = await while_connected(request.receive, inference.result())
        fields = answer_fields(result)
        exchange.completion_tokens = result.tokens_generated
        return Response(encode(fields), media_type=JSON)

    def _receive(self, request: Request, raw: bytes) -> Asked:
        steering = steering_of(request)
        exchange = steering.exchange
        caller = Caller(exchange.tenant, exchange.arrived_at, steering.session, steering.timeout_s)
        return self.reception.receive(decode(raw), caller)


def receipt(exchange: Exchange, plan: RoutePlan) -> None:
    """What the request runs on, known before its first byte goes out."""
    exchange.headers["x-coterie-specialist"] = _header(plan.specialist)
    exchange.headers["x-coterie-confidence"] = f"{plan.confidence:.4f}"
    if plan.adapters:
        stack = (f"{item.name}#{item.digest[:8]}" for item in plan.adapters)
        exchange.headers["x-coterie-adapter"] = ",".join(stack)


def _header(name: str) -> str:
    return "".join(char for char in name if " " < char < "\x7f")[:128]
