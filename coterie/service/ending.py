"""What is done once a request has ended: judge its answer, measure, write down, learn.

Turns the engine's last event into the one that leaves the system. Knows no replicas and no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from coterie.core.events import Failed, Finished
from coterie.core.outcome import InferenceMetrics, ValidationResult
from coterie.core.request import Chat, own_tenant
from coterie.service.answer import names_of
from coterie.service.measure import WHOLE, metrics_of
from coterie.service.meter import Meter
from coterie.service.records.log import Records
from coterie.service.records.store import Record
from coterie.service.run import Run
from coterie.service.validate.base import Context
from coterie.service.validate.generic import Generic
from coterie.service.validate.validators import Validators

# answers that are being judged when the server ends are waited for so long
SETTLE_S = 3.0


class Ending:
    def __init__(self, validators: Validators, records: Records) -> None:
        self._validators, self._records = validators, records
        self._judging = 0

    async def settled(self) -> None:
        """Returns when nobody is being judged; not much later than that, whatever happens."""
        give_up_at = time.monotonic() + SETTLE_S
        while self._judging and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)

    async def finished(self, run: Run, event: Finished) -> Finished:
        self._judging += 1
        try:
            validation = await self._validated(run, event)
        finally:
            self._judging -= 1
        event = replace(event, timings=replace(event.timings, grammar_s=run.grammar_s))
        run.served.series.spent(event)
        metrics = metrics_of(run, event, validation)
        # before the answer leaves: whoever asks about it later finds it
        digests = tuple(adapter.digest for adapter in run.plan.adapters)
        outcome = _outcome(run, event, validation) if digests else None
        self._records.log(Record(metrics, own_tenant(run.request.tenant), digests, outcome))
        return Finished(
            event.request_id,
            event.choices,
            event.usage,
            event.timings,
            event.experts,
            event.kv_blocks,
            event.adapter_bytes,
            run.plan.adapters,
            validation,
            metrics,
            event.unfinished,
        )

    def failed(self, run: Run, event: Failed, meter: Meter) -> None:
        self._without_answer(
            run, metrics_of(run, meter.so_far(event.request_id, ""), failure=event.code)
        )

    def left(self, run: Run, meter: Meter) -> InferenceMetrics:
        """Nobody reads it any more: what it cost until then is written down all the same."""
        metrics = self.so_far(run, meter)
        self._without_answer(run, metrics)
        return metrics

    def so_far(self, run: Run, meter: Meter) -> InferenceMetrics:
        """The figures of a request that is left at this moment."""
        request = run.request
        timeout_s = request.limits.timeout_s
        late = timeout_s is not None and time.monotonic() >= request.arrived_at + timeout_s
        reason = "timeout" if late else "abort"
        return metrics_of(run, meter.so_far(request.id, reason))

    async def _validated(self, run: Run, event: Finished) -> ValidationResult | None:
        """Half an answer is not judged: nothing but the clock is to blame for it."""
        if event.choices[0] not in WHOLE or not run.may_be_judged:
            return None
        return await self._validators.validate("".join(run.texts), _context(run, event))

    def _without_answer(self, run: Run, metrics: InferenceMetrics) -> None:
        """No digests: nobody's verdict on what was never answered counts against an adapter."""
        self._records.log(Record(metrics, own_tenant(run.request.tenant)))


def _context(run: Run, event: Finished) -> Context:
    prompt, trace = run.request.prompt, run.plan.trace
    # an answer that may call tools may have any form
    free = isinstance(prompt, Chat) and bool(prompt.tools)
    return Context(
        response_format=run.response_format,
        answer_pattern=run.plan.tuned.answer_pattern,
        task_type="" if free else run.task_type,
        code_language="" if trace is None else str(trace.features.get("code_language", "")),
        experts=names_of(run.plan),
        # a text that was ended in time is whole, whatever ended it
        finish_reason="stop" if _is_whole(run, event) else event.choices[0],
    )


def _is_whole(run: Run, event: Finished) -> bool:
    return run.response_format is not None and 0 not in event.unfinished


def _outcome(run: Run, event: Finished, validation: ValidationResult | None) -> bool | None:
    """Whether the answer speaks for its adapters. One that the caller's own limit cut short says
    nothing about them; nor does one of which only its being there could be checked, or adapters
    whose form nobody checks would pass for the best."""
    if validation is None or validation.validator == Generic.name:
        return None
    cut = event.choices[0] == "length" and run.request.limits.max_tokens is not None
    return None if cut else validation.valid
