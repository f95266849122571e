"""One row of the table of metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter's name is written with `_total` behind it."""

    name: str
    kind: str  # counter | gauge | histogram
    doc: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
