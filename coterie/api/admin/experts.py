"""The admin endpoints for experts: those of the registry, and the two that vLLM has.

This module only translates; `service/adapters/admin.py` does the work. The door has already checked
the admin key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from coterie.api.body import QueryParameters, RequestBody, parse, query_of, read
from coterie.api.body_fields import Name
from coterie.api.door import exchange_of
from coterie.api.errors import encode
from coterie.core.adapters import AdapterCard
from coterie.core.errors import InvalidRequest, NotFound
from coterie.obs.log import log
from coterie.service.adapters.admin import AdapterAdmin, InstallName
from coterie.service.ensemble import EnsembleService

JSON = "application/json"
# uploads at the same time; each keeps its whole package in memory
MAX_UPLOADS = 2
# a canary's share of the requests, if the caller gives none
CANARY_SHARE = 0.05


class ExpertEndpoints:
    def __init__(
        self,
        admin: AdapterAdmin,
        ensemble: EnsembleService,
        max_body_bytes: int,
        max_upload_bytes: int,
    ) -> None:
        self.admin = admin
        self.ensemble = ensemble
        self.max_body_bytes = max_body_bytes
        self.max_upload_bytes = max_upload_bytes
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)

    async def list_experts(self, request: Request) -> Response:
        """List every installed version, and which version each name and alias means."""
        current = self.admin.current()
        data = [self._fields(card) for card in self.admin.cards()]
        aliases = {n: _id(card) for n, card in current.items() if n != card.name}
        return answer({"object": "list", "data": data, "aliases": aliases})

    async def install_expert(self, request: Request) -> Response:
        """Install an expert: send the bytes of a package, or JSON with a path on this machine. The
        first version of a name becomes current, a later one is staged until it is promoted."""
        now = query_of(request, InstallQuery).now
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == JSON:
            body = await parse(request, InstallBody, self.max_body_bytes)
            path = absolute(body.path, "path")
            name = InstallName(body.name, body.version)
            card = await self.admin.install(path, name, body.base, now or body.now)
        else:
            async with self._uploads:
                data = await read(request, self.max_upload_bytes)
                if not data:
                    raise InvalidRequest("the body is empty: send an .expert file's bytes")
                # still inside: a package that waits for the registry is in memory too
                card = await self.admin.install(data, now=now)
        return self._changed(request, card, 201)

    async def show_expert(self, request: Request) -> Response:
        """Show one expert, its versions and its manifest."""
        shown = await self.admin.show(*_name_and_version(request))
        versions = [self._fields(card) for card in shown.versions]
        more = {"versions": versions, "manifest": shown.manifest}
        return answer(self._fields(shown.card) | more)

    async def change_expert(self, request: Request) -> Response:
        """Make an installed version the current one, or give it an alias. Takes effect at once."""
        name, version = _name_and_version(request)
        body = await parse(request, ExpertPatch, self.max_body_bytes)
        if body.version is None and body.alias is None:
            raise InvalidRequest("give a version, an alias, or both", param="version")
        card = await self.admin.alias(body.alias or name, name, body.version or version)
        return self._changed(request, card)

    async def act_on_expert(self, request: Request) -> Response:
        """Promote, pin, unpin or roll back one expert. `promote` starts a canary where checks or a
        floor can judge the version, and makes it current at once elsewhere."""
        name, version = _name_and_version(request)
        action = request.path_params["action"]
        if action == "promote":
            return await self._promote(request)
        if action in ("pin", "unpin"):
            return self._changed(request, await self.admin.pin(name, action == "pin", version))
        if action == "rollback":
            if version is not None:
                raise InvalidRequest("a rollback takes no version: PATCH makes one current")
            return self._changed(request, await self.admin.rollback(name))
        raise NotFound("an expert can be told to promote, pin, unpin or rollback", param="action")

    async def _promote(self, request: Request) -> Response:
        share = CANARY_SHARE
        headers = request.headers
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            share = (await parse(request, PromoteBody, self.max_body_bytes)).share
        who = f"admin {exchange_of(request.scope).tenant}"
        card, canary = await self.ensemble.promote(request.path_params["name"], share, who)
        await self.ensemble.keep_changes()
        audit(request, card)
        return answer(self._fields(card) | {"canary": canary})

    def _fields(self, card: AdapterCard) -> dict[str, Any]:
        """The card as these endpoints return it. `current`: whether its name alone means it."""
        return fields(card) | {"current": card == self.admin.current().get(card.name)}

    def _changed(self, request: Request, card: AdapterCard, status: int = 200) -> Response:
        audit(request, card)
        return answer(self._fields(card), status)

    async def delete_expert(self, request: Request) -> Response:
        """Remove an expert, or one version of it. Requests that use it run to their end."""
        name, version = _name_and_version(request)
        audit(request, await self.admin.remove(name, version))
        return answer({"id": request.path_params["name"], "object": "expert", "deleted": True})

    async def load_lora_adapter(self, request: Request) -> Response:
        """Load an adapter under a name that you choose, as vLLM does."""
        body = await parse(request, LoadLoraBody, self.max_body_bytes)
        if not body.lora_name or not body.lora_path:
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
        path = absolute(body.lora_path, "lora_path")
        audit(
            request,
            await self.admin.load(body.lora_name, path, body.base_model_name, body.load_inplace),
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Remove an adapter by its name, as vLLM does."""
        body = await parse(request, UnloadLoraBody, self.max_body_bytes)
        if not body.lora_name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
        try:
            audit(request, await self.admin.remove(body.lora_name))
        except NotFound:
            raise NotFound(f"The lora adapter '{body.lora_name}' cannot be found.") from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def fields(card: AdapterCard) -> dict[str, Any]:
    """What the card says."""
    return {
        "id": _id(card),
        "object": "expert",
        "name": card.name,
        "version": card.version,
        "digest": card.digest,
        "kind": card.kind,
        "bases": card.bases,
        "num_virtual_tokens": card.num_virtual_tokens,
        "bytes": card.nbytes,
        "installed_at": int(card.installed_at),
        "signer": card.signer or None,
        "pinned": card.pinned,
        "description": card.description,
    }


