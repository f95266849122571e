"""The work after a request has ended: validate its answer, measure it, record it.

Turns the engine's last event into the event that the caller gets.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from coterie.core.events import Failed, Finished, InferenceMetrics, ValidationResult
from coterie.core.request import Chat, own_tenant
from coterie.service.answer import names_of
from coterie.service.meter import RequestMeter
from coterie.service.plan import RequestRun
from coterie.service.records.log import InferenceRecords
from coterie.service.records.store import InferenceRecord
from coterie.service.slo.evidence import BROKEN, INVALID, OPEN, VALID, JudgedAnswer
from coterie.service.validate.base import AnswerContext
from coterie.service.validate.generic import GenericValidator
from coterie.service.validate.validators import AnswerValidators

# how long a server that shuts down waits for running validations
SETTLE_S = 3.0


class Finisher:
    def __init__(self, validators: AnswerValidators, records: InferenceRecords) -> None:
        self._validators, self._records = validators, records
        self._num_validating = 0

    async def settled(self) -> None:
        """Returns when no answer is being validated, at the latest after `SETTLE_S`."""
        give_up_at = time.monotonic() + SETTLE_S
        while self._num_validating and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)

    async def finished(self, run: RequestRun, event: Finished) -> Finished:
        self._num_validating += 1
        try:
            validation = await self._validated(run, event)
            run.judged = await self._judged(run, event, validation)
        finally:
            self._num_validating -= 1
        if event.timings.grammar_s != run.grammar_s:
            event = replace(event, timings=replace(event.timings, grammar_s=run.grammar_s))
        run.served.series.spent(event)
        _count_cost(run, event)
        metrics = metrics_of(run, event, validation)
        # log before the answer is sent: a client that got it must find its record
        digests = tuple(adapter.digest for adapter in run.plan.adapters)
        run.outcome = outcome_of(run.judged)
        self._records.log(
            InferenceRecord(
                metrics,
                own_tenant(run.request.tenant),
                digests,
                run.outcome,
                shows_specialist=run.shows_specialist,
            )
        )
        return Finished(
            event.request_id,
            event.choices,
            event.usage,
            event.timings,
            event.moe,
            event.kv_blocks,
            event.adapter_bytes,
            run.plan.adapters,
            validation,
            metrics,
            event.unfinished,
        )

    async def outcome(self, run: RequestRun, event: Finished) -> JudgedAnswer | None:
        """What is known about an answer that nobody gets, as that of a shadow; None if it did not
        end. Records nothing."""
        return await self._judged(run, event, await self._validated(run, event))

    async def is_valid_for(self, run: RequestRun, text: str) -> bool:
        """Whether `text`, a whole answer, would be valid as the answer of this run."""
        context = answer_context(run, "stop")
        found = await self._validators.validate(text, context, run.snapshot.commands)
        return found is not None and found.valid and found.validator != GenericValidator.name

    def failed(self, run: RequestRun, event: Failed, meter: RequestMeter) -> InferenceMetrics:
        metrics = metrics_of(run, meter.so_far(event.request_id, ""), failure=event.code)
        self._without_answer(run, metrics)
        return metrics

    def abandoned(self, run: RequestRun, meter: RequestMeter) -> InferenceMetrics:
        """Record a request whose caller stopped reading, with its cost until then."""
        metrics = self.so_far(run, meter)
        self._without_answer(run, metrics)
        return metrics

    def so_far(self, run: RequestRun, meter: RequestMeter) -> InferenceMetrics:
        """The metrics of a request if it ended now."""
        request = run.request
        timeout_s = request.limits.timeout_s
        late = timeout_s is not None and time.monotonic() >= request.arrived_at + timeout_s
        reason = "timeout" if late else "abort"
        return metrics_of(run, meter.so_far(request.id, reason))

    async def _validated(self, run: RequestRun, event: Finished) -> ValidationResult | None:
        """An answer that was cut off by time or by its caller is not validated."""
        if event.choices[0] not in WHOLE or not run.may_be_validated:
            return None
        text, commands = "".join(run.texts), run.snapshot.commands
        return await self._validators.validate(text, _ended_context(run, event), commands)

    async def _judged(
        self, run: RequestRun, event: Finished, validation: ValidationResult | None
    ) -> JudgedAnswer | None:
        """What the answer says about its specialist. One that its caller cut, with a limit or a
        stop string, is judged by what it could still become. A stop may come as early as its caller
        likes: of such an answer only what no continuation could make valid counts."""
        if event.choices[0] not in WHOLE:
            return None
        kind = ""
        if validation is not None and validation.validator != GenericValidator.name:
            kind = VALID if validation.valid else INVALID
            if _is_cut(run, event) and validation.valid:
                kind = OPEN
            elif _is_cut(run, event) or (run.was_stopped and not validation.valid):
                kind = await self._validators.prefix_kind(
                    "".join(run.texts), _ended_context(run, event)
                )
                if run.was_stopped and kind != BROKEN:
                    kind = ""
        return JudgedAnswer(
            kind,
            own_tenant(run.request.tenant),
            # where its caller stopped it says nothing about its length
            0 if run.was_stopped else event.usage.completion_tokens // run.num_choices,
            run.max_tokens or 0,
            event.choices[0] == "length",
        )

    def _without_answer(self, run: RequestRun, metrics: InferenceMetrics) -> None:
        """Record without digests: a request without an answer must not count against an adapter."""
        self._records.log(InferenceRecord(metrics, own_tenant(run.request.tenant)))


def _count_cost(run: RequestRun, event: Finished) -> None:
    """The price of an answer of a server elsewhere, by the settings that the request reads."""
    settings = run.snapshot.config.specialists.get(run.served.name)
    if settings is None or not (settings.remote.price_in or settings.remote.price_out):
        return
    usage, remote = event.usage, settings.remote
    cost = usage.prompt_tokens * remote.price_in + usage.completion_tokens * remote.price_out
    run.served.series.registry.value("coterie_remote_cost", run.served.name).add(cost / 1e6)


def _ended_context(run: RequestRun, event: Finished) -> AnswerContext:
    """If its format was completed, the answer is whole, even if it ended at its limit."""
    is_whole = run.response_format is not None and 0 not in event.unfinished
    context = answer_context(run, "stop" if is_whole else event.choices[0])
    # of a server elsewhere only what it says is known
    return replace(context, is_enforced=is_whole and not run.served.is_remote)


def answer_context(run: RequestRun, finish_reason: str) -> AnswerContext:
    prompt, trace = run.request.prompt, run.plan.trace
    # if tools may be called, the answer may have any form
    free = isinstance(prompt, Chat) and bool(prompt.tools)
    return AnswerContext(
        response_format=run.response_format,
        answer_pattern=run.plan.tuned.answer_pattern,
        task_type="" if free else run.task_type,
        code_language="" if trace is None else str(trace.features.get("code_language", "")),
        # a check for one expert's answers knows nothing of an answer to several tasks
        experts=() if trace is not None and trace.has_several_tasks else names_of(run.plan),
        checks=() if free else run.checks,
        finish_reason=finish_reason,
    )


def outcome_of(judged: JudgedAnswer | None) -> bool | None:
    """Whether the answer counts for or against its adapters; None if it does not count. An answer
    that its caller cut does not count. Neither does an answer of which only the existence could be
    checked: adapters whose answers have no form to check would seem the best."""
    if judged is None or judged.kind not in (VALID, INVALID):
        return None
    return judged.kind == VALID


def _is_cut(run: RequestRun, event: Finished) -> bool:
    """Whether it ended at the limit that its caller gave."""
    return event.choices[0] == "length" and run.request.limits.max_tokens is not None


# finish reasons of answers that ended by themselves or at their limit
WHOLE = ("stop", "length")


def metrics_of(
    run: RequestRun,
    end: Finished,
    validation: ValidationResult | None = None,
    failure: str | None = None,
) -> InferenceMetrics:
    """`failure` is the error code, if the request failed. A job's times start when it was accepted:
    the wait until its start is part of its queue time."""
    usage, timings, reason = end.usage, end.timings, end.choices[0]
    adapters, arrived_at, now = run.plan.adapters, run.request.arrived_at, time.monotonic()
    # add it to a time.monotonic() value to get seconds since 1970
    epoch = time.time() - now
    submitted_at = run.request.submitted_at
    waited_s = 0.0 if submitted_at is None else max(epoch + arrived_at - submitted_at, 0.0)
    inference_s = max(timings.total_s - timings.queue_s, 0.0)
    answered = usage.completion_tokens > 0
    return InferenceMetrics(
        job_id=run.request.id,
        submitted_at=epoch + arrived_at - waited_s,
        router_latency_ms=_ms(run.router_s),
        expert_load_latency_ms=_ms(timings.load_s),
        inference_latency_ms=_ms(inference_s),
        total_latency_ms=_ms(now - arrived_at + waited_s),
        experts_used=tuple(adapter.name for adapter in adapters),
        num_experts=len(adapters),
        vram_peak_mb=round(_held_bytes(run, end) / 1e6, 3),
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        tokens_per_second=round(usage.completion_tokens / inference_s, 3) if inference_s else 0.0,
        success=reason in WHOLE,
        error=failure or (None if reason in WHOLE else reason),
        validation_passed=None if validation is None else validation.valid,
        finish_reason=reason,
        task_type=run.task_type,
        specialist=run.served.name,
        cached_tokens=usage.cached_tokens,
        queue_ms=_ms(timings.queue_s + waited_s),
        first_token_ms=_ms(timings.first_token_s + waited_s) if answered else 0.0,
        routed_at=epoch + run.routed_at,
        first_token_at=epoch + arrived_at + timings.first_token_s if answered else 0.0,
        finished_at=epoch + now,
        user_id=run.request.user_id,
        seed=run.plan.sampling.seed or 0,
    )


def _held_bytes(run: RequestRun, end: Finished) -> int:
    """Bytes of its KV blocks and adapters, without memory that all requests share."""
    block_bytes = run.served.info.block_bytes.get(run.served.name, 0)
    return end.kv_blocks * block_bytes + end.adapter_bytes


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
