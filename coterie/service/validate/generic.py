"""generic: the answer is not empty. For tasks whose answers have no form that could be checked."""

from __future__ import annotations

from coterie.core.events import ValidationResult
from coterie.service.validate.base import result_of


class GenericValidator:
    name = "generic"

    def __init__(self, argument: str = "") -> None:
        """The argument is not used."""

    def check(self, text: str) -> ValidationResult:
        return result_of(self.name, text, lambda answer: None if answer.strip() else "it is empty")
