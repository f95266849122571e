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
from functools import lru_cache
from typing import IO, Any

from coterie.core.errors import CoterieError

FIELDS = frozenset(
    {
        "address", "attempt", "backoff_s", "cached_tokens", "changed", "code", "completion_tokens",
        "config_digest", "device",
        "dialect", "dtype", "duration_ms", "exit_code", "finish_reason", "first_token_ms", "frames",
        "method", "model", "num_preemptions", "path", "pending", "pid", "port", "prompt_tokens",
        "queue_ms", "reason", "replica", "request_id", "retry_after_s", "route", "signal", "state",
        "status", "stream", "tenant_digest", "threads", "trace_id", "version", "wait_s",
    }
)  # fmt: skip

_LOGGER = logging.getLogger("coterie")
_NUMBERS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class JsonLogFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "event": ..., fields}` in that order."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if record.name != _LOGGER.name:
            line["logger"] = record.name
        line.update((name, value) for name, value in vars(record).items() if name in FIELDS)
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = _described(record.exc_info[1])
        return _encode(line)


_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


def _stamp(at: float) -> str:
    return f"{_second(int(at))}.{int(at % 1 * 1000):03d}Z"


@lru_cache(maxsize=2)
def _second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


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
    _Lines.handler = handler


class _Lines:
    """Where lines of this program go without the detour over `logging`, which takes several times
    as long: there is one line per request."""

    handler: logging.StreamHandler[IO[str]] | None = None

    @classmethod
    def write(cls, event: str, level: str, fields: dict[str, Any]) -> bool:
        """Whether the line was written; not if someone else has taken over the root logger."""
        handler = cls.handler
        if handler is None or logging.root.handlers != [handler]:
            return False
        line = {"time": _stamp(time.time()), "level": level, "event": event, **fields}
        text = _encode(line) + handler.terminator
        handler.acquire()
        try:
            handler.stream.write(text)
            handler.stream.flush()
        except (OSError, ValueError):
            # nobody reads it
            pass
        finally:
            handler.release()
        return True


def log(
    event: str, *, level: str = "info", error: BaseException | None = None, **fields: Any
) -> None:
    """Write one line. A field name outside `FIELDS` is a programming error."""
    if not FIELDS.issuperset(fields):
        raise ValueError(f"not a log field: {sorted(fields.keys() - FIELDS)}")
    number = _NUMBERS[level]
    if _LOGGER.isEnabledFor(number):
        given = {name: value for name, value in fields.items() if value is not None}
        if error is None and _Lines.write(event, level, given):
            return
        exc_info = (type(error), error, error.__traceback__) if error is not None else None
        _LOGGER.log(number, event, exc_info=exc_info, extra=given)
