"""generic: there is an answer at all. For tasks whose form nobody can check."""

from __future__ import annotations

from coterie.core.events import ValidationResult
from coterie.service.validate.base import judged


class GenericValidator:
    name = "generic"

    def __init__(self, argument: str = "") -> None:
        """Nothing to say."""

    def check(self, text: str) -> ValidationResult:
        return judged(self.name, text, lambda answer: None if answer.strip() else "it is empty")
