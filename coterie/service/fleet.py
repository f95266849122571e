"""The specialists with their replicas and tokenizers: starts them, measures them, closes them.

Everything here is shared by all requests; `pipeline.py` takes one request through it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.core.adapters import AdapterCard
from coterie.core.aliases import ModelAliases
from coterie.core.config import Config
from coterie.core.errors import (
    ConfigError,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unavailable,
    UnsupportedFeature,
)
from coterie.core.free_memory import return_free_memory
from coterie.core.request import AUTO, KeyRights, RouteHints
from coterie.core.sampling import NO_RECOMMENDATION, SampledWith, default_sampling
from coterie.core.snapshot import snapshot_of
from coterie.obs.log import log
from coterie.obs.metrics import MetricRegistry
from coterie.obs.tables import OWN_METRICS, adapter_series
from coterie.routing.classify.trained import TrainedRouter
from coterie.routing.classify.versions import read_current
from coterie.routing.protocols import OutcomeRates
from coterie.routing.resolve import FixedAdapter, check_targets
from coterie.routing.router import Router, Specialist
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.adapters.fixed import check_base, fixed_adapters
from coterie.service.config_check import encoder_names
from coterie.service.meter import SpecialistSeries
from coterie.service.snapshot import ServingSnapshot
from coterie.service.submit.replicas import EngineGroupLoad, ReplicaSet
from coterie.service.validate.command import ValidatorCommands
from coterie.workers.contract import AdapterInfo, Replica, ReplicaInfo

if TYPE_CHECKING:
    from coterie.models.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Specialists that share the weights of an engine, and the replicas that run it."""

    # None = the specialist is on another server
    path: Path | None
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
    # None = it is on another server: its tokens are not known here
    tokenizer: Tokenizer | None
    replicas: ReplicaSet
    series: SpecialistSeries
    info: ReplicaInfo
    # if max_tokens exceeds the context, reduce it instead of refusing the request
    clamp_max_tokens: bool = False

    @property
    def is_remote(self) -> bool:
        return self.tokenizer is None

    def own_tokenizer(self) -> Tokenizer:
        """Raises UnsupportedFeature for a specialist on another server."""
        if self.tokenizer is None:
            raise UnsupportedFeature(
                f"{self.name} is on another server: its tokens are not known here", param="model"
            )
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class RoutingInputs:
    """The settings, the names that the specialists are served by, and the success rates of
    adapters."""

    config: Config
    # in the order of the settings
    names: tuple[str, ...]
    outcomes: OutcomeRates | None = None
    # versions of the trained router; None = there is none
    router_folder: Path | None = None


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
    # of a request that sets nothing; empty where another server decides
    sampling: Mapping[str, SampledWith] = field(default_factory=dict)
    # added to chats without a system message; "" = nothing is
    system_prompt: str = ""
    # in memory, without routed experts; 0 = another server has them, or the base model
    weight_bytes: int = 0


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
        *,
        routing: RoutingInputs,
        clamp_max_tokens: bool = False,
    ) -> None:
        self.registry = MetricRegistry()
        self.catalog = catalog or AdapterCatalog(None)
        self._routing = routing
        self._rights: Mapping[str, KeyRights] | None = None
        self._groups = tuple(groups)
        self._drain_s = drain_s
        self._clamp_max_tokens = clamp_max_tokens
        self._served: dict[str, ServedSpecialist] = {}
        self._snapshot: ServingSnapshot | None = None

    @property
    def snapshot(self) -> ServingSnapshot:
        """What a request that arrives now reads, from its start to its end."""
        if self._snapshot is None:
            raise Unavailable("the models are still loading", retry_after_s=5.0)
        return self._snapshot

    @property
    def current_snapshot(self) -> ServingSnapshot | None:
        """The same; None while the models are loading."""
        return self._snapshot

    @property
    def router(self) -> Router:
        return self.snapshot.router

    @property
    def config(self) -> Config:
        """The settings that are in force."""
        return self._routing.config

    @property
    def names_in_order(self) -> tuple[str, ...]:
        """The names of all specialists in the order of the settings."""
        return self._routing.names

    def set_rights(self, rights: Mapping[str, KeyRights] | None) -> None:
        self._rights = rights
        if self._snapshot is not None:
            self._snapshot = self._snapshot.with_rights(rights)

    def prepare(
        self,
        config: Config,
        rights: Mapping[str, KeyRights] | None,
        commands: ValidatorCommands,
        trained: TrainedRouter | None,
    ) -> ServingSnapshot:
        """The snapshot of other settings for the same specialists. Changes nothing."""
        names = self._routing.names
        intents = {name: item.intents for name, item in zip(names, config.specialists, strict=True)}
        fixed = fixed_adapters(config, names, self.catalog)
        for name, stack in fixed.items():
            served = self._served[name]
            check_base(name, stack, served.info.fingerprint)
            check_room(name, stack, served)
        choices = {name: tuple(item.choice for item in stack) for name, stack in fixed.items()}
        known = [
            replace(_specialist(item), fixed=fixed.get(item.name, ()), intents=intents[item.name])
            for item in self._served.values()
        ]
        outcomes = self._routing.outcomes
        router = Router(
            known,
            self.catalog,
            config.routing,
            outcomes,
            trained=trained,
            aliases=ModelAliases(config.aliases),
        )
        check_targets(config.aliases, (*names, *encoder_names(config)), self.catalog)
        return ServingSnapshot(snapshot_of(config, names, choices, rights), router, commands)

    def read_trained(self) -> TrainedRouter | None:
        """The version of the trained router that is in use. Reads files: call it on a thread."""
        folder = self._routing.router_folder
        return None if folder is None else read_current(folder)

    def adopt(self, config: Config, snapshot: ServingSnapshot) -> None:
        """Use `snapshot` for every request that arrives from now on. Runs without waiting, so that
        no request sees a part of it."""
        self._routing = replace(self._routing, config=config)
        self._rights = snapshot.config.rights
        self._snapshot = snapshot
        self.catalog.keep(
            item.profile
            for specialist in snapshot.router.specialists.values()
            for item in specialist.fixed
        )

    def find(self, model: str | None) -> ServedSpecialist:
        if model in self._served:
            return self._served[model]
        return self._served[self.router.resolve(RouteHints(model)).specialist]

    def expected_wait_s(self, specialist: str | None = None) -> float:
        """Estimated time until a new request would get its first token, from the last reports of
        the workers."""
        replicas = self.find(specialist).replicas
        if not replicas.ready():
            return replicas.retry_after_s()
        states, _ = replicas.taking()
        return min((state.predicted_first_token_s for state in states), default=0.0)

    def names(self) -> Collection[str]:
        return self._served.keys()

    @property
    def served(self) -> Mapping[str, ServedSpecialist]:
        """By name; empty until they have started."""
        return self._served

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
            # an adapter that is not installed is reported before a model loads
            fixed_adapters(self._routing.config, self._routing.names, self.catalog)
            commands = ValidatorCommands(self._routing.config.validators)
            loaded = await all_or_none(self._start_group(group) for group in self._groups)
        except BaseException:
            await self.close()
            raise
        served = {item.name: item for group in loaded for item in group}
        # in the order of the settings: the first one is the default
        self._served = {name: served[name] for name in self._routing.names}
        try:
            trained = await asyncio.to_thread(self.read_trained)
            snapshot = self.prepare(self._routing.config, self._rights, commands, trained)
        except BaseException:
            await self.close()
            raise
        self.adopt(self._routing.config, snapshot)

    async def drain(self) -> None:
        await asyncio.gather(*(replica.drain(self._drain_s) for replica in self._replicas()))

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self._replicas()))
        await self.catalog.close()

    def cards(self, rights: RouteHints) -> tuple[ModelCard, ...]:
        """The specialists, then the adapters that fit one, by name and alias. If there are
        adapters or several specialists, `auto` is listed too, so that users of a client can leave
        the choice to the router; then the model aliases. `rights` has what the tenant may use; the
        rest is not listed."""
        allowed = rights.allowed
        bases = tuple(
            self._base_card(item)
            for item in self._served.values()
            if not allowed or item.name in allowed
        )
        adapters = tuple(
            card
            for name, adapter in self.catalog.current().items()
            if name not in self._served
            and (card := self._adapter_card(name, adapter, rights)) is not None
        )
        first = bases[0] if bases else None
        several = bool(adapters) or len(bases) > 1
        routed = (replace(first, name=AUTO),) if several and first is not None else ()
        return bases + adapters + routed + tuple(self._alias_cards(rights))

    def _alias_cards(self, rights: RouteHints) -> Iterator[ModelCard]:
        """Of the aliases without wildcards whose model can be used."""
        for name in self.router.aliases.exact:
            with suppress(NotFound, Forbidden, InvalidRequest):
                yield self.card(name, rights)

    def card(self, model: str | None, rights: RouteHints) -> ModelCard:
        route = self.router.resolve(replace(rights, model=model))
        base = self._served[route.specialist]
        target = self.router.named(RouteHints(model)).model
        if target != model:
            return replace(self.card(target, rights), name=str(model), root=str(target))
        if not route.adapters:
            card = self._base_card(base)
            return replace(card, name=AUTO) if model == AUTO else card
        root = "+".join(adapter.name for adapter in route.adapters)
        known = [self.catalog.by_digest(adapter.digest) for adapter in route.adapters]
        created = max(int(card.installed_at) for card in known if card is not None)
        sampling = _default_sampling(base)
        return ModelCard(str(model), created, base.context, root, base.name, sampling)

    def _base_card(self, item: ServedSpecialist) -> ModelCard:
        system = "" if item.tokenizer is None else item.tokenizer.card_system
        if self.router.specialists[item.name].fixed:
            system = ""
        return ModelCard(
            item.name,
            item.created,
            item.context,
            item.model,
            sampling=_default_sampling(item),
            system_prompt=system,
            weight_bytes=item.info.weight_bytes,
        )

    def _adapter_card(
        self, name: str, adapter: AdapterCard, rights: RouteHints
    ) -> ModelCard | None:
        allowed = rights.allowed
        if not self.router.may_use(adapter, rights):
            return None
        fitting = [item for item in self.router.fits(adapter) if not allowed or item in allowed]
        if not fitting:
            return None
        base = self._served[fitting[0]]
        package = f"{adapter.name}@{adapter.version}"
        installed_at, sampling = int(adapter.installed_at), _default_sampling(base)
        return ModelCard(name, installed_at, base.context, package, base.name, sampling)

    def health(self, *, is_open: bool) -> ServiceHealth:
        """`is_open`: the server has started and does not shut down."""
        details = {name: _details(item) for name, item in self._served.items()}
        damaged = sorted(f"{card.name}@{card.version}" for card in self.catalog.damaged())
        if damaged:
            details = {name: item | {"damaged_experts": damaged} for name, item in details.items()}
        # a server elsewhere that is down is no reason to send nobody here
        needed = [item.name for item in self._served.values() if not item.is_remote]
        ready = bool(details) and is_open
        ready = ready and all(details[name]["ready"] for name in needed or details)
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
            for outcome, count in item.replicas.retries.items():
                self.registry.value("coterie_retries", name, outcome).set(count)
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
        shared = EngineGroupLoad(replica.name for replica in group.replicas)
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
                replicas=ReplicaSet(name, group.replicas, info.max_sequences[name], shared),
                series=SpecialistSeries(self.registry, name),
                info=info,
                clamp_max_tokens=self._clamp_max_tokens,
            )
            for name, model in group.specialists.items()
        ]

    def _replicas(self) -> list[Replica]:
        return [replica for group in self._groups for replica in group.replicas]


