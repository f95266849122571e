"""Who answers: by the model name a caller sent, with the sampling values that were left open.

Knows specialists by name and generation_config; knows no replicas, queues, blocks or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.core.errors import NotFound
from coterie.core.plan import RoutePlan
from coterie.core.request import InferenceRequest, Sampling
from coterie.core.resolve import VENDOR_DEFAULTS, resolve_sampling

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Specialist:
    """What the router knows about one: its name and its model's generation_config."""

    name: str
    generation: Mapping[str, Any] = field(default_factory=dict)


class Router:
    """Plans by name. The first specialist answers `auto` and requests that name nobody."""

    def __init__(self, specialists: Sequence[Specialist]) -> None:
        self._specialists = {item.name: item for item in specialists}
        self._default = specialists[0].name

    def resolve(self, model: str | None) -> str:
        """The specialist a name stands for."""
        name = self._default if model in (None, "", AUTO) else model
        if name not in self._specialists:
            known = ", ".join(self._specialists)
            raise NotFound(f"The model `{name}` does not exist; there is: {known}", param="model")
        return str(name)

    def plan(self, request: InferenceRequest, vendor: Sampling = VENDOR_DEFAULTS) -> RoutePlan:
        """Decide. `vendor` holds what the caller's dialect documents for values left open."""
        asked = request.hints.model
        name = self.resolve(asked)
        reason = "named by the caller" if asked == name else "default specialist"
        return RoutePlan(
            request_id=request.id,
            specialist=name,
            alternates=(),
            adapters=(),
            sampling=resolve_sampling(request.sampling, self._specialists[name].generation, vendor),
            shadow=None,
            confidence=1.0,
            reasons=(reason,),
        )
