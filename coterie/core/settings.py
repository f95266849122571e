"""What one key of a settings file accepts: types, ranges, sizes, and the error for other values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from coterie.core.errors import ConfigError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, slots=True)
class SettingRule:
    """What a key accepts, and the text that documents it."""

    doc: str
    kind: str  # text | integer | number | flag | bytes | list | budget | name | table
    low: float | None = None
    high: float | None = None
    among: tuple[Any, ...] = ()
    # the settings of a table
    table: type[Any] | None = None


def key(default: Any, kind: str, doc: str, **limits: Any) -> Any:
    return field(default=default, metadata={"rule": SettingRule(doc, kind, **limits)})


def inner_table(doc: str, kind: type[Any]) -> dict[str, SettingRule]:
    """The metadata of a field that is a table of its own."""
    return {"rule": SettingRule(doc, "table", table=kind)}


def refuse_unknown(given: Iterable[str], known: Iterable[str], prefix: str) -> None:
    known = list(known)
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        full = f"{prefix}.{key}" if prefix else key
        raise ConfigError(f"unknown setting {full!r}: did you mean {near!r}?", param=full)


def checked(rule: SettingRule, value: Any, name: str) -> Any:
    value = _typed(rule.kind, value, name)
    if rule.among and value not in rule.among:
        listed = ", ".join(str(item) for item in rule.among)
        raise ConfigError(f"{name} is {value!r}; it must be one of {listed}", param=name)
    if rule.low is not None and value < rule.low:
        raise ConfigError(f"{name} is {value}; it must be at least {rule.low}", param=name)
    if rule.high is not None and value > rule.high:
        raise ConfigError(f"{name} is {value}; it must be at most {rule.high}", param=name)
    return value


def _typed(kind: str, value: Any, name: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "flag" and isinstance(value, bool):
        return value
    if kind == "integer" and number and isinstance(value, int):
        return value
    if kind == "name" and isinstance(value, str) and re.fullmatch(r"[\w.-]{1,64}", value):
        return value
    if kind == "budget" and isinstance(value, (str, int)) and not isinstance(value, bool):
        return parse_budget(value, name)
    # nan and inf are refused: both fail this comparison
    if kind == "number" and number and -1e300 < value < 1e300:
        return float(value)
    if kind == "bytes" and (isinstance(value, str) or (number and isinstance(value, int))):
        return parse_bytes(value, name)
    is_list = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    if kind == "list" and is_list:
        return tuple(value)
    expected = {
        "text": "text in quotes",
        "flag": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "bytes": 'a number of bytes or a size such as "2GB"',
        "list": "a list of texts",
        "name": "a name of letters, digits and . _ -, at most 64",
        "budget": 'a size such as "2GB" or a share such as "25%"',
        "table": "a table",
    }[kind]
    raise ConfigError(f"{name} is {value!r}; it must be {expected}", param=name)


def parse_bytes(value: str | int, name: str = "size") -> int:
    """`2GB` is 2 * 10**9, `2GiB` is 2 * 2**30, a bare number is bytes."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name} is {value!r}; write a size such as 400KB, 2GB or 2GiB", param=name
        )
    return int(float(match[1]) * unit)


def parse_budget(value: str | int, name: str = "budget") -> str:
    """A size, or a share of all MoE experts; checked, and returned as it was written."""
    text = str(value).strip()
    if not text:
        return ""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if share is None:
        try:
            parse_bytes(text, name)
        except ConfigError:
            raise ConfigError(
                f"{name} is {value!r}; write a size such as 6GB or a share such as 25%", param=name
            ) from None
    elif not 0 <= float(share[1]) <= 100:
        raise ConfigError(f"{name} is {value!r}; a share is 0% to 100%", param=name)
    return text


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return "[]" if value == () else str(value)


def allowed(rule: SettingRule) -> str:
    if rule.among:
        return ", ".join(f"`{item}`" for item in rule.among)
    if rule.low is not None and rule.high is not None:
        return f"{rule.low} to {rule.high}"
    return f"from {rule.low}" if rule.low is not None else ""