def _read_tokenizer(path: Path | None) -> Tokenizer | None:
    if path is None:
        return None
    from coterie.models.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    # compute them now on this thread: they are cached, and later read on the event loop
    tokenizer.fingerprint()
    tokenizer.least_tokens("")
    # what reading the vocabulary took
    return_free_memory()
    return tokenizer


def _specialist(item: ServedSpecialist) -> Specialist:
    room = item.info.adapters
    nbytes = 0 if room is None else room.device_bytes
    info, tokenizer = item.info, item.tokenizer
    advice = NO_RECOMMENDATION if tokenizer is None else tokenizer.recommended
    return Specialist(item.name, info.generation, info.fingerprint, nbytes, recommended=advice)


def _default_sampling(item: ServedSpecialist) -> dict[str, SampledWith]:
    """Of a request that sets nothing and names this specialist."""
    if item.tokenizer is None:
        return {}
    return default_sampling(item.info.generation, item.tokenizer.recommended.sampling)


def check_room(specialist: str, fixed: Sequence[FixedAdapter], served: ServedSpecialist) -> None:
    """Refuse adapters that could never be on the device together, or that leave no context."""
    room, cards = served.info.adapters, [item.profile.card for item in fixed]
    nbytes = sum(item.profile.device_bytes or item.profile.card.nbytes for item in fixed)
    param = f"specialists.{specialist}.adapters"
    if room is None or nbytes > room.device_bytes:
        most = 0 if room is None else room.device_bytes
        text = f"their {nbytes / 1e6:.1f} MB do not fit in {most / 1e6:.1f} MB"
        raise ConfigError(f"{param}: {text} (adapters.device_bytes)", param=param)
    tokens = sum(card.num_virtual_tokens for card in cards)
    if tokens + 2 > served.context:
        text = f"their {tokens} soft tokens leave no place in a context of {served.context}"
        raise ConfigError(f"{param}: {text}", param=param)


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
        "states": {replica.name: item.replicas.shown_state(replica) for replica in members},
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
