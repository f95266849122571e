"""Settings of the stages around an engine: routing, jobs, validators. Names, ranges, defaults."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.settings import key

# what a validator can be bound to, beside an adapter's name
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
    """How requests that name nobody find their experts."""

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
class ValidatorSettings:
    """A command of yours that judges answers: the text comes on its standard input, exit status 0
    is valid, what it prints is the error."""

    name: str = key("", "name", "How results name it.")
    command: tuple[str, ...] = key((), "list", "Program and arguments; no shell is involved.")
    experts: tuple[str, ...] = key((), "list", "Answers of these experts are judged.")
    task_types: tuple[str, ...] = key((), "list", "Answers of these task types are judged.")
    timeout_s: float = key(5.0, "number", "Seconds until it is killed.", low=0.1, high=60)
    memory_bytes: int = key(512 * 10**6, "bytes", "Most memory it may have.", low=16 * 10**6)
