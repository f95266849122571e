"""What is done once a request has ended: judge its answer, measure, write down, learn.

Turns the engine's last event into the one that leaves the system. Knows no replicas and no HTTP.
"""

from __future__ import annotations

from dataclasses import replace

from coterie.core.events import Failed, Finished
from coterie.core.outcome import InferenceMetrics, ValidationResult
from coterie.service.catalog import Catalog
from coterie.service.measure import metrics_of
from coterie.service.record_store import Record
from coterie.service.records import Records
from coterie.service.route_meter import RouteMeter
from coterie.service.run import Run


class Ending:
    def __init__(self, records: Records, catalog: Catalog, meter: RouteMeter) -> None:
        self._records, self._catalog, self._meter = records, catalog, meter

    async def finished(self, run: Run, event: Finished) -> Finished:
        validation = await self._validated(run, event)
        metrics = metrics_of(run, event, validation, self._catalog.by_digest)
        self._meter.finished(metrics, validation)
        # before the answer leaves: whoever asks about it later finds it
        self._write(run, metrics, _outcome(run, event, validation))
        return replace(event, adapters=run.plan.adapters, validation=validation, metrics=metrics)

    def failed(self, run: Run, event: Failed) -> None:
        self._write(run, metrics_of(run, event, None, self._catalog.by_digest), None)

    async def _validated(self, run: Run, event: Finished) -> ValidationResult | None:
        return None

    def _write(self, run: Run, metrics: InferenceMetrics, outcome: bool | None) -> None:
        # a salt isolates a tenant's prefix blocks, not its log
        tenant = run.request.tenant.partition("+")[0]
        digests = tuple(adapter.digest for adapter in run.plan.adapters)
        self._records.log(Record(metrics, tenant, digests, outcome if digests else None))


def _outcome(run: Run, event: Finished, validation: ValidationResult | None) -> bool | None:
    """Whether the answer speaks for its adapters. One that the caller's own limit cut short says
    nothing about them."""
    if validation is None:
        return None
    cut = event.choices[0] == "length" and run.request.limits.max_tokens is not None
    return None if cut else validation.valid
