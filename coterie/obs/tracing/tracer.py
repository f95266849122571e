"""Begins the traces of requests, and says by the settings where their spans go.

Without a receiver there is no `RequestTracer`, and nothing of this runs.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from urllib.parse import unquote, urlsplit

from coterie.core.errors import ConfigError
from coterie.core.request import InferenceRequest
from coterie.core.settings import TracingSettings
from coterie.obs.tracing.context import (
    RANDOM_ID,
    SAMPLED,
    Headers,
    RandomIds,
    TraceContext,
    context_of,
)
from coterie.obs.tracing.exporter import SpanCounts, SpanExporter, TraceReceiver
from coterie.obs.tracing.spans import (
    ENCODER_STAGES,
    InferenceTrace,
    RequestTrace,
    TracedWork,
    generation,
)

# `tracing.endpoint`: what the standard's variables say
FROM_ENVIRONMENT = "env"
DEFAULT_ENDPOINT = "http://localhost:4318"
_PATH = "/v1/traces"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

# the trace of the request that the running task answers
_current: ContextVar[RequestTrace | None] = ContextVar("coterie_trace", default=None)


class RequestTracer:
    def __init__(self, settings: TracingSettings, receiver: TraceReceiver) -> None:
        # below it, the last 64 bits of a trace id are traced
        self._bound = int(settings.sample * 2**64)
        resource = {
            "service.name": settings.service_name,
            "service.version": receiver.version,
            "service.instance.id": secrets.token_hex(8),
            "telemetry.sdk.name": "coterie",
            "telemetry.sdk.language": "python",
            "telemetry.sdk.version": receiver.version,
        }
        self._exporter = SpanExporter(receiver, resource, settings.max_queue)
        self._ids = RandomIds()

    @property
    def counts(self) -> SpanCounts:
        return self._exporter.counts

    def start(self) -> None:
        self._exporter.start()

    def close(self) -> None:
        """Waits until spans are sent, for a few seconds at most: not on the event loop."""
        self._exporter.close()

    def begin(self, headers: Headers, arrived_at: float) -> RequestTrace:
        """The trace of a request that came with these headers; inferences that the running task
        plans from now on are part of it."""
        trace = self._begun(context_of(headers), arrived_at)
        _current.set(trace)
        return trace

    def inference(self, request: InferenceRequest) -> InferenceTrace:
        """The stages of an inference that is being planned. One that no request waits for, as that
        of a job, is a trace of its own."""
        return self._inference(generation(request), is_job=request.submitted_at is not None)

    def encoding(self, operation: str, model: str, arrived_at: float) -> InferenceTrace:
        """The stages of a request to an encoder."""
        return self._inference(TracedWork(operation, model, arrived_at, stages=ENCODER_STAGES))

    def _inference(self, work: TracedWork, *, is_job: bool = False) -> InferenceTrace:
        root = None if is_job else _current.get()
        if root is not None and root.ended_at is None:
            return InferenceTrace(root, work, self._ids, owns_root=False)
        root = self._begun(None, work.arrived_at, is_job=True)
        return InferenceTrace(root, work, self._ids, owns_root=True)

    def _begun(
        self, parent: TraceContext | None, arrived_at: float, *, is_job: bool = False
    ) -> RequestTrace:
        own, put = self._ids.span_id(), self._exporter.put
        if parent is not None:
            context = TraceContext(parent.trace_id, own, parent.flags, parent.state)
            return RequestTrace(context, parent.span_id, arrived_at, put)
        trace_id = self._ids.trace_id()
        sampled = SAMPLED if int(trace_id[16:], 16) < self._bound else 0
        context = TraceContext(trace_id, own, RANDOM_ID | sampled)
        return RequestTrace(context, "", arrived_at, put, is_job=is_job)


def make_tracer(
    settings: TracingSettings, version: str, environment: Mapping[str, str] = os.environ
) -> RequestTracer | None:
    """None without a receiver. `version`: of this program. Raises ConfigError if the receiver
    cannot be used."""
    if not settings.endpoint:
        return None
    return RequestTracer(settings, receiver_of(settings, version, environment))


def receiver_of(
    settings: TracingSettings, version: str = "", environment: Mapping[str, str] = os.environ
) -> TraceReceiver:
    """Where spans go. Raises ConfigError; it never shows a header."""
    is_standard = settings.endpoint == FROM_ENVIRONMENT
    base, whole = settings.endpoint, ""
    if is_standard:
        whole = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or DEFAULT_ENDPOINT
    url = whole or (base if base.endswith(_PATH) else base.rstrip("/") + _PATH)
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_usable = is_usable and (parts.port is None or parts.port > 0)
    except ValueError:
        is_usable = False
    if not is_usable or parts.username is not None or not url.isascii() or not url.isprintable():
        raise ConfigError(
            "tracing.endpoint must be an http or https URL without a user, such as "
            f"{DEFAULT_ENDPOINT}, or {FROM_ENVIRONMENT}",
            param="tracing.endpoint",
        )
    text = ""
    if settings.headers_env:
        text = environment.get(settings.headers_env, "")
        if not text:
            raise ConfigError(
                f"tracing.headers_env: the variable {settings.headers_env} is not set",
                param="tracing.headers_env",
            )
    elif is_standard:
        names = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
        text = next((found for name in names if (found := environment.get(name))), "")
    return TraceReceiver(url, _headers(text), settings.timeout_s, version)


def _headers(text: str) -> dict[str, str]:
    """`name=value,...`, percent-encoded as OpenTelemetry has it."""
    headers: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, sign, value = item.partition("=")
        name, value = unquote(name.strip()).lower(), unquote(value.strip())
        usable = value.isascii() and value.isprintable() and _HEADER_NAME.fullmatch(name)
        if not (sign and usable):
            raise ConfigError(
                "tracing.headers_env: the variable must hold name=value,name=value",
                param="tracing.headers_env",
            )
        headers[name] = value
    return headers
