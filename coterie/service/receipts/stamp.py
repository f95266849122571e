"""Makes the receipt of each request: stamped before it is enqueued, completed at its end.

A refusal has a receipt too. On the event loop; nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from coterie.core.errors import CoterieError
from coterie.core.events import Finished, InferenceMetrics
from coterie.core.receipt import CLOSED, OPEN, Receipt, ReceiptPlan, ReceiptTimings, reason_of
from coterie.core.request import Chat, InferenceRequest, own_tenant
from coterie.core.sampling import SampledWith, sampling_sources
from coterie.routing.router import NOT_READY
from coterie.service.receipts.context import context_of
from coterie.service.receipts.context import encoded as context_bytes
from coterie.service.receipts.decisions import (
    DecisionRecord,
    asked_route,
    encoded,
    lane_readings,
    steering_inputs,
    stored_candidates,
    stored_input,
    stored_route,
    stored_steering,
)
from coterie.service.receipts.store import receipt_row
from coterie.service.shadow.calibration import prompt_text

if TYPE_CHECKING:
    from coterie.obs.tracing.spans import InferenceTrace
    from coterie.obs.tracing.tracer import RequestTracer
    from coterie.service.breaker.control import EnsembleControl
    from coterie.service.breaker.steering import SteeredPlan, SteerRequest
    from coterie.service.plan import RequestRun
    from coterie.service.records.log import InferenceRecords

OnReceipt = Callable[[Receipt], None]
_encode_prompt = msgspec.json.Encoder().encode
# a plan names its adapters; more reasons than these say nothing new
MAX_REASONS, MAX_MODEL = 16, 128


class ReceiptWriter:
    """`config_digest`: names the settings that are used now. `tracer`: None without traces.
    `on_kept` gets every receipt, also as JSON."""

    def __init__(
        self,
        records: InferenceRecords,
        config_digest: Callable[[], str] = lambda: "",
        tracer: RequestTracer | None = None,
        on_kept: Callable[[Receipt, bytes], None] | None = None,
    ) -> None:
        self._records, self.config_digest = records, config_digest
        self.tracer, self._on_kept = tracer, on_kept
        # digests of settings that are kept
        self._contexts: set[str] = set()

    def begin(self, request: InferenceRequest, on_receipt: OnReceipt | None = None) -> OpenReceipt:
        """`on_receipt` gets the receipt each time it changes, for headers."""
        trace = None if self.tracer is None else self.tracer.inference(request)
        return OpenReceipt(self, request, on_receipt, trace)

    def refusal(
        self, request_id: str, tenant: str, model: str, arrived_at: float, error: CoterieError
    ) -> Receipt:
        """The receipt of a request that was refused before it could be read."""
        receipt = Receipt(
            request_id=request_id,
            tenant=own_tenant(tenant),
            arrived_at=time.time() - (time.monotonic() - arrived_at),
            plan=self._no_plan(model, error),
            admission="refused",
            outcome=error.code,
            timings=ReceiptTimings(total_ms=_ms(time.monotonic() - arrived_at)),
        )
        self.keep(receipt)
        return receipt

    def keep(
        self, receipt: Receipt, decision: bytes | None = None, prompt: str | None = None
    ) -> None:
        """`prompt`: JSON, if the tenant allows that it is kept."""
        row = receipt_row(receipt, decision, prompt)
        self._records.keep_receipt(row, receipt.outcome == OPEN)
        if self._on_kept is not None:
            self._on_kept(receipt, row.receipt)

    def keep_context(self, run: RequestRun, control: EnsembleControl) -> None:
        """Keep the settings that `run` was decided with, once."""
        config = run.snapshot.config
        if config.digest in self._contexts:
            return
        self._contexts.add(config.digest)
        watched = {name: watch.settings for name, watch in control.watches.items()}
        context = context_of(config, run.snapshot.router.specialists, watched)
        self._records.keep_context(config.digest, context_bytes(context))

    def _no_plan(self, model: str, error: CoterieError) -> ReceiptPlan:
        return ReceiptPlan(
            model=shown_model(model),
            specialist="",
            replica="",
            adapters=(),
            intent="",
            confidence=0.0,
            reasons=(reason_of(error),),
            breaker=CLOSED,
            shadow="",
            router_version="",
            config_digest=self.config_digest(),
        )


class OpenReceipt:
    """The receipt of one request while it is planned, admitted and run; its trace notes the same
    moments."""

    __slots__ = ("_decision", "_on_receipt", "_request", "_writer", "receipt", "trace")

    def __init__(
        self,
        writer: ReceiptWriter,
        request: InferenceRequest,
        on_receipt: OnReceipt | None,
        trace: InferenceTrace | None = None,
    ) -> None:
        self._writer, self._request, self._on_receipt = writer, request, on_receipt
        self.trace = trace
        # None until the request is planned
        self._decision: DecisionRecord | None = None
        # None until the request is admitted or refused
        self.receipt: Receipt | None = None

    def steered(
        self,
        run: RequestRun,
        request: SteerRequest,
        steered: SteeredPlan,
        control: EnsembleControl,
    ) -> None:
        """Note what the decision was made from. `run` has the router's plan; one that memory or an
        unfinished index has changed is not noted."""
        plan, request_id, config = run.plan, run.request.id, run.snapshot.config
        trace = plan.trace
        if run.was_reduced or (trace is not None and NOT_READY in trace.degraded):
            return
        self._writer.keep_context(run, control)
        self._decision = DecisionRecord(
            request_id,
            time.time(),
            config.digest,
            "" if trace is None else trace.router_version,
            asked_route(run.request, request, config.routing),
            None if trace is None else stored_input(trace.classified),
            stored_candidates(plan),
            0.0 if trace is None else trace.threshold,
            stored_route(plan),
            steering_inputs(control, plan, request_id, steered.at),
            stored_steering(steered),
        )

    def admitted(self, run: RequestRun, replica: str, admission: str) -> None:
        """Call it before the request is handed to `replica`; once more if another one gets it."""
        decision = self._decision
        if decision is not None:
            decision = msgspec.structs.replace(
                decision, lanes=lane_readings(run.served.replicas), replica=replica
            )
        prompt = None
        if run.tenant is not None and run.tenant.keep_prompts:
            prompt = _encode_prompt(prompt_text(run.request)).decode()
        receipt = self._made(run, replica, admission, OPEN)
        self._writer.keep(receipt, None if decision is None else encoded(decision), prompt)
        self._tell(receipt)
        if self.trace is not None:
            self.trace.admitted()

    def moved(self, left: str, replica: str) -> None:
        """Another replica continues the request, because its worker died or fell silent."""
        if self.receipt is not None:
            plan = self.receipt.plan
            reasons = (*plan.reasons, f"continued by {replica}: the worker of {left} was lost")
            plan = replace(plan, replica=replica, reasons=reasons[:MAX_REASONS])
            self._change(replace(self.receipt, plan=plan))

    def refused(self, error: CoterieError, run: RequestRun | None = None) -> None:
        """`run` is None if no one could be chosen to answer."""
        if run is None:
            request = self._request
            model = request.hints.model or ""
            receipt = self._writer.refusal(
                request.id, request.tenant, model, request.arrived_at, error
            )
            self._tell(receipt)
            if self.trace is not None:
                self.trace.refused(error.code, receipt)
            return
        made = self._made(run, "", "refused", error.code)
        plan = replace(made.plan, reasons=(*made.plan.reasons, reason_of(error)))
        total_ms = _ms(time.monotonic() - run.request.arrived_at)
        timings = ReceiptTimings(
            route_ms=_ms(run.router_s), grammar_ms=_ms(run.grammar_s), total_ms=total_ms
        )
        self._change(replace(made, plan=plan, timings=timings, slowest=slowest(timings)))
        if self.trace is not None:
            self.trace.refused(error.code, self.receipt)

    def finished(self, run: RequestRun, end: Finished) -> Finished:
        """Complete it; returns `end` with its receipt."""
        metrics, validation = end.metrics, end.validation
        assert metrics is not None
        validate_ms = 0.0 if validation is None else round(validation.duration_ms, 3)
        # a job waits before its engine's clock begins
        engine_ms = metrics.queue_ms + _ms(end.timings.total_s - end.timings.queue_s)
        deliver_ms = max(metrics.total_latency_ms - engine_ms - validate_ms, 0.0)
        timings = ReceiptTimings(
            route_ms=metrics.router_latency_ms,
            grammar_ms=_ms(run.grammar_s),
            queue_ms=metrics.queue_ms,
            adapters_ms=metrics.expert_load_latency_ms,
            prefill_ms=_ms(end.timings.prefill_s),
            first_token_ms=metrics.first_token_ms,
            decode_ms=_ms(end.timings.decode_s),
            deliver_ms=round(deliver_ms, 3),
            validate_ms=validate_ms,
            total_ms=metrics.total_latency_ms,
            preemptions=end.timings.num_preemptions,
            moe_stall_ms=0.0 if end.moe is None else _ms(end.moe.stall_s),
            outage_ms=_ms(end.timings.outage_s),
        )
        valid = None if validation is None else validation.valid
        receipt = self._completed(run, metrics, timings, metrics.finish_reason, valid)
        if self.trace is not None:
            self.trace.finished(end, receipt)
        return Finished(
            end.request_id,
            end.choices,
            end.usage,
            end.timings,
            end.moe,
            end.kv_blocks,
            end.adapter_bytes,
            end.adapters,
            end.validation,
            end.metrics,
            end.unfinished,
            receipt,
        )

    def cut_off(self, run: RequestRun, metrics: InferenceMetrics) -> None:
        """Complete the receipt of a request that failed, or that its caller left."""
        queue_ms = min(metrics.queue_ms, metrics.total_latency_ms)
        first_ms = metrics.first_token_ms
        timings = ReceiptTimings(
            route_ms=metrics.router_latency_ms,
            grammar_ms=_ms(run.grammar_s),
            queue_ms=queue_ms,
            adapters_ms=metrics.expert_load_latency_ms,
            prefill_ms=max((first_ms or metrics.total_latency_ms) - queue_ms, 0.0),
            first_token_ms=first_ms,
            decode_ms=max(metrics.total_latency_ms - first_ms, 0.0) if first_ms else 0.0,
            total_ms=metrics.total_latency_ms,
        )
        outcome = metrics.error or metrics.finish_reason
        receipt = self._completed(run, metrics, timings, outcome, None)
        if self.trace is not None:
            self.trace.cut_off(metrics, receipt)

    def _completed(
        self,
        run: RequestRun,
        metrics: InferenceMetrics,
        timings: ReceiptTimings,
        outcome: str,
        valid: bool | None,
    ) -> Receipt:
        opened = self.receipt or self._made(run, "", "refused", OPEN)
        # as `replace`, in less time
        receipt = Receipt(
            opened.request_id,
            opened.tenant,
            opened.arrived_at,
            opened.plan,
            opened.admission,
            outcome,
            metrics.input_tokens,
            metrics.output_tokens,
            metrics.cached_tokens,
            valid,
            timings,
            slowest(timings),
        )
        self._change(receipt)
        return receipt

    def _made(self, run: RequestRun, replica: str, admission: str, outcome: str) -> Receipt:
        request, plan = run.request, run.plan
        arrived_at = request.submitted_at
        if arrived_at is None:
            arrived_at = time.time() - (time.monotonic() - request.arrived_at)
        return Receipt(
            request_id=request.id,
            tenant=own_tenant(request.tenant),
            arrived_at=arrived_at,
            plan=ReceiptPlan(
                model=shown_model(self._request.hints.model or ""),
                specialist=plan.specialist,
                replica=replica,
                adapters=plan.adapters,
                intent=plan.intent,
                confidence=plan.confidence,
                reasons=plan.reasons[:MAX_REASONS],
                breaker=run.breaker,
                shadow=plan.shadow,
                router_version="" if plan.trace is None else plan.trace.router_version,
                config_digest=run.snapshot.config.digest,
                sampling=_sampling(run),
                adds_system=_adds_system(run),
                schema=_schema(run),
            ),
            admission=admission,
            outcome=outcome,
        )

    def _change(self, receipt: Receipt) -> None:
        self._writer.keep(receipt)
        self._tell(receipt)

    def _tell(self, receipt: Receipt) -> None:
        self.receipt = receipt
        if self._on_receipt is not None:
            self._on_receipt(receipt)


def _sampling(run: RequestRun) -> dict[str, SampledWith]:
    plan, request = run.plan, run.request
    specialist = run.snapshot.router.specialists[plan.specialist]
    return sampling_sources(
        plan.sampling,
        request.sampling,
        specialist.generation,
        specialist.recommended.sampling_for(request.prompt),
        plan.tuned.sampling,
    )


def _schema(run: RequestRun) -> str:
    answer_format = run.request.response_format
    if answer_format is None or answer_format.kind != "json_schema":
        return ""
    return "closed" if answer_format.closed else "open"


def _adds_system(run: RequestRun) -> bool:
    """Whether the model's card adds a system prompt to what is asked."""
    tokenizer, prompt = run.served.tokenizer, run.plan.tuned.prompt or run.request.prompt
    if tokenizer is None or run.plan.adapters or not isinstance(prompt, Chat):
        return False
    return tokenizer.adds_system_to(prompt)


