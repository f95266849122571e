"""The specialists with their replicas and tokenizers: starts them, measures them, closes them.

Everything here is shared by all requests; `pipeline.py` takes one request through it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.core.adapters import AdapterCard
from coterie.core.errors import Unavailable
from coterie.core.request import AUTO, RouteHints
from coterie.core.settings import RoutingSettings
from coterie.obs.log import log
from coterie.obs.metrics import MetricRegistry
from coterie.obs.tables import OWN_METRICS, adapter_series
from coterie.routing.protocols import OutcomeRates
from coterie.routing.router import Router, Specialist
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.meter import SpecialistSeries
from coterie.service.submit.admission import ReplicaSet
from coterie.workers.contract import AdapterInfo, Replica, ReplicaInfo

if TYPE_CHECKING:
    from coterie.service.adapters.catalog import AdapterCatalog

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Specialists that share the weights of an engine, and the replicas that run it."""

    path: Path
    # specialist -> the model as it is written in the configuration
    specialists: Mapping[str, str]
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class ServedSpecialist:
    """A specialist that is ready to serve."""

    name: str
    model: str
    created: int
    context: int
    max_sequences: int
    tokenizer: Tokenizer
    replicas: ReplicaSet
    series: SpecialistSeries
    info: ReplicaInfo
    # if max_tokens exceeds the context, reduce it instead of refusing the request
    clamp_max_tokens: bool = False


@dataclass(frozen=True, slots=True)
class RoutingInputs:
    """The routing settings, and the success rates of adapters."""

    settings: RoutingSettings | None = None
    outcomes: OutcomeRates | None = None


