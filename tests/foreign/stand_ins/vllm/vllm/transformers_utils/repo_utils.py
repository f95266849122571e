"""Adapters that a test would fetch are one for the model which is served."""

from __future__ import annotations

from typing import Any

from tests.foreign.server import lora_directory


class _Hub:
    def snapshot_download(self, **_: Any) -> str:
        return str(lora_directory())


def hf_api() -> _Hub:
    return _Hub()
