"""Log lines as JSON objects, one per line, linked by request ids.

Defines what may be written: a fixed list of field names (also for `extra=` of stdlib loggers), so
that no field can hold a prompt, an answer or a key. Tracebacks hold the exception's type and
frames, never its message (it may quote a caller's input); a CoterieError adds its code.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import IO, Any

from coterie.core.errors import CoterieError

FIELDS = frozenset(
    {
        "address", "attempt", "backoff_s", "cached_tokens", "code", "completion_tokens", "device",
        "dialect", "dtype", "duration_ms", "exit_code", "finish_reason", "first_token_ms", "frames",
        "method", "model", "num_preemptions", "path", "pending", "pid", "port", "prompt_tokens",
        "queue_ms", "reason", "replica", "request_id", "retry_after_s", "route", "signal", "state",
        "status", "stream", "tenant_digest", "threads", "version", "wait_s",
    }
)  # fmt: skip

_LOGGER = logging.getLogger("coterie")


class JsonLogFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "event": ..., fields}` in that order."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if record.name != _LOGGER.name:
            line["logger"] = record.name
        line.update((name, value) for name, value in vars(record).items() if name in FIELDS)
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = _described(record.exc_info[1])
        return json.dumps(line, default=str, separators=(",", ":"))


def _described(error: BaseException) -> dict[str, Any]:
    frames = [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    described: dict[str, Any] = {"type": type(error).__name__, "frames": frames}
    if isinstance(error, CoterieError):
        described["code"] = error.code
    return described


def configure(level: str = "info", stream: IO[str] | None = None) -> None:
    """Send every log line of this process, other libraries' included, to `stream` as JSON."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonLogFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def log(
    event: str, *, level: str = "info", error: BaseException | None = None, **fields: Any
) -> None:
    """Write one line. A field name outside `FIELDS` is a programming error."""
    unknown = fields.keys() - FIELDS
    if unknown:
        raise ValueError(f"not a log field: {sorted(unknown)}")
    number = logging.getLevelName(level.upper())
    if _LOGGER.isEnabledFor(number):
        given = {name: value for name, value in fields.items() if value is not None}
        exc_info = (type(error), error, error.__traceback__) if error is not None else None
        _LOGGER.log(number, event, exc_info=exc_info, extra=given)