def shown_model(name: str) -> str:
    """A caller's model name, which may be anything."""
    if name.isprintable():
        return name[:MAX_MODEL]
    return "".join(char for char in name[:MAX_MODEL] if char.isprintable())


def slowest(timings: ReceiptTimings) -> str:
    """What took most of the time, in words."""
    waited = timings.queue_ms - timings.adapters_ms - timings.grammar_ms - timings.route_ms
    stalled = min(timings.moe_stall_ms, timings.decode_ms + timings.prefill_ms)
    parts: Mapping[str, float] = {
        "routing": timings.route_ms,
        "checking the response format": timings.grammar_ms,
        "waiting for its turn": waited,
        "loading adapters": timings.adapters_ms,
        "computing the prompt": timings.prefill_ms,
        "writing the answer": timings.decode_ms - stalled - timings.outage_ms,
        "waiting for a worker after a crash": timings.outage_ms,
        "waiting for MoE experts": stalled,
        "delivering the answer": timings.deliver_ms,
        "validating the answer": timings.validate_ms,
    }
    name = max(parts, key=parts.__getitem__)
    if parts[name] <= 0:
        return ""
    often = f", preempted {timings.preemptions} times" if timings.preemptions else ""
    return f"{name}: {parts[name]:.1f} of {timings.total_ms:.1f} ms{often}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
