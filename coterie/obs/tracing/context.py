"""The W3C trace context: which trace a request belongs to, read from headers and written to them.

A caller's `traceparent` that is not valid is ignored, as the standard asks: the request then begins
a trace of its own. `tracestate` belongs to others; it is kept and passed on as it came.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from coterie.core.quick_init import quick_init

Headers = Iterable[tuple[bytes, bytes]]

SAMPLED, RANDOM_ID = 1, 2
# of `tracestate`; the standard's least values
MAX_STATE, MAX_MEMBERS = 512, 32
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16
_IDS_AT_ONCE = 128


@quick_init
@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace; ids are hexadecimal."""

    trace_id: str
    span_id: str
    flags: int
    # `tracestate`, empty if there is none
    state: str = ""

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def headers(self) -> dict[str, str]:
        """What a server that is called gets."""
        named = {"traceparent": self.traceparent}
        return named | {"tracestate": self.state} if self.state else named


def context_of(headers: Headers) -> TraceContext | None:
    """The caller's span; None without a valid `traceparent`."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return None
    found = _PARENT.fullmatch(parents[0].strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more is not None):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    known = int(flags, 16) & (SAMPLED | RANDOM_ID)
    return TraceContext(trace_id.decode(), span_id.decode(), known, _state_of(headers))


def _state_of(headers: Headers) -> str:
    """`tracestate`; empty if it is not valid. Members that are too many are left out at the end."""
    values = [value for name, value in headers if name == b"tracestate"]
    if not values:
        return ""
    members = [item.strip(" \t") for item in b",".join(values).decode("latin-1").split(",")]
    members = [item for item in members if item]
    if len(members) > MAX_MEMBERS or not all(_MEMBER.fullmatch(item) for item in members):
        return ""
    while members and len(",".join(members)) > MAX_STATE:
        members.pop()
    return ",".join(members)


class RandomIds:
    """Ids of traces and spans, drawn many at once: a system call for each takes longer. For one
    thread."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def span_id(self) -> str:
        if not self._left:
            text = os.urandom(8 * _IDS_AT_ONCE).hex()
            self._left = [text[at : at + 16] for at in range(0, len(text), 16)]
        # all zeros would mean that there is none
        return self._left.pop().replace("0" * 16, "0" * 15 + "1")

    def trace_id(self) -> str:
        return self.span_id() + self.span_id()
