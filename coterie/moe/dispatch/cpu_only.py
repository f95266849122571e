"""cpu_only: computes every expert on the host and moves none. The baseline."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.moe.dispatch.base import Demand, Strategy, Wave


class CpuOnly(Strategy):
    name = "cpu_only"
    runs_on_host = True
    needs_device = False

    def settled(self) -> bool:
        return True

    def decide(self, demand: Demand) -> Sequence[Wave]:
        return (Wave(host=demand.experts),)
