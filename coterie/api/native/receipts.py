"""GET /v1/receipts/{id}: who served a request, why, and what took the time."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.auth import ADMIN_TENANT
from coterie.api.door import exchange_of
from coterie.service.records.log import InferenceRecords

JSON = "application/json"
MAX_ID = 128


class ReceiptEndpoints:
    def __init__(self, records: InferenceRecords) -> None:
        self.records = records

    async def get_receipt(self, request: Request) -> Response:
        """The receipt of one of your requests; an admin key reads those of all tenants."""
        tenant = exchange_of(request.scope).tenant
        found = await self.records.receipt(
            request.path_params["receipt_id"][:MAX_ID], None if tenant == ADMIN_TENANT else tenant
        )
        return Response(found, media_type=JSON)
