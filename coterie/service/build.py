"""Makes a `Pipeline` from a `Config`: which engines there are and which specialists share them.

Resolves model sources, which may fetch files. Does not start anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.core.config import Config, EngineSettings, SpecialistSettings
from coterie.core.errors import ConfigError
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings
from coterie.service.adapters.admin import AdapterAdmin
from coterie.service.adapters.catalog import AdapterCatalog
from coterie.service.fleet import EngineGroup, Fleet, RoutingInputs
from coterie.service.jobs.store import JobStore
from coterie.service.pipeline import Pipeline, PipelineParts
from coterie.service.records.log import InferenceRecords
from coterie.service.validate.validators import AnswerValidators
from coterie.weights.home import state_dir
from coterie.weights.sources.hub import parse as parse_hub
from coterie.weights.sources.source import DEFAULT_MODEL, resolve
from coterie.workers.contract import Replica, WorkerSpec
from coterie.workers.inproc import InprocReplica
from coterie.workers.memory import cores

if TYPE_CHECKING:
    from coterie.weights.sources.source import Progress

# the part of a file name that names the precision, not the model
_QUANTISATION = re.compile(r"[.\-_](i?q\d\w*|bf16|f16|f32|fp16|fp32)$", re.IGNORECASE)

MakeReplica = Callable[[WorkerSpec], Replica]


def build(config: Config, *, progress: Progress | None = None, inproc: bool = False) -> Pipeline:
    """The pipeline of `config`. `inproc` runs the engines as threads of this process."""
    shared: dict[tuple[Path, str, MoeSettings], list[tuple[str, SpecialistSettings]]] = {}
    names: set[str] = set()
    for index, settings in enumerate(config.specialists):
        _check_strategy(settings.moe.strategy, f"specialists.{index}.moe.strategy")
        path = resolve(settings.model or DEFAULT_MODEL, progress=progress)
        name = settings.name or model_name(settings.model, path)
        if name in names:
            raise ConfigError(
                f"two specialists are named {name!r}; give one a name", param="specialists"
            )
        names.add(name)
        shared.setdefault((path, settings.dtype, settings.moe), []).append((name, settings))
    engines = sum(max(s.replicas for _, s in members) for members in shared.values())
    threads = config.engine.threads or max(1, cores() // engines)
    make = InprocReplica if inproc else _process_maker(config.engine)
    groups = [
        _group(f"e{index}", path, members, config, threads, make)
        for index, ((path, *_), members) in enumerate(shared.items())
    ]
    catalog = AdapterCatalog(registry_dir() if config.adapters.device_bytes else None)
    records = InferenceRecords(state_dir() / "records.db", config.jobs.max_records)
    fleet = Fleet(
        groups,
        config.server.drain_s,
        catalog,
        RoutingInputs(config.routing, records),
        config.server.clamp_max_tokens,
    )
    admin = AdapterAdmin(fleet, state_dir() / "trust.json", config.server.allow_unsigned)
    jobs = JobStore(state_dir() / "jobs.db")
    validators = AnswerValidators(config.validators)
    return Pipeline(PipelineParts(fleet, admin, records, validators, jobs, config.jobs))


def registry_dir() -> Path:
    """The folder of installed adapters, for all servers and commands with this home folder."""
    return state_dir() / "experts"


def _check_strategy(text: str, param: str) -> None:
    """Check the name of the strategy before anything is fetched or loaded."""
    if text == "auto":
        return
    from coterie.moe.dispatch.table import parse_strategy

    try:
        parse_strategy(text)
    except ConfigError as error:
        raise ConfigError(f"{param}: {error.message}", param=param) from None


def model_name(model: str, path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` is served as `smollm2-135m-instruct`."""
    if model.startswith("hf:"):
        hub = parse_hub(model[3:])
        if hub.file is None:
            # the folder of a downloaded snapshot is named by a hash
            return hub.repo.rpartition("/")[2].lower()
        path = Path(hub.file)
    # abspath: "." and ".." are no names. A symbolic link keeps its own name.
    path = Path(os.path.abspath(path))
    stem = path.stem if path.suffix == ".gguf" else path.name
    return _QUANTISATION.sub("", stem).lower()


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
