"""Keeps the ensemble's state on disk: reads it at start, writes changes and windows from time to
time, answers questions about the audit log. Nothing here blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.core.errors import CoterieError, Unavailable
from coterie.obs.log import log
from coterie.service.breaker.control import EnsembleControl
from coterie.service.breaker.watch import ControlChange
from coterie.service.shadow.calibration import CalibrationLog
from coterie.service.slo.board import SpecialistSlo
from coterie.service.slo.store import EnsembleStore, StoredEnsemble

if TYPE_CHECKING:
    from coterie.service.fleet import ServedSpecialist

T = TypeVar("T")
# changes and disagreements that may wait for the disk
MAX_WAITING = 1000


class EnsembleKeeper:
    """`state` is the database, `calibration` the log of disagreements; None = nothing is kept.
    Used from one event loop."""

    def __init__(self, state: Path | None = None, calibration: Path | None = None) -> None:
        self._path = state
        self._calibration = None if calibration is None else CalibrationLog(calibration)
        self._store: EnsembleStore | None = None
        self._disk = asyncio.Lock()
        # what waits for the disk
        self._changes: list[ControlChange] = []
        self._rows: list[dict[str, Any]] = []
        # by specialist: the newest part of its latency that is on disk
        self._written: dict[str, int] = {}
        self._is_failing = False

    @property
    def has_waiting(self) -> bool:
        return bool(self._changes or self._rows)

    async def open(self, control: EnsembleControl, served: Mapping[str, ServedSpecialist]) -> None:
        """Give them the state that an earlier server left."""
        if self._path is None:
            return
        try:
            self._store = await asyncio.to_thread(EnsembleStore, self._path)
            stored = await asyncio.to_thread(self._store.read)
        except CoterieError as error:
            # serve without history rather than not at all
            log("ensemble_unreadable", level="warning", reason=error.message)
            return
        known = {
            name: state
            for name in control.watches
            if (state := stored.state.get(f"specialist {name}"))
        }
        try:
            control.restore_saved(stored.state.get("control", {}) | {"specialists": known})
            for name, item in served.items():
                item.series.slo.restore(stored.latency.get(name, {}), control.now)
                _restore_speed(item, stored.state.get(f"speed {name}"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log("ensemble_unreadable", level="warning", error=error)

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await self._alone(store.close)

    def add(self, changes: Sequence[ControlChange]) -> None:
        self._changes = [*self._changes, *changes][-MAX_WAITING:]

    def add_disagreement(self, row: dict[str, Any]) -> None:
        if self._calibration is not None and len(self._rows) < MAX_WAITING:
            self._rows.append(row)

    async def write(
        self,
        control: EnsembleControl,
        served: Mapping[str, ServedSpecialist],
        *,
        whole: bool = True,
    ) -> None:
        """Write what waits, and with `whole` the state and the windows too. What cannot be written
        waits for the next time."""
        store = self._store
        changes, self._changes = self._changes, []
        rows, self._rows = self._rows, []
        stored = self._stored(control, served) if whole else StoredEnsemble()
        try:
            if store is not None and (stored.state or changes):
                await self._alone(partial(store.write, stored, changes))
            if rows and self._calibration is not None:
                await self._alone(partial(self._calibration.append, rows))
            self._is_failing = False
        except (CoterieError, OSError) as error:
            self._changes = [*changes, *self._changes][-MAX_WAITING:]
            if not self._is_failing:
                self._is_failing = True
                log("ensemble_unwritable", level="warning", error=error)

    async def audit(self, limit: int, before: int | None) -> list[dict[str, Any]]:
        """Entries of the audit log, the newest first."""
        store = self._store
        if store is None:
            raise Unavailable("the audit log cannot be opened; see the server's log")
        return await self._alone(partial(store.audit, limit, before))

    async def newest_changes(self, limit: int) -> list[ControlChange]:
        """The newest entries of the audit log, oldest first; none if it cannot be read."""
        if self._store is None:
            return []
        try:
            rows = await self.audit(limit, None)
        except CoterieError:
            return []
        names = ("at", "actor", "kind", "subject", "details")
        return [ControlChange(*(row[name] for name in names)) for row in reversed(rows)]

    def _stored(
        self, control: EnsembleControl, served: Mapping[str, ServedSpecialist]
    ) -> StoredEnsemble:
        saved = control.saved()
        states = saved.pop("specialists").items()
        return StoredEnsemble(
            {"control": saved}
            | {f"specialist {name}": state for name, state in states}
            | {
                f"speed {name}": _saved_speed(item)
                for name, item in served.items()
                if not item.is_remote
            },
            {name: self._unwritten(name, item.series.slo) for name, item in served.items()},
        )

    def _unwritten(self, name: str, slo: SpecialistSlo) -> dict[int, Any]:
        """The parts of its latency that may have changed since the last time."""
        newest = slo.newest()
        first = self._written.get(name, newest)
        self._written[name] = newest
        return {index: slo.part(index) for index in {first, newest} if index >= 0}

    async def _alone(self, work: Callable[[], T]) -> T:
        """The result of `work` in a thread, one at a time. A caller that is cancelled does not
        wait, but the work goes on to its end before the next one begins."""

        async def alone() -> T:
            async with self._disk:
                return await asyncio.to_thread(work)

        return await asyncio.shield(alone())


def _saved_speed(item: ServedSpecialist) -> dict[str, Any]:
    """How long its requests take, and with what engine on what machine that was measured."""
    replicas = item.replicas
    return {
        "of": _engine_digest(item),
        "own": replicas.predictor.saved(),
        "engines": replicas.shared.predictor.saved(),
    }


def _restore_speed(item: ServedSpecialist, saved: Mapping[str, Any] | None) -> None:
    if saved is None or saved["of"] != _engine_digest(item):
        return
    try:
        item.replicas.predictor.restore(saved["own"])
        item.replicas.shared.predictor.restore(saved["engines"])
    except (KeyError, TypeError, ValueError) as error:
        log("speed_unreadable", level="warning", error=error, model=item.name)


def _engine_digest(item: ServedSpecialist) -> str:
    """Another model, machine or way to run it takes another time."""
    info = item.info
    experts = info.experts
    facts = (
        *(info.fingerprint, info.dtype, info.device, info.processor, info.threads),
        *(() if experts is None else (experts.strategy, experts.device_slots, experts.host_slots)),
    )
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()
