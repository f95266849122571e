"""Metrics of the stages around an engine: routing, validation, conversations, the log."""

from __future__ import annotations

from coterie.obs.metric import Metric

# reception and routing are to take less than a millisecond each
ROUTER_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1,
)  # fmt: skip
VALIDATION_BUCKETS_S = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip
LOAD_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip

LAG_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip

_MODEL = ("model_name",)

PIPELINE_METRICS = (
    Metric("coterie_connections", "gauge", "Open HTTP and WebSocket connections.", ()),
    Metric(
        "coterie_connections_refused", "counter",
        "Connections that were refused, or ended because they were too slow or too large.",
        ("reason",),
    ),
    Metric(
        "coterie_reception_seconds", "histogram",
        "Time to parse, check and normalise a body of /v1/infer.", (), ROUTER_BUCKETS_S,
    ),
    Metric(
        "coterie_router_seconds", "histogram", "Time to decide who answers.", (), ROUTER_BUCKETS_S
    ),
    Metric(
        "coterie_route_decisions", "counter",
        "Requests by the expert they ran on; `none` = the base alone, `other` = beyond 200 names.",
        ("expert",),
    ),
    Metric(
        "coterie_request_seconds", "counter",
        "Where the time of finished requests went: `queue` (of it `grammar`: checking a response "
        "format, and `adapters`: waiting for them), `prefill`, `decode`; of these two "
        "`expert_stall`, beside them `expert_io`.",
        ("model_name", "phase"),
    ),
    Metric(
        "coterie_expert_wait_seconds", "histogram",
        "How long requests with experts waited for them.", _MODEL, LOAD_BUCKETS_S,
    ),
    Metric(
        "coterie_damaged_experts", "gauge",
        "Installed experts whose files are gone or changed; nothing is routed to them.",
        (),
    ),
    Metric(
        "coterie_degraded", "counter", "Requests that got fewer experts than were chosen.", _MODEL
    ),
    Metric(
        "coterie_validations", "counter", "Answers that were judged.", ("validator", "result")
    ),
    Metric(
        "coterie_validation_seconds", "histogram", "Time to judge an answer.", (),
        VALIDATION_BUCKETS_S,
    ),
    Metric("coterie_feedback", "counter", "Verdicts of callers.", ("verdict",)),
    Metric(
        "coterie_conversation_turns", "counter",
        "Later turns with experts: `hit` = they were foreseen, `miss` = not.", ("result",),
    ),
    Metric(
        "coterie_conversation_preloads", "counter", "Stacks asked for before their turn came.", ()
    ),
    Metric("coterie_conversations", "gauge", "Conversations that are remembered.", ()),
    Metric("coterie_jobs", "gauge", "Open jobs of this server.", ("status",)),
    Metric(
        "coterie_event_loop_lag_seconds", "histogram",
        "How late the gateway's event loop is, looked at four times a second.", (), LAG_BUCKETS_S,
    ),
    Metric(
        "coterie_event_loop_blocks", "counter",
        "Times the gateway's event loop did nothing else for over a second.", (),
    ),
    Metric("coterie_records_dropped", "counter", "Rows of the log that were lost.", ()),
)  # fmt: skip
