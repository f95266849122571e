"""Endpoints for a caller's own inference log and for feedback on it. `service/records/log.py`
stores both."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from coterie.api.body import QueryParameters, RequestBody, parse, query_of
from coterie.api.door import exchange_of
from coterie.api.errors import encode
from coterie.service.records.log import InferenceRecords
from coterie.service.records.store import RecordQuery

JSON = "application/json"
MAX_PAGE = 100
_VERDICTS = {True: "good", False: "bad"}


def _verdict_word(value: Any) -> Any:
    return _VERDICTS[value] if isinstance(value, bool) else value


class FeedbackBody(RequestBody):
    """Whether the answer of one of your jobs was good. One verdict per job."""

    model_config = ConfigDict(extra="forbid")

    job_id: str = Field(min_length=1, max_length=64)
    verdict: Annotated[
        Literal["good", "bad"],
        BeforeValidator(_verdict_word, json_schema_input_type=Literal["good", "bad"] | bool),
    ]
    comment: str | None = Field(None, max_length=2000)


class InferenceQuery(QueryParameters):
    limit: int = Field(20, ge=1, le=MAX_PAGE)
    after: str | None = Field(None, max_length=64, description="A page's `next`.")
    expert: str | None = Field(None, max_length=256, description="`name` or `name@version`.")
    since: float | None = Field(None, ge=0, le=1e11, description="Seconds since 1970.")


class FeedbackEndpoints:
    def __init__(self, records: InferenceRecords, max_body_bytes: int) -> None:
        self.records = records
        self.max_body_bytes = max_body_bytes

    async def list_inferences(self, request: Request) -> Response:
        """List your requests with their measurements, newest first."""
        query = query_of(request, InferenceQuery)
        tenant = exchange_of(request.scope).tenant
        page = await self.records.query(
            RecordQuery(tenant, query.limit, query.after, query.expert, query.since)
        )
        following = page.rows[-1].job_id if page.has_more else None
        body = {"object": "list", "data": page.rows, "has_more": page.has_more, "next": following}
        return Response(encode(body), media_type=JSON)

    async def give_feedback(self, request: Request) -> Response:
        """Say whether the answer of one of your jobs was good, once. The router learns from it."""
        body = await parse(request, FeedbackBody, self.max_body_bytes)
        tenant = exchange_of(request.scope).tenant
        good = body.verdict == "good"
        await self.records.feedback(body.job_id, tenant, good, body.comment or "")
        return Response(encode({"job_id": body.job_id, "verdict": body.verdict}), media_type=JSON)
