"""How deep plain JSON values are nested. What walks them by recursion ends at a thousand levels."""

from __future__ import annotations

from typing import Any


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in each other more than `levels` deep."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        layer = [
            item
            for part in layer
            if isinstance(part, (dict, list))
            for item in (part.values() if isinstance(part, dict) else part)
        ]
        if not layer:
            return False
    return True
