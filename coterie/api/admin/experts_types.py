"""Bodies that name experts: in a request's `experts` field, and at the admin endpoints.

Here the wire's word "expert" becomes the code's word adapter.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coterie.api.body import Body
from coterie.core.adapters import MAX_STACK, MAX_WEIGHT
from coterie.core.request import AdapterHint

Name = Annotated[str, Field(min_length=1, max_length=128)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]


class ExpertItem(Body):
    """One expert of a request, `name` or `name@version`, and how strongly it applies."""

    name: Name
    weight: float = Field(1.0, ge=-MAX_WEIGHT, le=MAX_WEIGHT)


# the order is the order in which they are composed
Experts = Annotated[list[ExpertItem], Field(max_length=MAX_STACK)]


def adapter_hints(experts: list[ExpertItem] | None) -> tuple[AdapterHint, ...]:
    return tuple(AdapterHint(item.name, item.weight) for item in experts or ())


class InstallBody(Body):
    """A `.expert` file or a PEFT directory on the server's machine."""

    path: FilePath
    name: Name | None = None
    version: Name | None = None
    # the specialist that an adapter without a manifest is for; the first one when left out
    base: Name | None = None


class ExpertPatch(Body):
    """`version` makes an installed version the current one; `alias` gives it another name too."""

    version: Name | None = None
    alias: Name | None = None


class LoadLoraBody(Body):
    """vLLM's."""

    lora_name: str | None = Field(None, max_length=128)
    lora_path: str | None = Field(None, max_length=4096)
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadLoraBody(Body):
    """vLLM's."""

    lora_name: str | None = Field(None, max_length=128)
    lora_int_id: int | None = None
