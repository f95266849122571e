"""grammar: tokens were held to a grammar while they were drawn; here only whether it came to its
end. The argument is the answer's finish_reason."""

from __future__ import annotations

from coterie.core.events import ValidationResult
from coterie.service.validate.base import judged


class GrammarValidator:
    name = "grammar"

    def __init__(self, argument: str) -> None:
        self._reason = argument

    def check(self, text: str) -> ValidationResult:
        return judged(self.name, text, self._fault)

    def _fault(self, text: str) -> str | None:
        if self._reason == "stop":
            return None
        return f"it ended ({self._reason}) before its grammar did"
