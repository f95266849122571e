"""The receipt of a request: who answered, why, and what took the time.

Stamped when the request is planned, before it is enqueued, and completed at its end. Holds no text
of the caller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from coterie.core.errors import CoterieError
from coterie.core.plan import AdapterChoice
from coterie.core.quick_init import quick_init
from coterie.core.sampling import SampledWith

# what admission said
ADMISSIONS = ("admitted", "queued", "rerouted", "preempted_other", "refused")
# the outcome of a request that has not ended
OPEN = "open"
# the state of a breaker that lets all requests pass
CLOSED = "closed"


@quick_init
@dataclass(frozen=True, slots=True)
class ReceiptTimings:
    """Milliseconds by stage; what was not reached is 0."""

    route_ms: float = 0.0
    grammar_ms: float = 0.0
    queue_ms: float = 0.0
    adapters_ms: float = 0.0
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0
    decode_ms: float = 0.0
    # from the end of the engine's work until the gateway is at the end of the answer: it waits for
    # a core, or for a caller that reads slowly
    deliver_ms: float = 0.0
    validate_ms: float = 0.0
    total_ms: float = 0.0
    preemptions: int = 0
    # waits of a mixture-of-experts model for its experts
    moe_stall_ms: float = 0.0
    # without a worker after a crash; part of the others
    outage_ms: float = 0.0


@quick_init
@dataclass(frozen=True, slots=True)
class ReceiptPlan:
    """The decision."""

    # as the caller sent it
    model: str
    specialist: str
    replica: str
    adapters: tuple[AdapterChoice, ...]
    intent: str
    confidence: float
    reasons: tuple[str, ...]
    # "closed", "shadow_only", "ejected", "draining" ... of the specialist that was chosen first
    breaker: str
    # the specialist that answered too, only to be judged; "" = none
    shadow: str
    # what decided: the version of the trained router, and the digest of the settings
    router_version: str
    config_digest: str
    # by field: what the request ran with, and where the value is from; values that nobody set are
    # left out
    sampling: dict[str, SampledWith] = field(default_factory=dict)
    # whether the chat got the system prompt of the model's card
    adds_system: bool = False
    # of a JSON schema that the answer has to fit: "closed" if objects have only the properties that
    # are named, "open" if it was taken as it is; "" = none
    schema: str = ""


@quick_init
@dataclass(frozen=True, slots=True)
class Receipt:
    request_id: str
    tenant: str
    # seconds since 1970
    arrived_at: float
    plan: ReceiptPlan
    # one of ADMISSIONS
    admission: str
    # `OPEN` until the end; then the finish reason, or the code of the refusal or failure
    outcome: str = OPEN
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    # None = not judged
    valid: bool | None = None
    timings: ReceiptTimings = ReceiptTimings()
    # what took most of the time, in words
    slowest: str = ""


_QUOTED = re.compile(r"'([^']*)'|`([^`]*)`|\"([^\"]*)\"")
_NAME = re.compile(r"[\w.:@+/\-]{1,64}")
MAX_REASON = 300
# errors about these fields quote parts of them, without quotation marks
_QUOTED_FIELDS = (
    "grammar", "regex", "response_format", "tools", "output", "chat_template", "guided_",
    "structured_outputs", "json_schema", "ebnf",
)  # fmt: skip


def reason_of(error: CoterieError) -> str:
    """The error without text of the caller, for logs and receipts. Names are kept."""
    if (error.param or "").startswith(_QUOTED_FIELDS):
        return f"{error.code}: {error.param}"[:MAX_REASON]

    def kept(match: re.Match[str]) -> str:
        inner = next(group for group in match.groups() if group is not None)
        return match[0] if _NAME.fullmatch(inner) else "'...'"

    message = _QUOTED.sub(kept, error.message[: 2 * MAX_REASON])
    plain = "".join(char if char.isprintable() else " " for char in message)
    return f"{error.code}: {plain}"[:MAX_REASON]
