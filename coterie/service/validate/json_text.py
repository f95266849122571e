"""json: the answer, or each code block in it, is JSON as RFC 8259 has it."""

from __future__ import annotations

import msgspec

from coterie.core.events import ValidationResult
from coterie.service.validate.base import blocks, judged

_decode = msgspec.json.Decoder(strict=True).decode


class JsonValidator:
    name = "json"

    def __init__(self, argument: str = "") -> None:
        """`argument` "object" asks for an object, and for nothing around it."""
        self._strict = argument == "object"

    def check(self, text: str) -> ValidationResult:
        return judged(self.name, text, self._fault)

    def _fault(self, text: str) -> str | None:
        fault = self._one(text)
        if fault is None or self._strict:
            return fault
        found = [block for block in blocks(text) if block.language in ("", "json")]
        if not found:
            return fault
        return next((wrong for block in found if (wrong := self._one(block.code))), None)

    def _one(self, text: str) -> str | None:
        try:
            value = _decode(text.encode("utf-8", "surrogatepass"))
        except msgspec.MsgspecError as error:
            return str(error)
        except UnicodeDecodeError:
            return "it is not valid Unicode"
        if self._strict and not isinstance(value, dict):
            return "it is not a JSON object"
        return None
