"""What a request reads of the settings: one object from its start to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coterie.core.errors import Forbidden, Unauthenticated
from coterie.core.request import EVERY_RIGHT, InferenceRequest, KeyRights, RouteHints
from coterie.core.snapshot import EnsembleConfig
from coterie.routing.router import Router
from coterie.service.validate.command import ValidatorCommands


@dataclass(frozen=True, slots=True)
class ServingSnapshot:
    """The settings, and what was made of them. A reload replaces it as a whole."""

    config: EnsembleConfig
    router: Router
    commands: ValidatorCommands

    def fixed_digests(self, specialist: str) -> frozenset[str]:
        """Of the adapters that the specialist always runs with."""
        return frozenset(item.digest for item in self.config.adapters.get(specialist, ()))

    def with_rights(self, rights: Mapping[str, KeyRights] | None) -> ServingSnapshot:
        return replace(self, config=replace(self.config, rights=rights))

    def allowed(self, tenant: str) -> tuple[str, ...]:
        """The specialists that the tenant may use; empty = all."""
        usable = self.config.may_use(tenant)
        # encoders are in the list too
        allowed = tuple(name for name in usable if name in self.config.specialists)
        if usable and not allowed:
            raise Forbidden(
                "this key may use encoders alone, and no model that writes text", param="model"
            )
        return allowed

    def with_allowed(self, hints: RouteHints, tenant: str) -> RouteHints:
        """`hints` limited to what the tenant may use."""
        allowed, experts = self.allowed(tenant), self.config.may_use_experts(tenant)
        if (hints.allowed, hints.allowed_experts) == (allowed, experts):
            return hints
        return replace(hints, allowed=allowed, allowed_experts=experts)

    def within_rights(self, request: InferenceRequest) -> InferenceRequest:
        """`request` limited to the rights of its tenant. Refuses a tenant that lost its key since
        the request was received; what was accepted before, as a job was, still runs."""
        rights = self.config.rights_of(request.tenant)
        if rights is None:
            if request.submitted_at is None:
                raise Unauthenticated("this API key is not known here any more")
            rights = EVERY_RIGHT
        limits, hints = request.limits, self.with_allowed(request.hints, request.tenant)
        priority = min(limits.priority, rights.priority)
        given = limits.priority, limits.max_running, limits.share
        if given == (priority, rights.max_running, rights.share) and hints is request.hints:
            return request
        limits = replace(
            limits, priority=priority, max_running=rights.max_running, share=rights.share
        )
        return replace(request, limits=limits, hints=hints)
