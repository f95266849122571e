"""The expert fields that request bodies of every dialect have, and their translation to
adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coterie.api.body import RequestBody
from coterie.core.adapters import MAX_STACK, MAX_WEIGHT
from coterie.core.request import AdapterHint

Name = Annotated[str, Field(min_length=1, max_length=128)]


class ExpertItem(RequestBody):
    """One expert of a request, `name` or `name@version`, and how strongly it applies."""

    name: Name
    weight: float = Field(1.0, ge=-MAX_WEIGHT, le=MAX_WEIGHT)


# adapters are composed in the order of this list
Experts = Annotated[list[ExpertItem], Field(max_length=MAX_STACK)]


def adapter_hints(experts: list[ExpertItem] | None) -> tuple[AdapterHint, ...]:
    return tuple(AdapterHint(item.name, item.weight) for item in experts or ())
