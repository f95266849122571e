"""The endpoints of the ensemble: what each specialist delivers, for every caller; and for admins
its state, demotions, drains, thresholds, canaries and the audit log.

This module only translates; `service/ensemble.py` does the work.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from coterie.api.admin.experts import answer
from coterie.api.body import QueryParameters, RequestBody, parse, query_of
from coterie.api.body_fields import Name
from coterie.api.door import exchange_of
from coterie.core.errors import InvalidRequest, NotFound
from coterie.core.request import MAX_PRIORITY
from coterie.service.ensemble import EnsembleService

MAX_PAGE = 1000


class ReasonBody(RequestBody):
    """Why; the audit log keeps it."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=500)


class ThresholdsBody(RequestBody):
    """New thresholds of an intent; what is left out stays."""

    model_config = ConfigDict(extra="forbid")

    shadow_below: float | None = Field(None, ge=0, le=1)
    spill_below: float | None = Field(None, ge=0, le=1)
    priority_floor: int | None = Field(None, ge=0, le=MAX_PRIORITY)


class CanaryBody(RequestBody):
    """An expert (`name` or `name@version`), or a specialist with the intent it is to take over."""

    model_config = ConfigDict(extra="forbid")

    expert: Name | None = None
    specialist: Name | None = None
    intent: Name | None = None
    share: float = Field(gt=0, le=0.5, description="Of the traffic.")


class AuditQuery(QueryParameters):
    limit: int = Field(50, ge=1, le=MAX_PAGE)
    before: int | None = Field(
        None, ge=1, le=2**53, description="Only entries with a lower number."
    )


class EnsembleEndpoints:
    def __init__(self, ensemble: EnsembleService, max_body_bytes: int) -> None:
        self.ensemble = ensemble
        self.max_body_bytes = max_body_bytes

    async def slo(self, request: Request) -> Response:
        """What each specialist delivers: latency quantiles and the share of valid answers. There is
        no figure over all of them: nobody could act on it."""
        shown = self.ensemble.report(exchange_of(request.scope).tenant)
        return answer({"object": "list", "data": shown})

    async def show_ensemble(self, request: Request) -> Response:
        """Show breakers, spikes, thresholds, canaries and shadows."""
        return answer({"object": "ensemble"} | self.ensemble.status())

    async def act_on_specialist(self, request: Request) -> Response:
        """Demote a specialist (only its shadows run) or restore it; drain it (nothing new begins,
        what runs ends) or undrain it."""
        name, action = request.path_params["name"], request.path_params["action"]
        control = self.ensemble.control
        actions = {
            "demote": control.demote,
            "restore": control.restore,
            "drain": control.drain,
            "undrain": control.undrain,
        }
        if action not in actions:
            listed = ", ".join(actions)
            raise NotFound(f"a specialist can be told to {listed}", param="action")
        actions[action](name, actor(request), await self._reason(request))
        await self.ensemble.keep_changes()
        shown = next(item for item in self.ensemble.report() if item["specialist"] == name)
        return answer({"object": "ensemble.specialist"} | shown)

    async def act_on_replica(self, request: Request) -> Response:
        """Drain one replica of several (the others take what comes), or undrain it."""
        name, action = request.path_params["name"], request.path_params["action"]
        control = self.ensemble.control
        actions = {"drain": control.drain_replica, "undrain": control.undrain_replica}
        if action not in actions:
            raise NotFound("a replica can be told to drain or undrain", param="action")
        actions[action](name, actor(request), await self._reason(request))
        await self.ensemble.keep_changes()
        return answer({"object": "ensemble.replica"} | self.ensemble.replica(name))

    async def set_thresholds(self, request: Request) -> Response:
        """Change the thresholds of an intent until they are cleared."""
        body = await parse(request, ThresholdsBody, self.max_body_bytes)
        given = body.model_dump(include=set(ThresholdsBody.model_fields), exclude_none=True)
        if not given:
            listed = ", ".join(ThresholdsBody.model_fields)
            raise InvalidRequest(f"give at least one of {listed}", param="shadow_below")
        intent = request.path_params["intent"]
        self.ensemble.control.set_thresholds(intent, actor(request), **given)
        return await self._intent(intent)

    async def clear_thresholds(self, request: Request) -> Response:
        """Return to the thresholds of the configuration."""
        intent = request.path_params["intent"]
        self.ensemble.control.clear_thresholds(intent, actor(request))
        return await self._intent(intent)

    async def start_canary(self, request: Request) -> Response:
        """Give a new expert version or specialist a share of the traffic until a test decides."""
        body = await parse(request, CanaryBody, self.max_body_bytes)
        ensemble, who = self.ensemble, actor(request)
        if body.expert is not None and body.specialist is None and body.intent is None:
            figures = await ensemble.start_canary(body.expert, body.share, who)
        elif body.expert is None and body.specialist is not None and body.intent is not None:
            figures = ensemble.start_specialist_canary(
                body.specialist, body.intent, body.share, who
            )
        else:
            raise InvalidRequest("give an expert, or a specialist and an intent", param="expert")
        await ensemble.keep_changes()
        return answer({"object": "ensemble.canary"} | figures)

    async def stop_canary(self, request: Request) -> Response:
        """Stop a canary, or give an intent back that a specialist took over."""
        subject = request.path_params["subject"]
        figures = self.ensemble.control.canaries.stop(subject, actor(request))
        await self.ensemble.keep_changes()
        return answer({"object": "ensemble.canary"} | figures)

    async def audit(self, request: Request) -> Response:
        """List the changes of the ensemble, newest first: by itself (`control`) and by admins."""
        query = query_of(request, AuditQuery)
        rows = await self.ensemble.audit(query.limit + 1, query.before)
        data = rows[: query.limit]
        more = len(rows) > query.limit
        following = data[-1]["number"] if more else None
        return answer({"object": "list", "data": data, "has_more": more, "next": following})

    async def _intent(self, intent: str) -> Response:
        await self.ensemble.keep_changes()
        shown: dict[str, Any] = self.ensemble.control.intents()[intent]
        return answer({"object": "ensemble.intent", "intent": intent} | shown)

    async def _reason(self, request: Request) -> str:
        """From the body; without one there is none."""
        has_body = "transfer-encoding" in request.headers
        if not has_body and request.headers.get("content-length", "0") == "0":
            return ""
        return (await parse(request, ReasonBody, self.max_body_bytes)).reason


def actor(request: Request) -> str:
    """The admin in the audit log: the digest of the key, never the key."""
    return f"admin {exchange_of(request.scope).tenant}"
