"""GET /v1/receipts and /v1/receipts/{id}: who served a request, why, and what took the time."""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from coterie.api.auth import ADMIN_TENANT
from coterie.api.body import QueryParameters, query_of
from coterie.api.door import exchange_of
from coterie.core.errors import Forbidden
from coterie.service.receipts.store import ReceiptQuery
from coterie.service.records.log import InferenceRecords

JSON = "application/json"
MAX_ID = 128
MAX_PAGE = 1000
_TIME = "Of its arrival, in seconds since 1970."


class ReceiptParameters(QueryParameters):
    limit: int = Field(50, ge=1, le=MAX_PAGE)
    before: int | None = Field(None, ge=1, le=2**53, description="A page's `next`.")
    tenant: str | None = Field(None, max_length=64, description="Your own, or with an admin key.")
    specialist: str | None = Field(None, max_length=128)
    outcome: str | None = Field(
        None, max_length=64, description="A finish reason, the code of an error, or `open`."
    )
    since: float | None = Field(None, ge=0, le=1e11, description=_TIME)
    until: float | None = Field(None, ge=0, le=1e11, description=_TIME)


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

    async def list_receipts(self, request: Request) -> Response:
        """List your receipts, newest first; with an admin key those of all tenants. A page may have
        fewer than `limit` and yet a `next`."""
        query = query_of(request, ReceiptParameters)
        own = exchange_of(request.scope).tenant
        tenant = query.tenant
        if own != ADMIN_TENANT:
            if tenant not in (None, own):
                raise Forbidden("this key may read its own receipts alone", param="tenant")
            tenant = own
        given = query.model_dump(exclude={"tenant"})
        page = await self.records.receipts(ReceiptQuery(tenant, **given))
        following = b"null" if page.following is None else str(page.following).encode()
        more = b"false" if page.following is None else b"true"
        body = b'{"object":"list","data":[%s],"has_more":%s,"next":%s}' % (
            b",".join(page.receipts), more, following,
        )  # fmt: skip
        return Response(body, media_type=JSON)
