"""Makes encoders from the settings: what runs in a process of its own, and what in the gateway."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.core.config import Config, EngineSettings, SpecialistSettings
from coterie.core.encoders import STATIC
from coterie.core.errors import ConfigError
from coterie.models.encoder.spec import EncoderModelSpec, read_encoder_spec
from coterie.models.encoder.tokens import FileTokenizer
from coterie.obs.log import log
from coterie.service.config_check import model_name
from coterie.service.encoders.served import (
    STATIC_TOKENS,
    EncoderPrompts,
    ProcessVectors,
    ServedEncoder,
    StaticTokenizer,
    StaticVectors,
)
from coterie.weights.sources.source import resolve
from coterie.workers.encoder.contract import EncoderSpec
from coterie.workers.encoder.replica import EncoderReplica
from coterie.workers.memory import cores
from coterie.workers.supervisor import RestartPolicy

if TYPE_CHECKING:
    from coterie.weights.sources.source import Progress


class EncoderStart:
    """An encoder that can be started."""

    def __init__(
        self,
        name: str,
        settings: SpecialistSettings,
        path: Path | None = None,
        replica: EncoderReplica | None = None,
    ) -> None:
        self.name, self._settings = name, settings
        self._path, self.replica = path, replica

    async def start(self) -> ServedEncoder:
        if self._path is None or self.replica is None:
            return await asyncio.to_thread(self._static)
        # what is wrong with the directory is said before a process starts
        spec, tokenizer = await asyncio.to_thread(self._read, self._path)
        info = await self.replica.start()
        log("worker_ready", replica=info.name, pid=info.pid, dtype=info.dtype, device=info.device,
            threads=info.threads)  # fmt: skip
        details = ("dtype", "device", "weight_bytes")
        return ServedEncoder(
            self.name,
            self._settings.model,
            int(time.time()),
            info.dim,
            self._settings.encoder,
            tokenizer,
            ProcessVectors(self.replica),
            spec.normalise,
            spec.is_cross,
            EncoderPrompts(spec.prompt, spec.query_prompt, spec.document_prompt),
            self.replica,
            spec.family,
            info.fingerprint,
            info.weight_bytes,
            tuple((name, getattr(info, name)) for name in details),
        )

    def _read(self, path: Path) -> tuple[EncoderModelSpec, FileTokenizer]:
        spec = read_encoder_spec(path, self._settings.encoder.pooling)
        limit = self._settings.context or spec.max_tokens
        if limit > spec.positions:
            text = f"{limit} tokens are more than the {spec.positions} positions of the model"
            param = f"specialists.{self.name}.context"
            raise ConfigError(f"{param}: {text}", param=param)
        return spec, FileTokenizer(spec, limit)

    def _static(self) -> ServedEncoder:
        vectors = StaticVectors()
        limit = self._settings.context or STATIC_TOKENS
        return ServedEncoder(
            self.name,
            self._settings.model,
            int(time.time()),
            vectors.table.dim,
            self._settings.encoder,
            StaticTokenizer(vectors.table, limit),
            vectors,
            normalise=True,
            details=(("dtype", "int8"), ("device", "cpu")),
        )


def encoder_starts(
    config: Config, names: list[str], progress: Progress | None = None
) -> list[EncoderStart]:
    """`names`: the names that are taken already. May fetch models; starts nothing."""
    starts: list[EncoderStart] = []
    for index, settings in enumerate(config.encoders):
        if settings.model == STATIC:
            start = EncoderStart(settings.name or STATIC, settings)
        else:
            path = resolve(settings.model, progress=progress)
            name = settings.name or model_name(settings.model, path)
            replica = _replica(f"n{index}r0", path, settings, config)
            start = EncoderStart(name, settings, path, replica)
        if start.name in names:
            raise ConfigError(
                f"two specialists are named {start.name!r}; give one a name", param="specialists"
            )
        names = [*names, start.name]
        starts.append(start)
    return starts


def _replica(name: str, path: Path, settings: SpecialistSettings, config: Config) -> EncoderReplica:
    engine: EngineSettings = config.engine
    spec = EncoderSpec(
        name,
        str(path),
        settings.dtype,
        engine.device,
        settings.encoder.threads or engine.threads or cores(),
        settings.encoder.pooling,
        settings.encoder.batch_tokens,
        config.server.log_level,
    )
    restart = RestartPolicy(
        engine.restart_backoff_s,
        engine.max_restart_backoff_s,
        engine.hang_s,
        engine.load_timeout_s,
    )
    return EncoderReplica(spec, restart)
