"""Sampling fields of the bodies: ranges from `core/sampling.py`, which an API may narrow."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from coterie.core.sampling import MAX_TOKENS, MIN_TOKENS, SAMPLING_FIELDS, SamplingField

# a top_p of 0 means "only the likeliest token"; the engine wants it above 0
_SMALLEST_TOP_P = 1e-9


def sampling_field(
    name: str, low: float | None = None, high: float | None = None, description: str | None = None
) -> Any:
    """The field of that name, in a narrower range where one is given. None = it was left out."""
    field = SAMPLING_FIELDS[name].narrowed(low, high)
    return Field(None, **bounds(field), description=description)


def bounds(field: SamplingField) -> dict[str, Any]:
    """As pydantic's `Field` takes them."""
    return {"gt" if field.above_low else "ge": _short(field.low), "le": _short(field.high)}


def _short(bound: float) -> float:
    """As people write it in messages and schemas: 2, not 2.0."""
    return int(bound) if bound == int(bound) else bound


MaxTokens = Annotated[int, Field(**bounds(MAX_TOKENS))]
MinTokens = Annotated[int, Field(**bounds(MIN_TOKENS))]


def top_p_from_zero() -> Any:
    """For the vendors whose callers may send 0, which `positive_top_p` reads."""
    return Field(None, ge=0, le=_short(SAMPLING_FIELDS["top_p"].high))


def positive_top_p(top_p: float | None) -> float | None:
    return None if top_p is None else max(top_p, _SMALLEST_TOP_P)


def seed_of(seed: int | None) -> int | None:
    return None if seed is None else seed % 2**63
