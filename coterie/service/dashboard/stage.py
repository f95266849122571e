"""Where a request in flight is, and what it waits for, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.core.plan import LaneState
from coterie.service.dashboard.activity import FollowedRequest
from coterie.service.encoders.service import OpenEncoding
from coterie.workers.contract import Replica
from coterie.workers.encoder.replica import EncoderReplica

PREPARING, WAITING, PROMPT, ANSWERING, CHECKING, ENCODING = (
    "preparing", "waiting", "prompt", "answering", "checking", "encoding",
)  # fmt: skip
# a request that is younger is not called slow without a promise
PATIENCE_S = 1.0
# a gap this many times as long as the p95 is called slow
LONG_GAPS = 5
# share of an engine's time that makes MoE stalls a reason
MUCH_STALL = 0.3


@dataclass(frozen=True, slots=True)
class RequestStage:
    """`since` is time.monotonic() when the stage began; `why` is empty if nothing holds it up."""

    name: str
    since: float
    why: str
    is_slow: bool


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What is known of a specialist: its entry of the SLO report, and of its replicas the share of
    the last second in which they waited for MoE experts."""

    slo: Mapping[str, Any]
    stalls: Mapping[str, float]


def stage_of(request: FollowedRequest, inputs: StageInputs, now: float) -> RequestStage:
    run, meter = request.run, request.meter
    arrived_at = run.request.arrived_at
    late = now - arrived_at > _patience_s(inputs.slo)
    replica = next((r for r in run.served.replicas.members if r.name == run.replica), None)
    if meter.has_ended:
        return RequestStage(CHECKING, meter.last_token_at, "its answer is validated", False)
    if meter.first_token_s is not None:
        why, is_slow = _gap(request, replica, inputs, now)
        return RequestStage(ANSWERING, arrived_at + meter.first_token_s, why, is_slow)
    if meter.started is not None:
        why = _prompt(request, replica, inputs)
        return RequestStage(PROMPT, meter.started_at, why, late)
    if replica is None:
        return RequestStage(PREPARING, arrived_at, _preparation(request), late)
    return RequestStage(WAITING, meter.admitted_at, _wait(request, replica), late)


def encoding_stage(item: OpenEncoding, beside: int, now: float) -> RequestStage:
    """Of a request to an encoder; `beside`: tokens of others at the same one."""
    arrived_at = item.caller.receipt.asked.arrived_at
    if item.placed_at is None:
        is_slow = now - arrived_at > PATIENCE_S
        return RequestStage(PREPARING, arrived_at, "its texts are tokenised", is_slow)
    replica = item.served.replica
    why = "" if replica is None else _down(replica)
    if not why and beside:
        why = f"{beside:,} tokens of others wait or run"
    is_slow = now > item.due_at + PATIENCE_S
    return RequestStage(ENCODING, item.placed_at, why, is_slow)


def _patience_s(slo: Mapping[str, Any]) -> float:
    promised: float | None = slo["promised"]["ttft_p95_s"]
    usual: float | None = slo["ttft"]["p95_s"]
    return promised or max(usual or 0.0, PATIENCE_S)


def _preparation(request: FollowedRequest) -> str:
    run = request.run
    if not run.prompt_ids and run.served.tokenizer is not None:
        return "its prompt is tokenised"
    return "its place is reserved"


def _lane(request: FollowedRequest, replica: Replica) -> LaneState | None:
    return request.run.served.replicas.state(replica)


def _wait(request: FollowedRequest, replica: Replica) -> str:
    run, lane = request.run, _lane(request, replica)
    if problem := _down(replica):
        return problem
    if lane is None:
        return ""
    missing = [item.name for item in run.plan.adapters if item.digest not in lane.resident_adapters]
    if missing:
        return f"loading {', '.join(missing)}"
    if lane.total_tokens and lane.free_tokens < len(run.prompt_ids):
        return f"KV is full: {lane.free_tokens:,} of {lane.total_tokens:,} tokens are free"
    queued, running = run.served.replicas.queued(), run.served.replicas.running()
    if queued > 1:
        return f"{queued} wait, {running} run"
    return f"waits for a step of {_ms(lane.step_s)}" if lane.step_s else "waits for a step"


def _prompt(request: FollowedRequest, replica: Replica | None, inputs: StageInputs) -> str:
    if replica is not None and (problem := _down(replica) or _stall(replica, inputs)):
        return problem
    started = request.meter.started
    assert started is not None
    if not started.prompt_tokens:
        return "the other server computes its prompt"
    cached = f", {started.cached_tokens:,} cached" if started.cached_tokens else ""
    return f"computes a prompt of {started.prompt_tokens:,} tokens{cached}"


def _gap(
    request: FollowedRequest, replica: Replica | None, inputs: StageInputs, now: float
) -> tuple[str, bool]:
    """What holds an answer up, and whether its last token is long ago."""
    gap_s = now - request.meter.last_token_at
    usual_s = inputs.slo["promised"]["itl_p95_s"] or inputs.slo["itl"]["p95_s"] or 0.0
    is_slow = gap_s > max(PATIENCE_S, LONG_GAPS * usual_s)
    if replica is None:
        return "", is_slow
    why = _down(replica) or _stall(replica, inputs)
    lane = _lane(request, replica)
    if not why and lane is not None and lane.preempting:
        why = "KV is short: requests are preempted"
    if not why and is_slow:
        why = f"no token for {gap_s:.0f} s"
    return why, is_slow


def _down(replica: Replica | EncoderReplica) -> str:
    state = replica.state()
    return "" if state in ("up", "draining") else f"its worker is {state}"


def _stall(replica: Replica, inputs: StageInputs) -> str:
    share = inputs.stalls.get(replica.name, 0.0)
    return f"waits for MoE experts {share:.0%} of the time" if share >= MUCH_STALL else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "under 1 ms"