# a validator can be bound to these, or to an adapter's name
TASK_TYPES = (
    "json_parsing",
    "code_generation",
    "classification",
    "extraction",
    "transformation",
    "creative_writing",
    "question_answering",
    "conversation",
)


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """How experts are chosen for requests that name none."""

    enabled: bool = key(True, "flag", "Choose experts by content; off = `auto` is the base alone.")
    threshold: float = key(
        0.0, "number", "Least probability of an expert; 0 = as calibrated.", low=0, high=1
    )
    max_experts: int = key(
        10, "integer", "Most experts chosen for a request that sets no limit.", low=1, high=10
    )
    similarity_weight: float = key(0.5, "number", "Share of similarity in a score.", low=0, high=1)
    success_weight: float = key(0.3, "number", "Share of the rate of success.", low=0, high=1)
    memory_weight: float = key(0.2, "number", "Share of the room that is left.", low=0, high=1)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Jobs that are answered later, and the log of what was answered."""

    max_queued: int = key(
        1000, "integer", "Jobs that may wait; one more is answered 429.", low=1, high=1_000_000
    )
    concurrency: int = key(16, "integer", "Jobs that run at once.", low=1, high=1024)
    keep_s: float = key(
        7 * 86400.0, "number", "Seconds a finished job can be asked for.", low=60, high=1e9
    )
    max_records: int = key(
        100_000, "integer", "Requests kept in the log of inferences; the oldest go first.", low=0
    )


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Batches of requests (`/v1/batches`, `/v1/messages/batches`) that are answered within a
    day."""

    max_requests: int = key(50_000, "integer", "Most requests of one batch.", low=1, high=1_000_000)
    max_open: int = key(
        100, "integer", "Batches of one tenant that have not ended; one more is answered 429.",
        low=1, high=10_000,
    )  # fmt: skip
    concurrency: int = key(
        8,
        "integer",
        "Requests of batches that run at once, all at the lowest priority.",
        low=1,
        high=1024,
    )


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Files of `/v1/files`, and the results of batches."""

    max_bytes: int = key(
        200 * 10**6, "bytes", "Largest file that can be uploaded; a larger one is answered 413.",
        low=1024,
    )  # fmt: skip
    max_tenant_bytes: int = key(
        2 * 10**9,
        "bytes",
        "Size of all files and open batches of one tenant; past it uploads are refused.",
        low=1024,
    )
    max_total_bytes: int = key(
        20 * 10**9,
        "bytes",
        "Size of all files and open batches; past it uploads are refused.",
        low=1024,
    )
    keep_s: float = key(
        30 * 86400.0,
        "number",
        "Seconds a file is kept, and an ended batch. A caller may ask for less.",
        low=3600,
        high=1e9,
    )


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """Responses of `/v1/responses` that are kept, so that a later request can continue or read
    them."""

    keep_s: float = key(
        30 * 86400.0, "number", "Seconds a response is kept after its last use.", low=60, high=1e9
    )
    max_bytes: int = key(
        10**9,
        "bytes",
        "Size of all of them; above it the oldest of the tenant with the most go first. 0 keeps "
        "none.",
        low=0,
    )


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """OpenTelemetry traces of requests, sent as OTLP over HTTP."""

    endpoint: str = key(
        "",
        "text",
        "The receiver, such as `http://localhost:4318`; `env` = what the variables "
        "`OTEL_EXPORTER_OTLP_ENDPOINT` and `OTEL_EXPORTER_OTLP_HEADERS` say; empty = no traces.",
    )
    headers_env: str = key(
        "",
        "text",
        "Environment variable with headers for the receiver, `name=value,...`: its API key.",
    )
    sample: float = key(
        1.0,
        "number",
        "Share of requests that are traced; one with a `traceparent` is traced if its caller "
        "traces it.",
        low=0,
        high=1,
    )
    service_name: str = key("coterie", "name", "How traces name this server.")
    max_queue: int = key(
        2048,
        "integer",
        "Traced requests that wait to be sent; one more is dropped and counted.",
        low=1,
        high=100_000,
    )
    timeout_s: float = key(
        10.0, "number", "Seconds until the receiver has answered.", low=0.1, high=300
    )


@dataclass(frozen=True, slots=True)
class ValidatorSettings:
    """A command of the operator that judges answers: it reads the text on its standard input, exit
    status 0 means valid, and its output is the error message."""

    name: str = key("", "name", "How results name it.")
    command: tuple[str, ...] = key((), "list", "Program and arguments; no shell is involved.")
    experts: tuple[str, ...] = key((), "list", "Answers of these experts are judged.")
    task_types: tuple[str, ...] = key((), "list", "Answers of these task types are judged.")
    timeout_s: float = key(5.0, "number", "Seconds until it is killed.", low=0.1, high=60)
    memory_bytes: int = key(512 * 10**6, "bytes", "Most memory it may have.", low=16 * 10**6)
    known_good: str = key(
        "",
        "text",
        "An answer that it accepts: it is tried on this one after it hung or crashed on another. "
        "Empty = the last answer that it accepted quickly, or no text, which it may refuse.",
    )
