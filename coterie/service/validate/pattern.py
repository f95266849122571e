"""pattern: the whole answer matches the regular expression that its adapter's package states.

White space around the answer does not count. Runs in the judge's process only: a pattern may take
for ever.
"""

from __future__ import annotations

import re

from coterie.core.events import ValidationResult
from coterie.service.validate.base import judged


class PatternValidator:
    name = "pattern"

    def __init__(self, argument: str) -> None:
        self._pattern = argument

    def check(self, text: str) -> ValidationResult:
        return judged(self.name, text, self._fault)

    def _fault(self, text: str) -> str | None:
        if re.fullmatch(self._pattern, text.strip()):
            return None
        return "it has not the form that the expert's answers have"
