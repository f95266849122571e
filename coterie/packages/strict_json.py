"""JSON from untrusted sources: limited size, depth and numbers, no duplicate names, strict syntax.

One canonical form, so that a signature covers the content and not the spacing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from coterie.core.errors import WeightsError

MAX_DEPTH = 16
MAX_VALUES = 50_000
# terminals interpret these characters, and readers cannot see them
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def parse(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; raises an error for anything else."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_names, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where}: refused, it is not plain JSON ({error}).") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{where}: refused, it is not a JSON object.")
    _check(value, where)
    return value


def canonical(value: Any) -> bytes:
    """The same bytes for equal values: sorted names, no spaces, ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check(value: Any, where: str) -> None:
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        if count > MAX_VALUES:
            raise WeightsError(f"{where}: refused, more than {MAX_VALUES} values in it.")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
                below += item.keys()
            elif isinstance(item, list):
                below += item
            else:
                _check_plain(item, where)
        if not below:
            return
        level = below
    raise WeightsError(f"{where}: refused, nested deeper than {MAX_DEPTH} levels.")


def _check_plain(item: Any, where: str) -> None:
    if isinstance(item, float) and not math.isfinite(item):
        raise WeightsError(f"{where}: refused, a number in it is too large.")
    if type(item) is int and abs(item) >= 1 << 63:
        raise WeightsError(f"{where}: refused, a number in it is too large.")
    if isinstance(item, str) and _INVISIBLE.search(item):
        raise WeightsError(f"{where}: refused, control characters in its texts.")
