"""Link or host? Shares out a layer's misses so that both finish together, by measured costs.

The numbers are fixed at start. Where the host cannot compute, every expert runs on the device; so
it does with `deterministic`, unless the slots are too few for that.
"""

from __future__ import annotations

from collections.abc import Collection

from coterie.moe.dispatch.base import Scene

# hits that a newcomer is good for, before it has to leave again, per use by which it leads
_HITS_PER_LEAD = 2.5
# a device that saves less than this share of the host's time is not worth any move
_WORTHWHILE = 0.05


class Lanes:
    def __init__(self, scene: Scene) -> None:
        costs = scene.costs
        self._scene = scene
        # slots too few for one row: those who are in stay for good, all others run on the host
        few = scene.slots.num_slots <= scene.geometry.top_k
        self.hosting = scene.host_can_run and (few or not scene.deterministic)
        self._upload_s = costs.upload_s
        self._host_s = costs.host_run_s
        self._saved_s = costs.host_run_s + costs.read_s - costs.device_run_s
        worthwhile = self._saved_s > _WORTHWHILE * costs.host_run_s
        self.uploads_pay = not self.hosting or (worthwhile and not scene.deterministic)
        self._link_busy_s = self._host_busy_s = 0.0
        self._row_s = self._host_s

    def scratch(self, phase: str, chunked: bool) -> int:
        """Slots through which guests pass. A prompt asks for much of a layer at once, and a prompt
        in chunks asks for it again."""
        slots, geometry = self._scene.slots.movable, self._scene.geometry
        least = 1 if slots < 32 else 2
        if self.hosting and self._upload_s >= self._host_s:
            least = 0
        few = min(max(least, slots // 64), geometry.top_k, max(1, slots // 2))
        if not self.uploads_pay or phase != "prefill":
            return few
        return min(geometry.num_experts, slots if chunked else max(few, slots // 4))

    def begin(self, rows: Collection[int], chunked: bool) -> None:
        """A layer's misses, as rows per expert: all on the host until they are taken off it. A
        prompt in chunks would ask the host for them at least twice."""
        self._link_busy_s = 0.0
        self._row_s = self._host_s * (2 if chunked else 1)
        self._host_busy_s = self._row_s * sum(rows)

    def lead(self, margin: float) -> float | None:
        """By how much a newcomer must lead a member to be uploaded; None: never. Little when it is
        loaded anyway or the host is busy longer anyway; else the upload has to pay for itself."""
        if not self.hosting:
            return margin
        if not self.uploads_pay:
            return None
        if self._link_busy_s + self._upload_s <= self._host_busy_s:
            return margin
        return max(margin, self._upload_s / (self._saved_s * _HITS_PER_LEAD))

    def upload(self, rows: int) -> None:
        self._link_busy_s += self._upload_s
        self._host_busy_s -= self._row_s * rows

    def prefers_host(self) -> bool:
        """Would one more upload finish after the host is done with all that is left?"""
        if not self.hosting:
            return False
        return not self.uploads_pay or self._host_busy_s <= self._link_busy_s + self._upload_s