def audit(request: Request, card: AdapterCard) -> None:
    """Log which admin changed what. The log has the digest of the key, never the key."""
    exchange = exchange_of(request.scope)
    log(
        "experts_changed",
        model=f"{_id(card)}#{card.digest[:8]}",
        method=request.method,
        route=request.scope["route"].path,
        request_id=exchange.request_id,
        tenant_digest=exchange.tenant,
    )


def answer(payload: Any, status: int = 200) -> Response:
    return Response(encode(payload), status, None, JSON)


def absolute(text: str, param: str) -> Path:
    """Accept absolute paths only: a relative path would depend on the server's working folder."""
    path = Path(text)
    if "\0" in text or not path.is_absolute() or ".." in path.parts:
        raise InvalidRequest(f"{param}: write an absolute path on the server", param=param)
    return path


def _name_and_version(request: Request) -> tuple[str, str | None]:
    """Name and version. `name@` means an empty version, which does not exist; it does not mean all
    versions."""
    name, at, version = request.path_params["name"].partition("@")
    return name, version if at else None


def _id(card: AdapterCard) -> str:
    return f"{card.name}@{card.version}"


FilePath = Annotated[str, Field(min_length=1, max_length=4096)]


class InstallBody(RequestBody):
    """A `.expert` file or a PEFT directory on the server's machine."""

    path: FilePath
    name: Name | None = None
    version: Name | None = None
    # the specialist of an adapter without a manifest; by default the first specialist
    base: Name | None = None
    # make it current even if its name has a current version
    now: bool = False


class InstallQuery(QueryParameters):
    now: bool = Field(False, description="Make it current even if its name has a current version.")


class PromoteBody(RequestBody):
    """How many of the requests a canary gets."""

    share: float = Field(CANARY_SHARE, gt=0, le=0.5, description="Of the traffic.")


class ExpertPatch(RequestBody):
    """`version` makes an installed version the current one; `alias` gives it another name too."""

    version: Name | None = None
    alias: Name | None = None


class LoadLoraBody(RequestBody):
    """The body that vLLM defines."""

    lora_name: str | None = Field(None, max_length=128)
    lora_path: str | None = Field(None, max_length=4096)
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadLoraBody(RequestBody):
    """The body that vLLM defines."""

    lora_name: str | None = Field(None, max_length=128)
    lora_int_id: int | None = None
