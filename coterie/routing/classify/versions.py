"""Versions of a trained router in a folder: one file each, and which of them is in use.

    VERSION.npz    a router; its name is the beginning of its sha256
    current.json   the versions that were promoted, the last one is in use
    history.jsonl  what was promoted and rolled back, when, and with which figures

A worse version is not promoted: both answer the same held-out prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import ConfigError, Conflict, NotFound
from coterie.routing.classify.evaluate import evaluate
from coterie.routing.classify.features import prompt_input
from coterie.routing.classify.traffic import LabelledPrompt
from coterie.routing.classify.trained import MAX_BYTES, TrainedRouter, unpacked, version_of
from coterie.routing.match.embed import DEFAULT, EMBEDDERS
from coterie.weights.files import file_lock

SHIPPED = Path(__file__).parent / "data"
SUFFIX = ".npz"
CURRENT, HISTORY, LOCK = "current.json", "history.jsonl", ".lock"
# least prompts that the gate compares on
MIN_HELD_OUT = 50
# a candidate's confidence may be off by this much more than that of the one in use
MAX_WORSE_CALIBRATION = 0.02
# promotions that can be rolled back
MAX_KEPT = 100


def folder_of(setting: str, state: Path) -> Path:
    """The folder that `ensemble.router` means: empty = one in the state folder, `shipped` = the
    routers of this release."""
    if setting == "shipped":
        return SHIPPED
    return Path(setting).expanduser() if setting else state / "router"


def read_current(folder: Path) -> TrainedRouter | None:
    """The version in use, ready for the first request: what it needs is read from disk here."""
    router = RouterVersions(folder).current()
    if router is not None:
        router.probabilities(prompt_input("warm up", "", EMBEDDERS[DEFAULT]()))
    return router


class RouterVersions:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob(f"*{SUFFIX}"))

    def promoted(self) -> list[str]:
        """The oldest first; the last one is in use."""
        path = self.folder / CURRENT
        try:
            known = json.loads(path.read_text(encoding="utf-8"))["promoted"]
            if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
                raise ValueError("no list of names")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cannot read {path}: {error}", param="ensemble.router") from None
        return known

    def current(self) -> TrainedRouter | None:
        """The version in use; None if none was promoted."""
        promoted = self.promoted()
        return self.read(promoted[-1]) if promoted else None

    def read(self, version: str) -> TrainedRouter:
        """By its name or an unambiguous beginning of it."""
        found = [name for name in self.names() if version and name.startswith(version)]
        if len(found) != 1:
            listed = ", ".join(self.names()[-12:]) or "none"
            raise NotFound(
                f"no router version {version[:40]!r}; there is: {listed}", param="version"
            )
        path = self.folder / f"{found[0]}{SUFFIX}"
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ConfigError(f"{path.name} is too large for a router", param="router")
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error}", param="router") from None
        if version_of(data) != found[0]:
            raise ConfigError(f"{path.name} is damaged: its digest differs", param="router")
        return unpacked(data, path.name)

    def add(self, router: TrainedRouter) -> TrainedRouter:
        """Stores it under its version, without promoting it."""
        data = router.packed()
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / f"{version_of(data)}{SUFFIX}", data)
        return unpacked(data)

    def promote(self, version: str, held_out: Sequence[LabelledPrompt]) -> dict[str, Any]:
        """Puts a version into use if it is not worse than the one in use on `held_out`; raises
        `Conflict` with the figures otherwise."""
        with self._locked():
            candidate, current = self.read(version), self.current()
            promoted = self.promoted()
            if promoted and promoted[-1] == candidate.version:
                raise Conflict(f"{candidate.version} is in use already", param="version")
            figures = gate(candidate, current, held_out)
            self._use([*promoted, candidate.version][-MAX_KEPT:], "promote", figures)
            return figures

    def rollback(self) -> str:
        """Puts the version before into use, or none; returns its name or ""."""
        with self._locked():
            promoted = self.promoted()
            if not promoted:
                raise Conflict("no router version is in use", param="version")
            if len(promoted) > 1:
                # it must be readable before it is used
                self.read(promoted[-2])
            self._use(promoted[:-1], "rollback", {"from": promoted[-1]})
            return promoted[-2] if len(promoted) > 1 else ""

    def _use(self, promoted: list[str], action: str, figures: dict[str, Any]) -> None:
        entry = {
            "time": round(time.time(), 3),
            "action": action,
            "version": promoted[-1] if promoted else "",
            "figures": figures,
        }
        with (self.folder / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        _write(self.folder / CURRENT, json.dumps({"promoted": promoted}).encode() + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with file_lock(self.folder / LOCK):
            yield


def gate(
    candidate: TrainedRouter, current: TrainedRouter | None, held_out: Sequence[LabelledPrompt]
) -> dict[str, Any]:
    """The figures of both on the prompts that neither was trained on. Raises `Conflict` if the
    candidate is worse or too few prompts are left."""
    used = [router for router in (candidate, current) if router is not None]
    fresh = [item for item in held_out if not any(saw(router, item) for router in used)]
    if len(fresh) < MIN_HELD_OUT:
        raise Conflict(
            f"{len(fresh)} of {len(held_out)} held-out prompts were not trained on; "
            f"at least {MIN_HELD_OUT} are needed",
            param="held_out",
        )
    new = evaluate(candidate, fresh)
    figures = {"candidate": new, "current": None, "trained_on": len(held_out) - len(fresh)}
    if current is None:
        return figures
    old = evaluate(current, fresh)
    figures["current"] = old
    was, now = old["right"]["count"], new["right"]["count"]
    if now < was:
        raise Conflict(
            f"not promoted: {candidate.version} is right for {now} of {len(fresh)} held-out "
            f"prompts, {current.version} for {was}",
            param="version",
        )
    drift = new["calibration_error"] - old["calibration_error"]
    if drift > MAX_WORSE_CALIBRATION:
        raise Conflict(
            f"not promoted: the calibration error of {candidate.version} is "
            f"{new['calibration_error']:.3f}, that of {current.version} is "
            f"{old['calibration_error']:.3f}; calibrate it",
            param="version",
        )
    return figures


def saw(router: TrainedRouter, item: LabelledPrompt) -> bool:
    """Whether it was trained on this prompt."""
    seen = router.record.seen
    at = int(np.searchsorted(seen, np.uint64(item.hash)))
    return at < len(seen) and int(seen[at]) == item.hash


def _write(path: Path, data: bytes) -> None:
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".draft-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
