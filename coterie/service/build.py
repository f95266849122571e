"""Makes a `Pipeline` from a `Config`: which engines there are and which specialists share them.

Resolves model sources, which may fetch files. Does not start anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from coterie import __version__
from coterie.core.config import Config, EngineSettings, SpecialistSettings
from coterie.core.errors import ConfigError
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings
from coterie.obs.tracing.tracer import make_tracer
from coterie.routing.classify.versions import folder_of
from coterie.service.adapters.admin import AdapterAdmin
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.batches.files import FileStore
from coterie.service.batches.folder import FileFolder
from coterie.service.batches.service import BatchParts
from coterie.service.batches.store import BatchStore
from coterie.service.config_check import check, expected_names, model_name
from coterie.service.encoders.service import EncoderService
from coterie.service.encoders.start import encoder_starts
from coterie.service.ensemble import EnsembleService
from coterie.service.fleet import EngineGroup, Fleet, RoutingInputs
from coterie.service.jobs.store import JobStore
from coterie.service.pipeline import Pipeline, PipelineParts
from coterie.service.records.log import InferenceRecords
from coterie.service.responses.store import ResponseStore
from coterie.service.slo.keeper import EnsembleKeeper
from coterie.service.validate.validators import AnswerValidators
from coterie.weights.home import state_dir
from coterie.weights.sources.source import DEFAULT_MODEL, resolve
from coterie.workers.contract import Replica, WorkerSpec
from coterie.workers.inproc import InprocReplica
from coterie.workers.memory import cores
from coterie.workers.remote.replica import RemoteReplica, RemoteSpec

if TYPE_CHECKING:
    from coterie.weights.sources.source import Progress

MakeReplica = Callable[[WorkerSpec], Replica]


def build(config: Config, *, progress: Progress | None = None, inproc: bool = False) -> Pipeline:
    """The pipeline of `config`. `inproc` runs the engines as threads of this process."""
    shared: dict[tuple[Path, str, MoeSettings], list[tuple[str, SpecialistSettings]]] = {}
    names: list[str] = []
    # before anything is fetched or loaded
    check(config, expected_names(config))
    remotes: list[EngineGroup] = []
    for settings in config.specialists:
        if settings.remote.url:
            names.append(settings.name)
            remotes.append(_remote_group(settings, config.engine.max_queue))
            continue
        path = resolve(settings.model or DEFAULT_MODEL, progress=progress)
        name = settings.name or model_name(settings.model, path)
        if name in names:
            raise ConfigError(
                f"two specialists are named {name!r}; give one a name", param="specialists"
            )
        names.append(name)
        shared.setdefault((path, settings.dtype, settings.moe), []).append((name, settings))
    engines = sum(max(s.replicas for _, s in members) for members in shared.values())
    threads = config.engine.threads or max(1, cores() // max(engines, 1))
    make = InprocReplica if inproc else _process_maker(config.engine)
    groups = [
        _group(f"e{index}", path, members, config, threads, make)
        for index, ((path, *_), members) in enumerate(shared.items())
    ]
    groups += remotes
    encoders = EncoderService(
        encoder_starts(config, names, progress), config.engine.max_queue, config.server.drain_s
    )
    catalog = AdapterCatalog(registry_dir() if config.adapters.device_bytes else None)
    records = InferenceRecords(
        state_dir() / "records.db", config.jobs.max_records, config.ensemble.max_receipts
    )
    fleet = Fleet(
        groups,
        config.server.drain_s,
        catalog,
        routing=RoutingInputs(
            config, tuple(names), records, folder_of(config.ensemble.router, state_dir())
        ),
        clamp_max_tokens=config.server.clamp_max_tokens,
    )
    admin = AdapterAdmin(fleet, state_dir() / "trust.json", config.server.allow_unsigned)
    jobs = JobStore(state_dir() / "jobs.db")
    killed = fleet.registry.value("coterie_recoveries", "validators", "child_killed")
    validators = AnswerValidators(on_killed=killed.add)
    keeper = EnsembleKeeper(state_dir() / "ensemble.db", state_dir() / "calibration.jsonl")
    ensemble = EnsembleService(fleet, admin, keeper, records.rate)
    responses = ResponseStore(state_dir() / "responses.db", config.responses)
    tracer = make_tracer(config.tracing, __version__)
    return Pipeline(
        PipelineParts(
            fleet,
            admin,
            records,
            validators,
            jobs,
            config.jobs,
            ensemble,
            responses,
            _batch_parts(config),
            encoders,
            tracer,
        )
    )


def _batch_parts(config: Config) -> BatchParts:
    store = BatchStore(state_dir() / "batches.db")
    files = FileStore(store, FileFolder(state_dir() / "files"), config.files)
    return BatchParts(store, files, config.batches)


def registry_dir() -> Path:
    """The folder of installed adapters, for all servers and commands with this home folder."""
    return state_dir() / "experts"


def _process_maker(engine: EngineSettings) -> MakeReplica:
    # imported only if engines run in other processes
    from coterie.workers.supervisor import ProcessReplica, RestartPolicy

    restart = RestartPolicy(
        engine.restart_backoff_s,
        engine.max_restart_backoff_s,
        engine.hang_s,
        engine.load_timeout_s,
    )
    return lambda spec: ProcessReplica(spec, restart)


def _group(
    name: str,
    path: Path,
    members: list[tuple[str, SpecialistSettings]],
    config: Config,
    threads: int,
    make: MakeReplica,
) -> EngineGroup:
    engine = config.engine
    lanes = tuple(_lane(lane, settings, engine) for lane, settings in members)
    count = max(settings.replicas for _, settings in members)
    specs = [
        WorkerSpec(
            name=f"{name}r{index}",
            model=str(path),
            lanes=lanes,
            dtype=members[0][1].dtype,
            device=engine.device,
            threads=threads,
            kv_bytes=engine.kv_bytes,
            capture_graphs=engine.capture_graphs,
            log_level=config.server.log_level,
            dispatch=members[0][1].moe,
            adapters=config.adapters,
            library=str(registry_dir() / "library") if config.adapters.device_bytes else "",
        )
        for index in range(count)
    ]
    models = {lane: settings.model or DEFAULT_MODEL for lane, settings in members}
    return EngineGroup(path, models, tuple(make(spec) for spec in specs))


def _remote_group(settings: SpecialistSettings, max_queue: int) -> EngineGroup:
    """A specialist on another server: nothing to resolve and nothing to load."""
    name, remote = settings.name, settings.remote
    replica = RemoteReplica(RemoteSpec(f"remote-{name}", name, remote, max_queue))
    return EngineGroup(None, {name: remote.model or name}, (replica,))


def _lane(name: str, settings: SpecialistSettings, engine: EngineSettings) -> LaneConfig:
    return LaneConfig(
        name=name,
        context=settings.context,
        block_size=settings.block_size,
        max_queue=engine.max_queue,
        max_sequences=engine.max_sequences,
        max_step_tokens=engine.max_step_tokens,
        max_mixed_tokens=engine.max_mixed_tokens,
        kv_cache_slots=engine.kv_cache_slots,
        prefix_cache=engine.prefix_cache,
        weight=settings.weight,
    )