@dataclass(frozen=True, slots=True)
class BaseFingerprints:
    """Fingerprints of the base models: of all specialists, and of a named one."""

    every: tuple[str, ...]
    named: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models."""

    name: str
    created: int
    max_model_len: int
    root: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """`live`: the process works and its workers can start. `ready`: every specialist can take a
    request."""

    live: bool
    ready: bool
    specialists: dict[str, dict[str, Any]] = field(default_factory=dict)


class Fleet:
    def __init__(
        self,
        groups: Sequence[EngineGroup],
        drain_s: float = 30.0,
        catalog: AdapterCatalog | None = None,
        routing: RoutingInputs | None = None,
        clamp_max_tokens: bool = False,
    ) -> None:
        self.registry = MetricRegistry()
        self.catalog = catalog or AdapterCatalog(None)
        self._routing = routing or RoutingInputs()
        self._groups = tuple(groups)
        self._drain_s = drain_s
        self._clamp_max_tokens = clamp_max_tokens
        self._served: dict[str, ServedSpecialist] = {}
        self._router: Router | None = None

    @property
    def router(self) -> Router:
        if self._router is None:
            raise Unavailable("the models are still loading", retry_after_s=5.0)
        return self._router

    def find(self, model: str | None) -> ServedSpecialist:
        if model in self._served:
            return self._served[model]
        return self._served[self.router.resolve(RouteHints(model)).specialist]

    def expected_wait_s(self, specialist: str | None = None) -> float:
        """Estimated time until a new request would get its first token, from the last reports of
        the workers."""
        replicas = self.find(specialist).replicas
        if not replicas.ready():
            return min(replica.retry_after_s() for replica in replicas.members)
        return min((state.predicted_first_token_s for state in replicas.states()), default=0.0)

    def names(self) -> Collection[str]:
        return self._served.keys()

    def fingerprints(self, specialist: str | None = None) -> BaseFingerprints:
        """The fingerprints; by default the named one is that of the first specialist."""
        named = self.find(specialist).info.fingerprint
        return BaseFingerprints(
            tuple(item.info.fingerprint for item in self._served.values()), (named,)
        )

    def adapter_infos(self, fingerprints: Collection[str]) -> dict[str, AdapterInfo]:
        """The adapter limits of the specialists with these models, by name."""
        return {
            item.name: item.info.adapters
            for item in self._served.values()
            if item.info.adapters is not None and item.info.fingerprint in fingerprints
        }

    async def start(self) -> None:
        """Load all groups at the same time. If one fails, none is left running."""
        try:
            # before the first request
            await self.catalog.start()
            loaded = await all_or_none(self._start_group(group) for group in self._groups)
        except BaseException:
            await self.close()
            raise
        served = [item for group in loaded for item in group]
        self._served = {item.name: item for item in served}
        known = [_specialist(item) for item in served]
        settings, outcomes = self._routing.settings, self._routing.outcomes
        self._router = Router(known, self.catalog, settings, outcomes)

    async def drain(self) -> None:
        await asyncio.gather(*(replica.drain(self._drain_s) for replica in self._replicas()))

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self._replicas()))
        await self.catalog.close()

    def cards(self) -> tuple[ModelCard, ...]:
        """The specialists, then the adapters that fit one, by name and alias. If there are
        adapters, `auto` is listed too, so that users of a client can leave the choice to the
        router."""
        bases = tuple(
            ModelCard(item.name, item.created, item.context, item.model)
            for item in self._served.values()
        )
        adapters = tuple(
            card
            for name, adapter in self.catalog.current().items()
            if name not in self._served and (card := self._adapter_card(name, adapter)) is not None
        )
        first = bases[0] if bases else None
        routed = (replace(first, name=AUTO),) if adapters and first is not None else ()
        return bases + adapters + routed

    def card(self, model: str | None) -> ModelCard:
        route = self.router.resolve(RouteHints(model))
        base = self._served[route.specialist]
        if not route.adapters:
            name = AUTO if model == AUTO else base.name
            return ModelCard(name, base.created, base.context, base.model)
        root = "+".join(adapter.name for adapter in route.adapters)
        known = [self.catalog.by_digest(adapter.digest) for adapter in route.adapters]
        created = max(int(card.installed_at) for card in known if card is not None)
        return ModelCard(str(model), created, base.context, root, base.name)

    def _adapter_card(self, name: str, adapter: AdapterCard) -> ModelCard | None:
        fitting = self.router.fits(adapter)
        if not fitting:
            return None
        base = self._served[fitting[0]]
        package = f"{adapter.name}@{adapter.version}"
        return ModelCard(name, int(adapter.installed_at), base.context, package, base.name)

    def health(self, *, draining: bool) -> ServiceHealth:
        details = {name: _details(item) for name, item in self._served.items()}
        damaged = sorted(f"{card.name}@{card.version}" for card in self.catalog.damaged())
        if damaged:
            details = {name: item | {"damaged_experts": damaged} for name, item in details.items()}
        ready = bool(details) and not draining and all(item["ready"] for item in details.values())
        states = [replica.state() for replica in self._replicas()] if details else []
        live = not states or any(state != "failing" for state in states)
        return ServiceHealth(live=live, ready=ready, specialists=details)

    def measure(self) -> None:
        """Update the gauges."""
        for name, item in self._served.items():
            states = item.replicas.states()
            total = sum(state.total_tokens for state in states)
            free = sum(state.free_tokens for state in states)
            self.registry.value("vllm:num_requests_running", name).set(item.replicas.running())
            self.registry.value("vllm:num_requests_waiting", name).set(item.replicas.queued())
            usage = 1 - free / total if total else 0.0
            self.registry.value("vllm:kv_cache_usage_perc", name).set(usage)
        for replica in self._replicas():
            stats = replica.stats()
            restarts = stats.pop("restarts", 0.0)
            self.registry.value("coterie_worker_restarts", replica.name).set(restarts)
            self.registry.value("coterie_worker_up", replica.name).set(float(replica.healthy()))
            self.registry.engine_stats(replica.name, stats)
        self.registry.value("coterie_damaged_experts").set(len(self.catalog.damaged()))
        measure_adapters(self.registry, self.catalog, self._served.values())

    async def _start_group(self, group: EngineGroup) -> list[ServedSpecialist]:
        reading = asyncio.to_thread(_read_tokenizer, group.path)
        starting: list[Coroutine[Any, Any, Any]] = [replica.start() for replica in group.replicas]
        tokenizer, *infos = await all_or_none([reading, *starting])
        info: ReplicaInfo = infos[0]
        for item in infos:
            log("worker_ready", replica=item.name, pid=item.pid, dtype=item.dtype,
                device=item.device, threads=item.threads)  # fmt: skip
        return [
            ServedSpecialist(
                name=name,
                model=model,
                created=int(time.time()),
                context=min(item.contexts[name] for item in infos),
                max_sequences=info.max_sequences[name],
                tokenizer=tokenizer,
                replicas=ReplicaSet(name, group.replicas, info.max_sequences[name]),
                series=SpecialistSeries(self.registry, name),
                info=info,
                clamp_max_tokens=self._clamp_max_tokens,
            )
            for name, model in group.specialists.items()
        ]

    def _replicas(self) -> list[Replica]:
        return [replica for group in self._groups for replica in group.replicas]


def _read_tokenizer(path: Path) -> Tokenizer:
    from coterie.models.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    # compute them now on this thread: they are cached, and later read on the event loop
    tokenizer.fingerprint()
    tokenizer.least_tokens("")
    return tokenizer


def _specialist(item: ServedSpecialist) -> Specialist:
    room = item.info.adapters
    nbytes = 0 if room is None else room.device_bytes
    return Specialist(item.name, item.info.generation, item.info.fingerprint, nbytes)


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results. If one fails, the others are cancelled and end first."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _details(item: ServedSpecialist) -> dict[str, Any]:
    members = item.replicas.members
    extras = {
        name: asdict(facts)
        for name, facts in (("experts", item.info.experts), ("adapters", item.info.adapters))
        if facts is not None
    }
    # the table of modules says nothing about health
    extras.get("adapters", {}).pop("modules", None)
    return {
        "ready": item.replicas.ready(),
        "replicas": {replica.name: replica.healthy() for replica in members},
        "states": {replica.name: replica.state() for replica in members},
        "queued": item.replicas.queued(),
        "dtype": item.info.dtype,
        "device": item.info.device,
        "weight_bytes": item.info.weight_bytes,
        "kv_bytes": item.info.kv_bytes,
        "graph_bytes": item.info.graph_bytes,
        "max_model_len": item.context,
    } | extras


REQUESTS, LOADED = "vllm:lora_requests_info", "vllm:lora_adapter_loaded"


def measure_adapters(
    registry: MetricRegistry, catalog: AdapterCatalog, served: Collection[ServedSpecialist]
) -> None:
    registry.forget((*OWN_METRICS, REQUESTS, LOADED))
    rooms = [item.info.adapters for item in served if item.info.adapters is not None]
    if not rooms:
        return
    most = str(max(room.max_stacks for room in rooms))
    running, waiting = (
        ",".join(sorted(counts)) for counts in (catalog.leases.running, catalog.leases.waiting)
    )
    registry.value(REQUESTS, most, running, waiting).set(time.time())
    for item in served:
        _residency(registry, catalog, item)
        for replica in item.replicas.members:
            for name, labels, value in adapter_series(replica.name, replica.adapter_loads()):
                registry.value(name, *labels).set(value)


def _residency(registry: MetricRegistry, catalog: AdapterCatalog, item: ServedSpecialist) -> None:
    """Report each name that means a resident digest, in use or not: external routers read which
    adapters are loaded."""
    resident = {d for state in item.replicas.states() for d in state.resident_adapters}
    for name, card in catalog.current().items():
        if card.digest in resident:
            pinned = str(card.pinned).lower()
            registry.value(LOADED, item.name, name, "gpu", pinned).set(1)
