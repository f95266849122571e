"""Warm-up of MoE experts before the first request: heatmaps on disk, short prompts.

A heatmap is stored beside the model as `heatmaps/WORKLOAD.json`, or in the state folder if that
place cannot be written. It counts live traffic and is saved when the engine ends, and every few
minutes: the counts of this engine are added to those in the file, so several engines can share a
file. The heatmap of a model is also used for stores that were made from it. If a heatmap cannot be
read or written, this is logged and the engine runs without it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from coterie.core.errors import WeightsError
from coterie.core.plan import Assignment, Rejected
from coterie.core.request import Limits, Sampling
from coterie.moe.runtime.heatmap import Heatmap
from coterie.obs.log import log
from coterie.weights.files import file_lock
from coterie.weights.home import state_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coterie.engine.engine import Engine
    from coterie.models.text.tokenizer import Tokenizer
    from coterie.moe.store.base import ExpertGeometry

SAVE_EVERY_S = 180.0
PROMPTS = (
    "Write a Python function that reads a file and counts how often each word occurs.",
    "Explain in a few sentences why the sky is blue, and then why sunsets are red.",
)
MAX_TOKENS = 24
# how many updates the strategies may do after each prompt
UPDATES = (48, 32)
# no real tenant can have this name, so no one shares its prefix blocks
TENANT = "\0warmup"


def heatmap_path(model: Path, fingerprint: str, workload: str) -> Path:
    """The path where the heatmap of `workload` is, or will be written."""
    beside = _beside(model) / f"{workload}.json"
    if beside.exists() or _writable(beside.parent):
        return beside
    return _in_state(fingerprint, workload)


def _in_state(fingerprint: str, workload: str) -> Path:
    return state_dir() / "heatmaps" / fingerprint / f"{workload}.json"


def carry_heatmaps(model: Path, store: Path) -> int:
    """Copy the heatmaps of `model` to a store that was made from it. Returns their number."""
    known = sorted(_beside(model).glob("*.json"))
    for path in known:
        target = _beside(store) / path.name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    return len(known)


def _beside(model: Path) -> Path:
    # several GGUF files may share a folder
    return model / "heatmaps" if model.is_dir() else model.parent / "heatmaps" / model.stem


def _writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


class HeatmapFile:
    """The heatmap file of one model and one workload, while an engine runs."""

    def __init__(
        self,
        path: Path,
        lineage: Sequence[str],
        workload: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lineage`: fingerprints of the models that the experts were made from, their own last."""
        self.path, self._lineage, self._workload = path, tuple(lineage), workload
        self._clock = clock
        self._saved_at = clock()
        # the counts of this engine that are already in the file
        self._saved: npt.NDArray[np.float64] | None = None
        # the counts of this engine; set by `load`
        self.live: Heatmap | None = None

    def load(self, geometry: ExpertGeometry) -> Heatmap | None:
        """The counts of earlier runs; None if there are none that fit these experts."""
        known = self._read(geometry, self.path) or self._inherited(geometry)
        if known is not None:
            tokens = known.total() / max(1, geometry.top_k * len(geometry.layers))
            reason = f"workload {self._workload}: the experts of {tokens:,.0f} tokens"
            log("heatmap_loaded", reason=reason)
        counts = None if known is None else known.counts.copy()
        self.live = Heatmap(geometry, counts)
        self._saved = self.live.counts.copy()
        return known

    def _inherited(self, geometry: ExpertGeometry) -> Heatmap | None:
        """The heatmap in the state folder of a model that these experts were made from, the nearest
        first."""
        paths = (_in_state(each, self._workload) for each in reversed(self._lineage))
        heatmaps = (self._read(geometry, path) for path in paths)
        return next((heatmap for heatmap in heatmaps if heatmap is not None), None)

    def _read(self, geometry: ExpertGeometry, path: Path) -> Heatmap | None:
        if not path.exists():
            return None
        try:
            return Heatmap.load(path, geometry, lineage=self._lineage, workload=self._workload)
        except WeightsError as error:
            log("heatmap_ignored", level="warning", reason=error.message)
            return None

    def save_if_due(self) -> None:
        """Save if the last save is long enough ago."""
        if self._clock() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Add the counts since the last save, if there are any, to those in the file."""
        self._saved_at = self._clock()
        live, saved = self.live, self._saved
        if live is None or saved is None or np.array_equal(live.counts, saved):
            return
        try:
            with file_lock(self.path.with_name(f".{self.path.name}.lock")):
                theirs = self._read(live.geometry, self.path)
                if theirs is not None:
                    live.counts += np.maximum(theirs.counts - saved, 0.0)
                live.save(self.path, fingerprint=self._lineage[-1], workload=self._workload)
        except OSError as error:
            log("heatmap_not_saved", level="warning", reason=f"{self.path}: {error.strerror}")
            return
        self._saved = live.counts.copy()


def refine(engine: Engine, tokenizer: Tokenizer, lane: str, context: int) -> None:
    """Answer two short prompts with the real engine, and let the strategies update after each."""
    for number, (prompt, updates) in enumerate(zip(PROMPTS, UPDATES, strict=True)):
        ids = tuple(tokenizer.encode(prompt))[: context - 1]
        verdict = engine.add(_assignment(f"warmup-{number}", lane, ids, context))
        if isinstance(verdict, Rejected):
            log("warmup_refused", level="warning", code=verdict.code, reason=verdict.reason)
            return
        while engine.has_work():
            engine.step()
        engine.settle_moe(updates)


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
