"""The settings of an ensemble as one value. A request reads one from its start to its end; a reload
replaces it as a whole.

Also says which settings a reload may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from coterie.core.aliases import AliasSettings
from coterie.core.config import Config, SpecialistSettings
from coterie.core.ensemble import EnsembleSettings, IntentSettings, TenantSettings
from coterie.core.plan import AdapterChoice
from coterie.core.request import EVERY_RIGHT, KeyRights, own_tenant
from coterie.core.settings import RoutingSettings, ValidatorSettings

# whole sections that a reload may change
_SECTIONS = frozenset({"routing", "validators", "intents", "tenants", "aliases"})
# of [ensemble] all keys but these: they are used at start
_ENSEMBLE_FIXED = frozenset({"router", "max_receipts"})
# keys of a specialist that a reload may change
_SPECIALIST = frozenset({"adapters", "intents", "checks", "fallback", "slo"})
_REMOTE = frozenset({"price_in", "price_out", "shadow"})
# hexadecimal digits of a digest of settings
DIGEST_LENGTH = 16
_ENSEMBLE, _ROUTING = EnsembleSettings(), RoutingSettings()


@dataclass(frozen=True, slots=True)
class EnsembleConfig:
    """`digest` names the value: receipts carry it."""

    # by the names that are served, in the order of the file
    specialists: Mapping[str, SpecialistSettings] = field(default_factory=dict)
    intents: Mapping[str, IntentSettings] = field(default_factory=dict)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)
    ensemble: EnsembleSettings = _ENSEMBLE
    routing: RoutingSettings = _ROUTING
    validators: tuple[ValidatorSettings, ...] = ()
    aliases: tuple[AliasSettings, ...] = ()
    # the fixed adapters of specialists, with the digests that their names meant
    adapters: Mapping[str, tuple[AdapterChoice, ...]] = field(default_factory=dict)
    # by tenant; None = everybody has every right
    rights: Mapping[str, KeyRights] | None = None
    digest: str = ""

    def tenant(self, tenant: str) -> TenantSettings | None:
        """The settings of a request's tenant, if it has any."""
        return self.tenants.get(own_tenant(tenant))

    def rights_of(self, tenant: str) -> KeyRights | None:
        """What the tenant may do; None if it is not known here any more."""
        own = own_tenant(tenant)
        settings = self.tenants.get(own)
        if settings is not None:
            return KeyRights(settings.priority, settings.max_running, settings.share)
        return EVERY_RIGHT if self.rights is None else self.rights.get(own)

    def may_use(self, tenant: str) -> tuple[str, ...]:
        """The specialists that the tenant may use; empty = all."""
        settings = self.tenant(tenant)
        return () if settings is None else settings.specialists

    def may_use_experts(self, tenant: str) -> tuple[str, ...]:
        """The experts that the tenant may use beside those of its specialists; empty = all."""
        settings = self.tenant(tenant)
        return () if settings is None else settings.experts

    def fallbacks(self, specialist: str) -> tuple[str, ...]:
        """The specialists that answer in its place, in order: its fallback, the fallback of that
        one and so on, at the end the first specialist."""
        chain = [specialist]
        while (after := self.specialists[chain[-1]].fallback) and after not in chain:
            chain.append(after)
        first = next(iter(self.specialists))
        return tuple(chain[1:]) if first in chain else (*chain[1:], first)


def snapshot_of(
    config: Config,
    names: Sequence[str],
    adapters: Mapping[str, tuple[AdapterChoice, ...]] | None = None,
    rights: Mapping[str, KeyRights] | None = None,
) -> EnsembleConfig:
    """`names`: the served names of the specialists, in their order."""
    fixed = dict(adapters or {})
    return EnsembleConfig(
        specialists=dict(zip(names, config.specialists, strict=True)),
        intents={item.name: item for item in config.intents},
        tenants={item.name: item for item in config.tenants},
        ensemble=config.ensemble,
        routing=config.routing,
        validators=config.validators,
        aliases=config.aliases,
        adapters=fixed,
        rights=rights,
        digest=digest_of(config, names, fixed),
    )


def digest_of(
    config: Config, names: Sequence[str], adapters: Mapping[str, Sequence[AdapterChoice]]
) -> str:
    """Names the settings that decide who answers and how: all but [server] and [tracing], which may
    differ between two servers that answer alike."""
    values = asdict(config)
    del values["server"], values["tracing"]
    values["names"] = list(names)
    values["fixed"] = {name: [asdict(item) for item in stack] for name, stack in adapters.items()}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that two configurations differ in, such as `specialists.general.dtype`."""

    name: str
    needs_restart: bool


def changes(before: Config, after: Config) -> tuple[SettingChange, ...]:
    """All settings that differ."""
    return tuple(
        change for item in fields(Config) for change in _changes_in(item.name, before, after)
    )


def _changes_in(section: str, before: Config, after: Config) -> Iterator[SettingChange]:
    old, new = getattr(before, section), getattr(after, section)
    if old == new:
        return
    if not isinstance(old, tuple):
        for path in _differences(old, new):
            yield SettingChange(f"{section}.{path}", _is_fixed(section, path))
        return
    names = [str(item.name or index) for index, item in enumerate(old)]
    if names != [str(item.name or index) for index, item in enumerate(new)]:
        yield SettingChange(section, section not in _SECTIONS)
        return
    for name, was, now in zip(names, old, new, strict=True):
        for path in _differences(was, now):
            yield SettingChange(f"{section}.{name}.{path}", _is_fixed(section, path))


def _is_fixed(section: str, path: str) -> bool:
    """Whether a reload cannot change the setting; `path` is its place in its table."""
    if section == "specialists":
        table, _, last = path.partition(".")
        return last not in _REMOTE if table == "remote" else table not in _SPECIALIST
    return path in _ENSEMBLE_FIXED if section == "ensemble" else section not in _SECTIONS


def _differences(old: Any, new: Any) -> Iterator[str]:
    for item in fields(old):
        was, now = getattr(old, item.name), getattr(new, item.name)
        if is_dataclass(was):
            yield from (f"{item.name}.{path}" for path in _differences(was, now))
        elif was != now:
            yield item.name
