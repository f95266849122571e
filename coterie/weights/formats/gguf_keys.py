"""Metadata of a GGUF file below its architecture's prefix, checked. Knows no key's meaning."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.core.errors import WeightsError
from coterie.weights.formats.gguf import GGUFFile


class Keys:
    """Metadata below the architecture's prefix, with a sentence for each thing that is wrong."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.wrong(key, value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.wrong(key, value)
        return short(float(value))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and value not in (0, 1):
            raise self.wrong(key, value)
        return default if value is None else bool(value)

    def refuse_unless(self, key: str, expected: int) -> None:
        """A missing key means what is expected."""
        value = self.get(key)
        if value is not None and value != expected:
            raise WeightsError(
                f"{self.file.path}: {self.prefix}.{key} is {str(value)[:60]}; only {expected} is "
                "supported for this architecture. Use another model."
            )

    def wrong(self, key: str, value: Any) -> WeightsError:
        what = "is missing" if value is None else f"is {str(value)[:60]}, which makes no sense"
        return WeightsError(
            f"{self.file.path}: metadata {self.prefix}.{key} {what}. Convert the model again."
        )


def short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return value if isinstance(value, int) else float(str(np.float32(value)))
