"""The parts of what a dashboard shows, each as JSON: those that did not change are not sent again.

Of requests, receipts and jobs a tenant gets its own, the operator those of all. Nothing here waits,
except for the list of jobs, which is on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from coterie.core.job import Job
from coterie.core.request import DEFAULT_PRIORITY, own_tenant
from coterie.service.dashboard.activity import FollowedRequest, RequestActivity
from coterie.service.dashboard.stage import StageInputs, encoding_stage, stage_of
from coterie.service.encoders.service import EncoderService, OpenEncoding
from coterie.service.ensemble import EnsembleService
from coterie.service.fleet import Fleet, ServedSpecialist, ServiceHealth
from coterie.service.jobs.service import JobService
from coterie.service.slo.board import EPOCH
from coterie.workers.contract import AdapterLoad, Replica

# rows that are shown; of requests those that wait longest
MAX_REQUESTS, MAX_JOBS, MAX_ADAPTERS = 100, 20, 200
# characters of a name that a caller chose
MAX_NAME = 128
# the statistics of an engine that are shown
_STATS = (
    "running", "waiting", "kv_usage", "cached_blocks", "preemptions", "prefix_queries_tokens",
    "prefix_hits_tokens", "adapter_resident", "adapter_resident_bytes", "adapter_host_bytes",
    "adapter_loading", "adapter_evictions", "adapter_failures", "adapter_lookups_device",
    "adapter_lookups_host", "adapter_lookups_disk", "moe_device_hits", "moe_prefetch_hits",
    "moe_device_misses", "moe_host_runs", "moe_host_misses", "moe_swaps", "moe_moved_bytes",
    "moe_read_bytes", "moe_stall_s",
)  # fmt: skip

Sections = dict[str, bytes]
_encode = msgspec.json.Encoder().encode


class DashboardSections:
    """`health`: whether the server can serve now."""

    def __init__(
        self,
        fleet: Fleet,
        ensemble: EnsembleService,
        jobs: JobService,
        activity: RequestActivity,
        encoders: EncoderService,
        health: Callable[[], ServiceHealth],
    ) -> None:
        self._fleet, self._ensemble, self._jobs = fleet, ensemble, jobs
        self._activity, self._encoders, self._health = activity, encoders, health
        # of each replica, its MoE stall and when it was read
        self._stalled: dict[str, tuple[float, float]] = {}

    async def read(self, tenants: Collection[str | None]) -> dict[str | None, Sections]:
        """The sections for each of these tenants; None is the operator."""
        jobs = {tenant: await self._jobs.newest(MAX_JOBS, tenant) for tenant in tenants}
        now = time.monotonic()
        report = {item["specialist"]: item for item in self._ensemble.report()}
        stalls = self._stalls(now) if self._activity.open else {}
        inputs = {name: StageInputs(item, stalls) for name, item in report.items()}
        shown = {name: self._specialist(self._fleet.served[name], report[name]) for name in report}
        requests = self._requests(inputs, now)
        found: dict[str | None, Sections] = {}
        for tenant in tenants:
            sections: Sections = self._operators() if tenant is None else {}
            allowed = self._allowed(tenant)
            seen = [item for name, item in shown.items() if not allowed or name in allowed]
            own = [item for owner, item in requests if tenant in (None, owner)]
            sections["server"] = self._server(tenant)
            sections["specialists"] = _encode(seen)
            sections["requests"] = _encode({"total": len(own), "data": own[:MAX_REQUESTS]})
            sections["jobs"] = self._job_list(jobs[tenant], tenant)
            found[tenant] = sections
        return found

    def _allowed(self, tenant: str | None) -> tuple[str, ...]:
        snapshot = self._fleet.current_snapshot
        return () if tenant is None or snapshot is None else snapshot.config.may_use(tenant)

    def _server(self, tenant: str | None) -> bytes:
        health, snapshot = self._health(), self._fleet.current_snapshot
        shown: dict[str, Any] = {"ready": health.ready, "live": health.live}
        if tenant is None:
            shown["config_digest"] = "" if snapshot is None else snapshot.config.digest
            shown["damaged_experts"] = len(self._fleet.catalog.damaged())
        return _encode(shown)

    def _operators(self) -> Sections:
        """What only the operator sees."""
        if not self._fleet.served:
            return {}
        replicas = self._replicas()
        status = self._ensemble.status()
        del status["specialists"], status["replicas"]
        maps = {
            replica.name: asdict(found)
            for replica, item in replicas.values()
            if item.info.experts is not None and (found := replica.residency()) is not None
        }
        changes = [asdict(change) for change in reversed(self._ensemble.recent_changes)]
        return {
            "engines": _encode([self._engine(*entry) for entry in replicas.values()]),
            "adapters": _encode(self._adapters(replicas)),
            "residency": _encode(maps),
            "ensemble": _encode(status),
            "audit": _encode(changes),
        }

    def _replicas(self) -> dict[str, tuple[Replica, ServedSpecialist]]:
        """By name; specialists that share an engine share its replicas."""
        return {
            replica.name: (replica, item)
            for item in self._fleet.served.values()
            for replica in item.replicas.members
        }

    def _specialist(self, item: ServedSpecialist, slo: Mapping[str, Any]) -> dict[str, Any]:
        states = item.replicas.states()
        series = item.series
        return dict(slo) | {
            "model": item.model,
            "context": item.context,
            "is_remote": item.is_remote,
            "replicas": {one.name: item.replicas.shown_state(one) for one in item.replicas.members},
            "max_queue": sum(state.max_queue for state in states),
            "kv_total": sum(state.total_tokens for state in states),
            "kv_free": sum(state.free_tokens for state in states),
            "kv_cached": sum(state.cached_tokens for state in states),
            "block_size": max((state.block_size for state in states), default=0),
            "step_s": round(max((state.step_s for state in states), default=0.0), 4),
            "prompt_tokens": series.prompt_tokens.value,
            "generation_tokens": series.generation_tokens.value,
        }

    def _engine(self, replica: Replica, item: ServedSpecialist) -> dict[str, Any]:
        info, stats = item.info, replica.stats()
        shown = {
            "name": replica.name,
            "state": item.replicas.shown_state(replica),
            "specialists": [
                other.name
                for other in self._fleet.served.values()
                if replica.name in other.replicas.names
            ],
            "restarts": stats.get("restarts", 0.0),
            "in_flight": replica.in_flight(),
            "architecture": info.architecture,
            "device": info.device,
            "dtype": info.dtype,
            "threads": info.threads,
            "weight_bytes": info.weight_bytes,
            "kv_bytes": info.kv_bytes,
            "stats": {name: round(stats[name], 4) for name in _STATS if name in stats},
            "experts": None if info.experts is None else asdict(info.experts),
            "adapters": None,
        }
        if info.adapters is not None:
            room = info.adapters
            shown["adapters"] = {
                "device_bytes": room.device_bytes,
                "host_bytes": room.host_bytes,
                "max_stacks": room.max_stacks,
            }
        return shown

    def _adapters(self, replicas: Mapping[str, tuple[Replica, ServedSpecialist]]) -> dict[str, Any]:
        catalog = self._fleet.catalog
        loads: dict[str, list[tuple[str, AdapterLoad]]] = {}
        for name, (replica, _) in replicas.items():
            for load in replica.adapter_loads():
                loads.setdefault(load.digest, []).append((name, load))
        running, waiting = catalog.leases.running, catalog.leases.waiting
        rows: list[dict[str, Any]] = []
        for name, card in catalog.current().items():
            told = loads.get(card.digest, [])
            rows.append(
                {
                    "name": name,
                    "version": card.version,
                    "kind": card.kind,
                    "bytes": card.nbytes,
                    "pinned": card.pinned,
                    "resident": sorted(where for where, load in told if load.resident),
                    "running": running.get(name, 0),
                    "waiting": waiting.get(name, 0),
                    "loads": sum(load.loads for _, load in told),
                    "load_s": round(
                        sum(load.disk_s + load.compose_s + load.place_s for _, load in told), 4
                    ),
                }
            )
        # those that are used, then those that are there, then the others by name
        rows.sort(key=lambda row: (not row["running"], not row["resident"], row["name"]))
        return {"total": len(rows), "data": rows[:MAX_ADAPTERS]}

    def _requests(
        self, inputs: Mapping[str, StageInputs], now: float
    ) -> list[tuple[str, dict[str, Any]]]:
        """(tenant, row) of each request in flight, the oldest first."""
        found = [
            (own_tenant(request.run.request.tenant), _request_row(request, known, now))
            for request in self._activity.open.values()
            if (known := inputs.get(request.run.served.name)) is not None
        ]
        if encodings := self._encoders.open.values():
            found += [
                (own_tenant(it.caller.tenant), self._encoding_row(it, now)) for it in encodings
            ]
            found.sort(key=lambda entry: entry[1]["arrived_at"])
        return found

    def _encoding_row(self, item: OpenEncoding, now: float) -> dict[str, Any]:
        """A request to an encoder, with the fields of the others."""
        asked, served = item.caller.receipt.asked, item.served
        stage = encoding_stage(item, self._encoders.waiting_beside(item), now)
        return {
            "id": asked.request_id,
            "tenant": own_tenant(asked.tenant),
            "model": asked.model[:MAX_NAME],
            "specialist": served.name,
            "replica": "" if served.replica is None else served.replica.name,
            "adapters": [],
            "intent": asked.operation,
            "priority": DEFAULT_PRIORITY,
            "is_job": False,
            "arrived_at": round(EPOCH + asked.arrived_at, 3),
            "stage": stage.name,
            "stage_at": round(EPOCH + stage.since, 3),
            "why": stage.why,
            "is_slow": stage.is_slow,
            "inputs": item.num_inputs,
            "prompt_tokens": item.num_tokens,
            "cached_tokens": 0,
            "tokens": 0,
            "max_tokens": 0,
        }

    def _stalls(self, now: float) -> dict[str, float]:
        """Of each replica with MoE experts: the share of the time since the last call in which it
        waited for them."""
        shares: dict[str, float] = {}
        for name, (replica, item) in self._replicas().items():
            if item.info.experts is None:
                continue
            stall_s = replica.stats().get("moe_stall_s", 0.0)
            before_s, at = self._stalled.get(name, (stall_s, now))
            self._stalled[name] = stall_s, now
            if now > at:
                shares[name] = min(max(stall_s - before_s, 0.0) / (now - at), 1.0)
        return shares

    def _job_list(self, jobs: list[Job], tenant: str | None) -> bytes:
        rows = [
            {
                "job_id": job.id,
                "status": job.status,
                "tenant": own_tenant(job.tenant),
                "submitted_at": job.submitted_at,
                "started_at": job.started_at,
                "finished_at": job.finished_at,
            }
            for job in jobs
        ]
        return _encode({"counts": self._jobs.counts() if tenant is None else None, "data": rows})


def _request_row(request: FollowedRequest, inputs: StageInputs, now: float) -> dict[str, Any]:
    run, meter = request.run, request.meter
    stage, plan = stage_of(request, inputs, now), run.plan
    started = meter.started
    return {
        "id": run.request.id,
        "tenant": own_tenant(run.request.tenant),
        "model": (run.request.hints.model or "")[:MAX_NAME],
        "specialist": plan.specialist,
        "replica": run.replica,
        "adapters": [item.name for item in plan.adapters],
        "intent": plan.intent[:MAX_NAME],
        "priority": run.request.limits.priority,
        "is_job": run.request.submitted_at is not None,
        # seconds since 1970
        "arrived_at": round(EPOCH + run.request.arrived_at, 3),
        "stage": stage.name,
        "stage_at": round(EPOCH + stage.since, 3),
        "why": stage.why,
        "is_slow": stage.is_slow,
        "prompt_tokens": len(run.prompt_ids) if started is None else started.prompt_tokens,
        "cached_tokens": 0 if started is None else started.cached_tokens,
        "tokens": meter.completion_tokens,
        "max_tokens": run.max_tokens,
    }
