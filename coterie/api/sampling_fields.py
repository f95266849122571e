"""Sampling fields of the request bodies. Ranges come from `core/sampling.py`; an API may narrow
them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from coterie.core.sampling import MAX_TOKENS, MIN_TOKENS, SAMPLING_FIELDS, SamplingField

# a top_p of 0 means "only the likeliest token"; the engine wants it above 0
_SMALLEST_TOP_P = 1e-9


def sampling_field(
    name: str, low: float | None = None, high: float | None = None, description: str | None = None
) -> Any:
    """The field of that name, in a narrower range if one is given. Its value is None if the body
    leaves it out."""
    field = SAMPLING_FIELDS[name].narrowed(low, high)
    return Field(None, **bounds(field), description=description)


def bounds(field: SamplingField) -> dict[str, Any]:
    """The range as arguments of pydantic's `Field`."""
    return {"gt" if field.above_low else "ge": _short(field.low), "le": _short(field.high)}


def _short(bound: float) -> float:
    """The number as messages and schemas show it: 2, not 2.0."""
    return int(bound) if bound == int(bound) else bound


MaxTokens = Annotated[int, Field(**bounds(MAX_TOKENS))]
MinTokens = Annotated[int, Field(**bounds(MIN_TOKENS))]


def top_p_from_zero() -> Any:
    """`top_p` for the vendors that allow 0; `positive_top_p` translates it."""
    return Field(None, ge=0, le=_short(SAMPLING_FIELDS["top_p"].high))


def positive_top_p(top_p: float | None) -> float | None:
    return None if top_p is None else max(top_p, _SMALLEST_TOP_P)


def seed_of(seed: int | None) -> int | None:
    return None if seed is None else seed % 2**63
