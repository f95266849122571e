"""json: the answer, or each code block in it, is JSON as RFC 8259 defines it."""

from __future__ import annotations

import msgspec

from coterie.core.events import ValidationResult
from coterie.service.validate.base import blocks, in_language, result_of

_decode = msgspec.json.Decoder(strict=True).decode


class JsonValidator:
    name = "json"

    def __init__(self, argument: str = "") -> None:
        """With the `argument` "object" the answer must be one JSON object and nothing else."""
        self._strict = argument == "object"

    def check(self, text: str) -> ValidationResult:
        return result_of(self.name, text, self._fault)

    def _fault(self, text: str) -> str | None:
        fault = self._one(text)
        if fault is None or self._strict:
            return fault
        json_blocks = in_language(blocks(text), ("json",))
        if not json_blocks:
            return fault
        return next((wrong for block in json_blocks if (wrong := self._one(block.code))), None)

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
