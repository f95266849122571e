"""grammar: the sampler already constrained the tokens to a grammar, so this only checks that the
grammar reached its end. The argument is the answer's finish_reason."""

from __future__ import annotations

from coterie.core.events import ValidationResult
from coterie.service.validate.base import result_of


class GrammarValidator:
    name = "grammar"

    def __init__(self, argument: str) -> None:
        self._reason = argument

    def check(self, text: str) -> ValidationResult:
        return result_of(self.name, text, self._fault)

    def _fault(self, text: str) -> str | None:
        if self._reason == "stop":
            return None
        return f"it ended ({self._reason}) before its grammar did"
