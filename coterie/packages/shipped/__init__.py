"""The experts that come with Coterie: adapters for the default model, each in a signed file."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.expert"))
