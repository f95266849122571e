"""What is known of a model's experts before the first request: heatmaps on disk, short prompts.

A heatmap lies beside the model as `heatmaps/WORKLOAD.json`, or in the state folder when nothing
may be written there. Live traffic is counted into it and saved when the engine ends, and every few
minutes at most. A heatmap that cannot be read or written costs a log line, never the service.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.core.errors import WeightsError
from coterie.core.plan import Assignment, Rejected
from coterie.core.request import Limits, Sampling
from coterie.experts.heatmap import Heatmap
from coterie.obs.trace import log
from coterie.weights.home import state_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from coterie.engine.engine import Engine
    from coterie.experts.geometry import Geometry
    from coterie.models.tokenizer import Tokenizer

SAVE_EVERY_S = 180.0
PROMPTS = (
    "Write a Python function that reads a file and counts how often each word occurs.",
    "Explain in a few sentences why the sky is blue, and then why sunsets are red.",
)
MAX_TOKENS = 24
# calls of the strategies' own bounded update after each prompt
UPDATES = (48, 32)
# no tenant can be called this: its prefix blocks are nobody's
TENANT = "\0warmup"


def heatmap_path(model: Path, fingerprint: str, workload: str) -> Path:
    """Where the heatmap of `workload` is, or will be written."""
    beside = _beside(model) / f"{workload}.json"
    if beside.exists() or _writable(beside.parent):
        return beside
    return state_dir() / "heatmaps" / fingerprint / f"{workload}.json"


def _beside(model: Path) -> Path:
    # several GGUF files may share a folder
    return model / "heatmaps" if model.is_dir() else model.parent / "heatmaps" / model.stem


def _writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


class HeatmapFile:
    """One model's heatmap of one workload, from start to end of an engine."""

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        workload: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._fingerprint, self._workload = path, fingerprint, workload
        self._clock = clock
        self._saved_at = clock()
        self._saved_total = 0.0
        # what is counted into, once `load` has said what it begins with
        self.live: Heatmap | None = None

    def load(self, geometry: Geometry) -> Heatmap | None:
        """What earlier runs counted; None when there is nothing that fits these experts."""
        known = self._read(geometry)
        counts = None if known is None else known.counts.copy()
        self.live = Heatmap(geometry, counts)
        self._saved_total = self.live.total()
        return known

    def _read(self, geometry: Geometry) -> Heatmap | None:
        if not self.path.exists():
            return None
        try:
            return Heatmap.load(
                self.path, geometry, fingerprint=self._fingerprint, workload=self._workload
            )
        except WeightsError as error:
            log("heatmap_ignored", level="warning", reason=error.message)
            return None

    def tend(self) -> None:
        """Save when it is time to."""
        if self._clock() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write what was counted, if anything was since the last time."""
        self._saved_at = self._clock()
        if self.live is None or self.live.total() == self._saved_total:
            return
        try:
            self.live.save(self.path, fingerprint=self._fingerprint, workload=self._workload)
        except OSError as error:
            log("heatmap_not_saved", level="warning", reason=f"{self.path}: {error.strerror}")
            return
        self._saved_total = self.live.total()


def refine(engine: Engine, tokenizer: Tokenizer, lane: str, context: int) -> None:
    """Answer two short prompts with the real engine, and let the strategies settle after each."""
    for number, (prompt, updates) in enumerate(zip(PROMPTS, UPDATES, strict=True)):
        ids = tuple(tokenizer.encode(prompt))[: context - 1]
        verdict = engine.add(_assignment(f"warmup-{number}", lane, ids, context))
        if isinstance(verdict, Rejected):
            log("warmup_refused", level="warning", code=verdict.code, reason=verdict.reason)
            return
        while engine.has_work():
            engine.step()
        engine.settle_experts(updates)


def _assignment(request_id: str, lane: str, ids: tuple[int, ...], context: int) -> Assignment:
    return Assignment(
        request_id=request_id,
        lane=lane,
        prompt_ids=ids,
        sampling=Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=0),
        limits=Limits(max_tokens=max(1, min(MAX_TOKENS, context - len(ids)))),
        adapters=(),
        session="",
        tenant=TENANT,
        deadline=None,
        arrived_at=time.monotonic(),
    )
