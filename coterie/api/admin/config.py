"""The admin endpoints for the settings: what is in force, and reading the file again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from coterie.api.admin.experts import answer
from coterie.api.door import exchange_of
from coterie.obs.log import log
from coterie.service.pipeline import Pipeline
from coterie.service.reload import ReloadResult


class SettingsReloader(Protocol):
    """The part of `service.reload.ConfigReloader` that these endpoints use."""

    async def reload(self) -> ReloadResult: ...


class ConfigEndpoints:
    def __init__(self, pipeline: Pipeline, reloader: SettingsReloader) -> None:
        self.pipeline, self.reloader = pipeline, reloader

    async def show_config(self, request: Request) -> Response:
        """Show the settings that are in force and their digest, which receipts carry."""
        snapshot, fleet = self.pipeline.snapshot.config, self.pipeline.fleet
        fixed = {
            name: [asdict(item) for item in stack] for name, stack in snapshot.adapters.items()
        }
        shown: dict[str, Any] = {
            "object": "config",
            "digest": snapshot.digest,
            "specialists": list(fleet.names_in_order),
            "fixed_experts": fixed,
            "settings": asdict(fleet.config),
        }
        return answer(shown)

    async def reload_config(self, request: Request) -> Response:
        """Read the file of settings and the key files again. All of it takes effect, or none."""
        result = await self.reloader.reload()
        exchange = exchange_of(request.scope)
        await self.pipeline.ensemble.note(
            f"admin {exchange.tenant}",
            "config_reloaded",
            result.digest,
            {"changed": list(result.changed), "before": result.digest_before},
        )
        log(
            "config_reload_asked",
            request_id=exchange.request_id,
            tenant_digest=exchange.tenant,
            config_digest=result.digest,
        )
        return answer(
            {
                "object": "config.reload",
                "digest": result.digest,
                "previous_digest": result.digest_before,
                "changed": result.changed,
            }
        )
