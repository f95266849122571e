"""pattern: the whole answer matches the regular expression in its adapter's package.

White space around the answer is ignored. Runs in a validator process, because a pattern may run
forever, unless `pattern_cost.py` finds that this one cannot.
"""

from __future__ import annotations

import re

from coterie.core.events import ValidationResult
from coterie.service.validate.base import result_of


class PatternValidator:
    name = "pattern"

    def __init__(self, argument: str) -> None:
        self._pattern = argument

    def check(self, text: str) -> ValidationResult:
        return result_of(self.name, text, self._fault)

    def _fault(self, text: str) -> str | None:
        if re.fullmatch(self._pattern, text.strip()):
            return None
        return "it has not the form that the expert's answers have"
