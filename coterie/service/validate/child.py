"""The program of a validator process: it receives answers and returns what is wrong with them.

The process has no secrets and no open files of the server, little memory, and is killed if it takes
too long.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from coterie.core.child_protocol import serve
from coterie.core.errors import CoterieError, InvalidRequest
from coterie.core.events import ValidationResult
from coterie.service.slo.evidence import OPEN
from coterie.service.validate import code, json_schema
from coterie.service.validate.prefix import prefix_kind
from coterie.service.validate.table import VALIDATORS

MAX_MEMORY_BYTES = 1_500_000_000


class ValidationTask(msgspec.Struct, array_like=True):
    validator: str
    argument: str
    text: str
    # the answer was cut: the result is its kind
    is_prefix: bool = False


def main() -> None:
    serve(_validator_of, memory_bytes=MAX_MEMORY_BYTES)


def _validator_of(first: bytes) -> Callable[[bytes], bytes]:
    _load()
    decode, encode = (
        msgspec.msgpack.Decoder(ValidationTask).decode,
        msgspec.msgpack.Encoder().encode,
    )
    return lambda question: encode(_result(decode(question)))


def _result(task: ValidationTask) -> ValidationResult | str | None:
    """None if what the caller demands of an answer cannot be checked."""
    try:
        if task.is_prefix:
            return prefix_kind(task.validator, task.argument, task.text)
        return VALIDATORS[task.validator](task.argument).check(task.text)
    except CoterieError as error:
        if task.is_prefix:
            return OPEN
        if isinstance(error, InvalidRequest):
            return None
        # without a name: the check itself does not work
        return ValidationResult(False, "", error.message)


def _load() -> None:
    """Do the slow imports before the first answer is timed. A missing package is reported when an
    answer needs it."""
    for work in (json_schema.load, lambda: code.parser("javascript")):
        try:
            work()
        except CoterieError:
            continue


if __name__ == "__main__":
    main()
