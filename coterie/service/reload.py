"""Reads the settings again while the server runs: all of a change takes effect at once, or none of
it.

What an engine or a socket was made with cannot change; a file that changes it is refused by name.
A request that has begun keeps the settings it began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from coterie.core.config import Config, ServerSettings
from coterie.core.errors import ConfigError, CoterieError, InvalidRequest
from coterie.core.request import KeyRights
from coterie.core.snapshot import SettingChange, changes
from coterie.obs.log import log
from coterie.service.config_check import check
from coterie.service.fleet import Fleet
from coterie.service.snapshot import ServingSnapshot
from coterie.service.validate.command import ValidatorCommands

# most names that a refusal lists
MAX_LISTED = 20


class CallerKeys(Protocol):
    """The part of `api.auth.AccessKeys` that a reload uses."""

    def rights(self) -> Mapping[str, KeyRights] | None: ...
    def check_tenants(self, tenants: Collection[str]) -> None: ...


Keys = TypeVar("Keys", bound=CallerKeys)


@dataclass(frozen=True, slots=True)
class ConfigSources(Generic[Keys]):
    """Where settings and keys come from. Both functions read files; `use_keys` must not wait."""

    read: Callable[[], Config]
    read_keys: Callable[[ServerSettings], Keys]
    use_keys: Callable[[Keys], None]


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """`changed`: the names of the settings that changed, and what they mean differently."""

    digest_before: str
    digest: str
    changed: tuple[str, ...]


class ConfigReloader(Generic[Keys]):
    def __init__(self, fleet: Fleet, sources: ConfigSources[Keys]) -> None:
        self._fleet, self._sources = fleet, sources
        self._lock = asyncio.Lock()

    async def reload(self) -> ReloadResult:
        """Raises InvalidRequest if the settings are wrong or cannot change while the server runs;
        then nothing has changed."""
        async with self._lock:
            try:
                result = await self._reload()
            except ConfigError as error:
                self._count("refused")
                log("config_refused", level="error", reason=error.message)
                raise InvalidRequest(error.message, param=error.param) from error
            except CoterieError:
                self._count("refused")
                raise
        self._count("done")
        log("config_reloaded", config_digest=result.digest, changed=", ".join(result.changed))
        return result

    async def _reload(self) -> ReloadResult:
        before = self._fleet.snapshot
        config, keys, changed = await asyncio.to_thread(self._read)
        commands = before.commands
        if config.validators != before.config.validators:
            commands = await asyncio.to_thread(ValidatorCommands, config.validators)
        await self._fleet.catalog.refresh_if_open()
        trained = await asyncio.to_thread(self._fleet.read_trained)
        prepare = partial(self._fleet.prepare, config, keys.rights(), commands, trained)
        while True:
            # it takes milliseconds for many specialists: not on the event loop
            current, snapshot = self._fleet.snapshot, await asyncio.to_thread(prepare)
            # otherwise a canary has changed a fixed adapter in the meantime
            if current is self._fleet.snapshot:
                break
        # nothing waits from here on
        self._fleet.adopt(config, snapshot)
        self._sources.use_keys(keys)
        every = [*(change.name for change in changed), *_meanings(before, snapshot)]
        return ReloadResult(
            before.config.digest, snapshot.config.digest, tuple(dict.fromkeys(every))
        )

    def _read(self) -> tuple[Config, Keys, tuple[SettingChange, ...]]:
        config = self._sources.read()
        changed = changes(self._fleet.config, config)
        _refuse_restart(changed)
        check(config, self._fleet.names_in_order)
        keys = self._sources.read_keys(config.server)
        keys.check_tenants([item.name for item in config.tenants])
        return config, keys, changed

    def _count(self, result: str) -> None:
        self._fleet.registry.value("coterie_config_reloads", result).add()


def _meanings(before: ServingSnapshot, after: ServingSnapshot) -> Iterator[str]:
    """What means something else now although no setting may have changed: the trained router that
    was promoted, experts with another current version, the rights of keys."""
    old, new = before.router.router_version, after.router.router_version
    if old != new:
        yield f"trained router {old or 'none'} -> {new or 'none'}"
    for name in after.config.specialists:
        stacks = before.config.adapters.get(name, ()), after.config.adapters.get(name, ())
        if stacks[0] != stacks[1]:
            yield f"specialists.{name}.adapters"
    if before.config.rights != after.config.rights:
        yield "keys"


def _refuse_restart(changed: Sequence[SettingChange]) -> None:
    fixed = [change.name for change in changed if change.needs_restart]
    if fixed:
        more = f" and {len(fixed) - MAX_LISTED} more" if len(fixed) > MAX_LISTED else ""
        names = ", ".join(fixed[:MAX_LISTED])
        raise ConfigError(f"cannot change without a restart: {names}{more}", param=fixed[0])
