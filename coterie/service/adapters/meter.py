"""Which adapters are loaded and asked for, written into the metrics at each reading.

Labels follow names that come and go, so every reading starts from nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from coterie.obs.adapter_metrics import OWN_METRICS, own_series
from coterie.obs.metrics import Registry

if TYPE_CHECKING:
    from coterie.service.adapters.catalog import Catalog
    from coterie.service.roster import Served

REQUESTS, LOADED = "vllm:lora_requests_info", "vllm:lora_adapter_loaded"


def measure_adapters(registry: Registry, catalog: Catalog, served: Collection[Served]) -> None:
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
            for name, labels, value in own_series(replica.name, replica.adapter_loads()):
                registry.value(name, *labels).set(value)


def _residency(registry: Registry, catalog: Catalog, item: Served) -> None:
    """By every name that means a resident digest, in use or not: routers ask who is warm."""
    resident = {d for state in item.replicas.states() for d in state.resident_adapters}
    for name, card in catalog.current().items():
        if card.digest in resident:
            pinned = str(card.pinned).lower()
            registry.value(LOADED, item.name, name, "gpu", pinned).set(1)
