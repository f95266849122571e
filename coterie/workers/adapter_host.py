"""A worker's adapters: room set aside before the model takes the rest, and a pool over a library.

Between the settings and `adapters/pool.py`. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coterie.adapters.library import Library
from coterie.adapters.pool import AdapterPool
from coterie.adapters.slab import Slab
from coterie.core.errors import CoterieError
from coterie.obs.trace import log
from coterie.workers.base import AdapterInfo, AdapterLoad, WorkerSpec

if TYPE_CHECKING:
    from coterie.core.plan import AdapterChoice
    from coterie.models.base import CausalLM


class AdapterRoom:
    """Bytes on the device, taken before weights and KV are sized."""

    def __init__(self, spec: WorkerSpec, device: str) -> None:
        self._spec, self._device = spec, torch.device(device)
        self._slab = Slab(spec.adapters.device_bytes, self._device)

    def open(self, model: CausalLM) -> AdapterHost:
        library = Library(Path(self._spec.library))
        settings = self._spec.adapters
        pool = AdapterPool(library, model.targets, settings, self._device, slab=self._slab)
        modules = model.targets.modules()
        return AdapterHost(
            pool, AdapterInfo(self._slab.nbytes, settings.host_bytes, pool.max_stacks, modules)
        )


class AdapterHost:
    def __init__(self, pool: AdapterPool, facts: AdapterInfo) -> None:
        self.pool, self.facts = pool, facts

    @property
    def version(self) -> int:
        """Changes when `loads` does."""
        return self.pool.version

    def preload(self, adapters: Sequence[AdapterChoice]) -> None:
        """A hint: the request that follows is told what is wrong with them."""
        try:
            self.pool.want(adapters)
        except CoterieError as error:
            log("preload_refused", level="debug", code=error.code)

    def loads(self) -> tuple[AdapterLoad, ...]:
        resident = set(self.pool.resident())
        return tuple(
            AdapterLoad(
                digest,
                digest in resident,
                times.loads,
                times.disk_s,
                times.compose_s,
                times.place_s,
            )
            for digest, times in self.pool.loads().items()
        )

    def close(self) -> None:
        self.pool.close()


def room_for(spec: WorkerSpec, device: str) -> AdapterRoom | None:
    """None where no adapters can be run: no library, or no room for one."""
    return AdapterRoom(spec, device) if spec.library and spec.adapters.device_bytes else None
