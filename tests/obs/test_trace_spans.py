"""obs/tracing: W3C headers, the bytes of OTLP read by the official types, sampling, the queue."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from coterie.core.errors import ConfigError
from coterie.core.request import InferenceRequest, Limits, RouteHints, Sampling, Text
from coterie.core.settings import TracingSettings
from coterie.obs.tracing.context import RandomIds, TraceContext, context_of
from coterie.obs.tracing.exporter import SpanExporter, TraceReceiver
from coterie.obs.tracing.otlp import SERVER, SpanRecord, encoded, export_request, rejected_spans
from coterie.obs.tracing.spans import InferenceTrace, RequestTrace, generation, spans_of
from coterie.obs.tracing.tracer import RequestTracer, make_tracer, receiver_of
from tests.helpers.serving.trace_receiver import attributes_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
CLOSED = "http://127.0.0.1:9/v1/traces"


def parent(value: str, *states: str) -> TraceContext | None:
    headers = [(b"traceparent", value.encode()), (b"host", b"here")]
    return context_of([*headers, *((b"tracestate", state.encode()) for state in states)])


def test_a_valid_traceparent_is_read_and_written_again() -> None:
    found = parent(GOOD, "a=1, b=2", "c@d=3")
    assert found == TraceContext(TRACE, SPAN, 1, "a=1,b=2,c@d=3")
    assert found.is_sampled and found.traceparent == GOOD
    assert found.headers() == {"traceparent": GOOD, "tracestate": "a=1,b=2,c@d=3"}
    unsampled = parent(f"00-{TRACE}-{SPAN}-00")
    assert unsampled is not None and not unsampled.is_sampled
    assert unsampled.headers() == {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    # a later version may have more fields, and more flags than are known here
    later = parent(f"cc-{TRACE}-{SPAN}-ff-what-comes")
    assert later is not None and later.flags == 3


@pytest.mark.parametrize(
    "value",
    [
        "", "00", GOOD[:-1], GOOD + "0", GOOD + "-more", GOOD.upper(), GOOD.replace("-", "_"),
        f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01", f"{GOOD}, {GOOD}", f"00-{TRACE}-{SPAN}-0x", "\x00" * 55,
    ],
)  # fmt: skip
def test_a_malformed_traceparent_is_none(value: str) -> None:
    assert parent(value) is None


def test_two_traceparents_are_none_and_a_bad_state_is_left_out() -> None:
    assert context_of([(b"traceparent", GOOD.encode())] * 2) is None
    for state in ("a", "A=1", "a=1,b", "=1", "a=\t1", ",".join(f"k{n}=1" for n in range(33))):
        found = parent(GOOD, state)
        assert found is not None and found.state == "", state
    long = parent(GOOD, ",".join(f"k{n}={'v' * 100}" for n in range(10)))
    assert long is not None and 400 < len(long.state) <= 512 and not long.state.endswith(",")


@given(st.binary(max_size=120), st.binary(max_size=120))
def test_no_header_raises(first: bytes, second: bytes) -> None:
    found = context_of([(b"traceparent", first), (b"tracestate", second)])
    assert found is None or len(found.trace_id) == 32


values = st.one_of(
    st.text(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(st.text(), max_size=4),
)
NS = st.integers(0, 2**64 - 1)


@given(st.dictionaries(st.text(), values, max_size=6), st.text(), NS, NS, st.booleans())
def test_the_official_types_read_what_is_written(
    attributes: dict[str, Any], name: str, start: int, end: int, is_error: bool
) -> None:
    span = SpanRecord(
        TRACE, SPAN, "", name, SERVER, start, end, attributes, 1, "a=1", is_error, is_error
    )
    child = span._replace(parent_id="ab" * 8, state="", has_remote_parent=False)
    raw = export_request([encoded(span), encoded(child)], {"service.name": "s"}, "1.2")
    message = trace_service_pb2.ExportTraceServiceRequest.FromString(raw)
    (resource,) = message.resource_spans
    (scope,) = resource.scope_spans
    assert attributes_of(resource.resource.attributes) == {"service.name": "s"}
    assert (scope.scope.name, scope.scope.version) == ("coterie", "1.2")
    first, second = scope.spans
    assert (first.trace_id.hex(), first.span_id.hex(), first.parent_span_id) == (TRACE, SPAN, b"")
    assert second.parent_span_id.hex() == "ab" * 8 and second.trace_state == ""
    assert (first.name, first.kind, first.trace_state) == (name, SERVER, "a=1")
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (start, end)
    assert attributes_of(first.attributes) == attributes
    assert first.status.code == (2 if is_error else 0)
    assert first.flags == (0x301 if is_error else 0x101)
    # nothing that the types do not know: they write the same message again
    assert len(message.SerializeToString()) <= len(raw)


@given(st.integers(0, 2**40), st.text(max_size=50))
def test_rejected_spans_are_counted(number: int, text: str) -> None:
    answer = trace_service_pb2.ExportTraceServiceResponse()
    answer.partial_success.error_message = text
    answer.partial_success.rejected_spans = number
    assert rejected_spans(answer.SerializeToString()) == number


@given(st.binary(max_size=60))
def test_any_answer_can_be_read(answer: bytes) -> None:
    assert rejected_spans(answer) >= 0


def request(arrived_at: float | None = None, **fields: Any) -> InferenceRequest:
    at = time.monotonic() if arrived_at is None else arrived_at
    return InferenceRequest(
        "id-1", Text("a secret prompt"), Sampling(), Limits(), RouteHints(), None, None, "t", at,
        **fields,
    )  # fmt: skip


def tracer(**settings: Any) -> RequestTracer:
    made = make_tracer(TracingSettings(endpoint=CLOSED, **settings), "1")
    assert made is not None
    return made


def test_a_share_of_requests_is_sampled_and_the_caller_decides() -> None:
    half = tracer(sample=0.5)
    now = time.monotonic()
    num_sampled = sum(half.begin([], now).context.is_sampled for _ in range(2000))
    assert 850 < num_sampled < 1150
    for flag, share in (("01", 0.0), ("00", 1.0)):
        header = (b"traceparent", f"00-{TRACE}-{SPAN}-{flag}".encode())
        begun = tracer(sample=share).begin([header], now)
        assert begun.context.is_sampled is (flag == "01")
        assert begun.context.trace_id == TRACE and begun.parent_id == SPAN
        assert begun.context.span_id != SPAN
    assert not tracer(sample=0.0).begin([], now).context.is_sampled
    assert make_tracer(TracingSettings(), "1") is None


def test_inferences_join_the_request_of_their_task_but_jobs_do_not() -> None:
    made = tracer()
    root = made.begin([], time.monotonic())
    assert made.inference(request()).root is root
    job = made.inference(request(submitted_at=1.0))
    assert job.root is not root and job.owns_root and job.root.is_job
    root.end("id")
    assert made.inference(request()).root is not root


def test_stages_follow_each_other_and_fill_the_request() -> None:
    ended: list[RequestTrace] = []
    arrived = time.monotonic() - 1.0
    root = RequestTrace(TraceContext(TRACE, SPAN, 1), "", arrived, ended.append)
    inference = InferenceTrace(root, generation(request(arrived)), RandomIds(), owns_root=False)
    inference.planned()
    # refused in the middle of admission: nothing was queued
    inference.refused("overloaded", None)
    root.end("req_1", method="POST", route="/v1/infer", status=429, error="overloaded")
    root.end("again", status=500)
    assert ended == [root]
    server, *stages = spans_of(root, RandomIds())
    assert [span.name for span in stages] == ["parse", "route", "admit", "finish"]
    assert len(stages) + 1 == root.num_spans
    assert stages[0].start_ns == server.start_ns and stages[-1].end_ns == server.end_ns
    for one, following in pairwise(stages):
        assert one.end_ns == following.start_ns >= one.start_ns
    assert server.attributes["error.type"] == "overloaded" and not server.is_error
    assert server.attributes["http.response.status_code"] == 429
    assert "secret" not in repr(list(spans_of(root, RandomIds())))


def receiver(**fields: Any) -> TraceReceiver:
    given: dict[str, Any] = {"url": CLOSED, "headers": {}, "timeout_s": 1.0, "version": "1"}
    return TraceReceiver(**given | fields)


def trace(exporter: SpanExporter) -> RequestTrace:
    return RequestTrace(TraceContext(TRACE, SPAN, 1), "", time.monotonic(), exporter.put)


def test_a_full_queue_drops_and_a_closed_receiver_loses() -> None:
    exporter = SpanExporter(receiver(), {}, max_queue=3)
    for _ in range(5):
        trace(exporter).end("id")
    assert exporter.counts.dropped == 2
    exporter.start()
    began = time.monotonic()
    exporter.close(2.0)
    assert time.monotonic() - began < 5.0
    assert (exporter.counts.lost, exporter.counts.sent) == (3, 0)
    trace(exporter).end("id")
    assert exporter.counts.dropped == 3


@pytest.mark.parametrize("flag", ["_full", "_filled"])
def test_what_comes_while_a_batch_is_taken_is_not_overlooked(flag: str) -> None:
    """A queue that is full again, or the end of the server, wakes the thread at once: it would wait
    for a whole second, or until the end gives up."""

    class Interrupted(threading.Event):
        """Something comes just before it is cleared."""

        def clear(self) -> None:
            come()
            super().clear()

    exporter = SpanExporter(receiver(), {}, max_queue=1)

    def come() -> None:
        if flag == "_full":
            trace(exporter).end("id")
        else:
            exporter.close(0.0)

    trace(exporter).end("id")
    event = Interrupted()
    event.set()
    setattr(exporter, flag, event)
    assert len(exporter._taken()) == 1
    assert exporter.counts.dropped == 0
    assert exporter._filled.is_set() and exporter._full.is_set()


@pytest.mark.parametrize("value", ["\u00b2", "1" * 400, "-1", "soon"])
def test_any_time_to_retry_can_be_read(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(request: httpx.Request) -> httpx.Response:
        headers = {b"retry-after": value.encode("latin-1")}
        return httpx.Response(503, headers=headers, stream=httpx.ByteStream(b""))

    exporter = SpanExporter(receiver(), {}, max_queue=1)
    client = httpx.Client(transport=httpx.MockTransport(answered))
    monkeypatch.setattr(exporter, "_client", client)
    result = exporter._post(b"", 1.0)
    assert result.may_retry and result.retry_after_s >= 0.0


def test_an_unsampled_trace_is_not_queued() -> None:
    exporter = SpanExporter(receiver(), {}, max_queue=1)
    for _ in range(3):
        RequestTrace(TraceContext(TRACE, SPAN, 0), "", 0.0, exporter.put).end("id")
    assert exporter.counts.dropped == 0


def test_where_spans_go() -> None:
    def found(endpoint: str, headers_env: str = "", **variables: str) -> TraceReceiver:
        return receiver_of(TracingSettings(endpoint, headers_env), "", variables)

    assert found("http://a:4318").url == "http://a:4318/v1/traces"
    assert found("https://a/otlp/").url == "https://a/otlp/v1/traces"
    assert found("http://a/v1/traces").url == "http://a/v1/traces"
    assert found("env").url == "http://localhost:4318/v1/traces"
    standard = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:1",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b, x=1",
    }
    assert found("env", **standard).url == "http://b:1/v1/traces"
    assert found("env", **standard).headers == {"api-key": "a b", "x": "1"}
    # the standard's variables are for the standard's receiver
    assert found("http://a", **standard).headers == {}
    whole = standard | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/own"}
    assert found("env", **whole).url == "http://c/own"
    assert found("http://a", "MINE", MINE="k=v").headers == {"k": "v"}
    for endpoint in ("a:4318", "ftp://a", "http://", "http://u:p@a", "http://a:99999", "http://ü"):
        with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
            found(endpoint)
    for text in ("", "no-value", "a b=c", "k=%0a"):
        with pytest.raises(ConfigError, match=r"tracing\.headers_env") as refused:
            found("http://a", "MINE", MINE=text)
        assert not text or text not in str(refused.value)
