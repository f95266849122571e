"""The door of /v1/infer/ws: keys, origins, how many connections; what is said is `ws_talk.py`'s.

A browser cannot set headers on a WebSocket: it offers its key as a subprotocol. And no browser asks
before it connects elsewhere, so that a page of a foreign origin is refused here.
"""

from __future__ import annotations

import time

from starlette.responses import Response
from starlette.websockets import WebSocket

from coterie.api.auth import Keys
from coterie.api.errors import OPENAI, status_of
from coterie.api.exchange import Exchange, error_response, log_exchange, new_id, reason_of
from coterie.api.native.infer_answer import Service
from coterie.api.native.infer_parse import Reception
from coterie.api.origin import Origins
from coterie.api.transport.ws_talk import Talk
from coterie.core.errors import CoterieError, Overloaded

PATH = "/v1/infer/ws"
# what the server speaks, and how a key is offered beside it: `coterie-key.KEY`
SUBPROTOCOL, KEY_MARK = "coterie", "coterie-key."
MAX_CONNECTIONS = 1024
RETRY_S = 5.0


class InferSocket:
    def __init__(
        self,
        service: Service,
        reception: Reception,
        keys: Keys,
        origins: Origins,
        idle_timeout_s: float,
    ) -> None:
        self.service = service
        self.reception = reception
        self.keys = keys
        self.origins = origins
        self.idle_timeout_s = idle_timeout_s
        self._num_open = 0

    async def connect(self, websocket: WebSocket) -> None:
        """Requests and their events over one connection."""
        exchange = Exchange(new_id("req_"), OPENAI, time.monotonic())
        try:
            exchange.tenant = self._let_in(websocket)
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
            await Talk(
                websocket, self.service, self.reception, exchange.tenant, self.idle_timeout_s
            ).run()
        finally:
            self._num_open -= 1
            exchange.status = 101
            log_exchange(exchange, websocket.scope, "WEBSOCKET")

    def _let_in(self, websocket: WebSocket) -> str:
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
    """With a status and a body where the server can send one before the handshake."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:
        await websocket.close(1008)
