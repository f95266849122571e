"""Coterie serves many experts as one model. `from coterie import LLM` runs one in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.workers.embedded import LLM

__all__ = ["LLM", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # lazy: `import coterie` must not import torch
    if name == "LLM":
        from coterie.workers.embedded import LLM

        return LLM
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")
