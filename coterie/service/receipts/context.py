"""The settings that decisions were made with, kept once for every digest of settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from coterie.core.config import Config
from coterie.core.ensemble import EnsembleSettings, IntentSettings
from coterie.core.plan import AdapterChoice
from coterie.core.settings import RoutingSettings
from coterie.core.snapshot import EnsembleConfig
from coterie.routing.resolve import Specialist
from coterie.service.breaker.watch import WatchedSpecialist, judging


@dataclass(frozen=True, slots=True)
class StoredSpecialist:
    name: str
    fingerprint: str
    adapter_bytes: int
    intents: tuple[str, ...]
    fixed: tuple[AdapterChoice, ...]
    # what steering reads of its settings
    watched: WatchedSpecialist


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """`digest` is that of the settings."""

    digest: str
    # the first is the default
    specialists: tuple[StoredSpecialist, ...]
    routing: RoutingSettings
    ensemble: EnsembleSettings
    intents: tuple[IntentSettings, ...]


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(DecisionContext)


def context_of(
    config: EnsembleConfig,
    specialists: Mapping[str, Specialist],
    watched: Mapping[str, WatchedSpecialist],
) -> DecisionContext:
    return DecisionContext(
        config.digest,
        tuple(
            StoredSpecialist(
                item.name,
                item.fingerprint,
                item.adapter_bytes,
                item.intents,
                tuple(fixed.choice for fixed in item.fixed),
                watched[item.name],
            )
            for item in specialists.values()
        ),
        config.routing,
        config.ensemble,
        tuple(config.intents.values()),
    )


def encoded(context: DecisionContext) -> bytes:
    return _encode(context)


def decoded(data: bytes) -> DecisionContext:
    return _decoder.decode(data)


def changed(context: DecisionContext, config: Config, digest: str = "other") -> DecisionContext:
    """`context` with the settings of `config`. A specialist is the one of the same name, or of the
    same place if the file gives no name; one that is not in the file is gone, and a new one cannot
    be judged, because nothing is known about its model."""
    known = {item.name: item for item in context.specialists}
    kept = []
    for place, settings in enumerate(config.specialists):
        name = settings.name
        if not name and place < len(context.specialists):
            name = context.specialists[place].name
        found = known.get(name)
        if found is None:
            continue
        watched = WatchedSpecialist(
            name,
            settings.fallback,
            settings.slo,
            has_checks=judging(settings.checks),
            may_shadow=not settings.remote.url or settings.remote.shadow,
            replicas=found.watched.replicas,
        )
        kept.append(replace(found, intents=settings.intents, watched=watched))
    return DecisionContext(digest, tuple(kept), config.routing, config.ensemble, config.intents)
