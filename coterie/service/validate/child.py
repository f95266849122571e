"""The judge's process: reads answers on its standard input, writes what is wrong with them.

Holds no secret and no file of the server, has little memory, and is killed when it takes too long.
Ends with its input.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import BinaryIO

import msgspec

from coterie.core.errors import CoterieError
from coterie.core.events import ValidationResult
from coterie.service.validate import code, json_schema
from coterie.service.validate.table import VALIDATORS

LENGTH = struct.Struct("!I")
MAX_MEMORY_BYTES = 1_500_000_000
READY = b"ready"


class ValidationTask(msgspec.Struct, array_like=True):
    validator: str
    argument: str
    text: str


def main() -> None:
    tasks, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # whatever a library prints must not look like a result
    os.dup2(2, 1)
    _limit()
    _load()
    _send(results, READY)
    decode, encode = (
        msgspec.msgpack.Decoder(ValidationTask).decode,
        msgspec.msgpack.Encoder().encode,
    )
    while (raw := _receive(tasks)) is not None:
        _send(results, encode(_result(decode(raw))))


def _result(task: ValidationTask) -> ValidationResult:
    try:
        return VALIDATORS[task.validator](task.argument).check(task.text)
    except CoterieError as error:
        return ValidationResult(False, task.validator, error.message)


def _limit() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load() -> None:
    """Slow imports come before any answer's clock starts; what is missing is told when asked."""
    for work in (json_schema.load, lambda: code.parser("javascript")):
        try:
            work()
        except CoterieError:
            continue


def _receive(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _send(stream: BinaryIO, payload: bytes) -> None:
    stream.write(LENGTH.pack(len(payload)) + payload)
    stream.flush()


if __name__ == "__main__":
    main()
