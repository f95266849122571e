"""What a model name asks for: `base`, `adapter`, `base:adapter`, `adapter@version`, `a+b`.

Reads text alone: whether an adapter exists, and whom it fits, is the router's question.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from coterie.core.adapters import MAX_STACK, MAX_WEIGHT
from coterie.core.errors import InvalidRequest, NotFound
from coterie.core.request import AUTO, AdapterHint, RouteHints

# no name is longer, and reading one takes time that grows with its square
MAX_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Asked:
    """`base` is None when the caller leaves it open."""

    base: str | None
    adapters: tuple[AdapterHint, ...] = ()


def read(hints: RouteHints, specialists: Container[str]) -> Asked:
    """A specialist's whole name wins over an adapter's; the longest base name wins before a colon.

    Adapters of the model name come first, then those of the hints.
    """
    model = hints.model or AUTO
    if len(model) > MAX_CHARACTERS:
        raise NotFound(f"no model's name has {len(model)} characters", param="model")
    base, rest = _base(model, specialists)
    named = tuple(AdapterHint(part) for part in rest.split("+")) if rest is not None else ()
    if any(not hint.name for hint in named):
        raise InvalidRequest(f"an expert's name is missing in `{model}`", param="model")
    asked = Asked(base, named + hints.adapters)
    if asked.adapters:
        _check(asked.adapters)
    return asked


def _base(model: str, specialists: Container[str]) -> tuple[str | None, str | None]:
    """(base, what is left for adapters); None where there is none."""
    if model in specialists:
        return model, None
    if model == AUTO:
        return None, None
    end = model.rfind(":")
    while end > 0:
        base = model[:end]
        if base in specialists:
            return base, model[end + 1 :]
        if base == AUTO:
            return None, model[end + 1 :]
        end = model.rfind(":", 0, end)
    return None, model


def _check(hints: tuple[AdapterHint, ...]) -> None:
    if len(hints) > MAX_STACK:
        raise InvalidRequest(
            f"{len(hints)} experts in one request; at most {MAX_STACK} are composed",
            param="experts",
        )
    for hint in hints:
        # a nan fails the comparison
        if not (math.isfinite(hint.weight) and abs(hint.weight) <= MAX_WEIGHT):
            raise InvalidRequest(
                f"the weight of expert `{hint.name}` must be from -{MAX_WEIGHT:.0f} to "
                f"{MAX_WEIGHT:.0f}",
                param="experts",
            )
