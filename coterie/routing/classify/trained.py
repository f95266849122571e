"""A trained router: labels, weights and calibration of one version, as an immutable value.

Weights are integers, like the features; a score is an exact sum, scaled once. The first label is
`reject`: the prompt is for none of the others.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError, InvalidRequest
from coterie.core.plan import ClassifierInput
from coterie.routing.classify.features import (
    FORM_DIM,
    FORM_UNIT,
    MEANING_UNIT,
    NUM_HASHED,
    arrays,
    hashed_parts,
)

REJECT = "reject"
FORMAT = 1
VERSION_CHARS = 16
MAX_BYTES = 64 * 2**20
_MAX_LABELS = 256


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Integers times a scale for each label."""

    # [1 + FORM_DIM, 1 + dim, labels]: row and column 0 are for constants
    joint: NDArray[np.int16]
    joint_scales: NDArray[np.float64]
    # [NUM_HASHED, labels]
    words: NDArray[np.int8]
    word_scales: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RouterCalibration:
    # logits are divided by it
    temperature: float = 1.0
    # least probability of an alternate that may answer in place of the first choice
    viable_at: float = 0.2


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """Where a version comes from."""

    # version that was calibrated again; "" = trained
    parent: str = ""
    # number of prompts by label
    trained_on: Mapping[str, int] = field(default_factory=dict)
    # quality on prompts that were left out in turn
    report: Mapping[str, Any] = field(default_factory=dict)
    # hashes of the prompts it was trained on, sorted: none of them can be held out
    seen: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))


class TrainedRouter:
    def __init__(
        self,
        labels: tuple[str, ...],
        features: str,
        weights: RouterWeights,
        calibration: RouterCalibration,
        record: RouterRecord,
        version: str = "",
    ) -> None:
        self.labels, self.features, self.weights = labels, features, weights
        self.calibration, self.record = calibration, record
        # first digits of the file's sha256; "" = not stored yet
        self.version = version
        rows, columns, count = weights.joint.shape
        joint = weights.joint.astype(np.float64).reshape(rows, columns * count)
        self._joint, self._constant = joint[1:], FORM_UNIT * joint[0]
        self._columns = columns
        self._word_scales: list[float] = weights.word_scales.tolist()
        self._joint_scales = weights.joint_scales / (FORM_UNIT * MEANING_UNIT)

    def logits(self, given: ClassifierInput) -> NDArray[np.float64]:
        """One for each label, before calibration."""
        return np.array(self._scores(given))

    def _scores(self, given: ClassifierInput) -> list[float]:
        if given.features != self.features:
            raise InvalidRequest(
                f"the features are {given.features[:80]!r}; this router reads {self.features!r}"
            )
        meaning, form, words = arrays(given)
        if len(meaning) != self._columns - 1 or len(form) != FORM_DIM:
            raise InvalidRequest("a stored input of a router is damaged")
        used = form.nonzero()[0]
        by_column = form[used].astype(np.float64) @ self._joint.take(used, axis=0)
        by_column += self._constant
        sides = np.empty(self._columns)
        sides[0], sides[1:] = MEANING_UNIT, meaning
        # all terms are integers below 2**53: the sum is exact in every order
        scaled = sides @ by_column.reshape(self._columns, -1) * self._joint_scales
        total: list[float] = scaled.tolist()
        if len(words):
            # a damaged input may have others. Rows are far apart: small numbers stay in the cache
            known = self.weights.words.take(words, axis=0, mode="clip").astype(np.int32)
            parts = hashed_parts(words)
            sums = np.add.reduceat(known, [start for start, _, _ in parts], axis=0)
            scales = self._word_scales
            # for so few labels plain numbers take less time
            for each, (_, _, weight) in zip(sums.tolist(), parts, strict=True):
                total = [
                    sum_ + count * weight * scale
                    for sum_, count, scale in zip(total, each, scales, strict=True)
                ]
        return total

    def probabilities(self, given: ClassifierInput) -> NDArray[np.float64]:
        return calibrated(self.logits(given), self.calibration.temperature)

    def chances(self, given: ClassifierInput) -> list[float]:
        """The probabilities, in plain numbers: for one prompt this takes less time."""
        logits = self._scores(given)
        highest, temperature = max(logits), self.calibration.temperature
        powers = [math.exp((value - highest) / temperature) for value in logits]
        total = sum(powers)
        return [power / total for power in powers]

    def packed(self) -> bytes:
        """The bytes of its file."""
        meta = {
            "format": FORMAT,
            "labels": list(self.labels),
            "features": self.features,
            "temperature": self.calibration.temperature,
            "viable_at": self.calibration.viable_at,
            "parent": self.record.parent,
            "trained_on": dict(self.record.trained_on),
            "report": dict(self.record.report),
        }
        out, weights = io.BytesIO(), self.weights
        np.savez_compressed(
            out,
            meta=np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8),
            joint=weights.joint,
            joint_scales=weights.joint_scales,
            words=weights.words,
            word_scales=weights.word_scales,
            seen=self.record.seen,
        )
        return out.getvalue()


def calibrated(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    powers = np.exp(scaled)
    result: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return result


def version_of(data: bytes) -> str:
    return sha256(data).hexdigest()[:VERSION_CHARS]


def unpacked(data: bytes, name: str = "router file") -> TrainedRouter:
    """Refuses a file that `TrainedRouter.packed` did not write."""
    try:
        return _read(data)
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise ConfigError(f"{name} is no router of this release: {error}", param="router") from None


def _read(data: bytes) -> TrainedRouter:
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        meta = json.loads(file["meta"].tobytes())
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}")
        weights = RouterWeights(
            file["joint"], file["joint_scales"], file["words"], file["word_scales"]
        )
        seen = file["seen"]
    labels = tuple(str(label) for label in meta["labels"])
    _check(labels, weights)
    calibration = RouterCalibration(float(meta["temperature"]), float(meta["viable_at"]))
    if not 0 < calibration.temperature < 1e3 or not 0 <= calibration.viable_at <= 1:
        raise ValueError("its calibration is out of range")
    record = RouterRecord(str(meta["parent"]), meta["trained_on"], meta["report"], seen)
    return TrainedRouter(
        labels, str(meta["features"]), weights, calibration, record, version_of(data)
    )


def _check(labels: tuple[str, ...], weights: RouterWeights) -> None:
    count = len(labels)
    if not 2 <= count <= _MAX_LABELS or labels[0] != REJECT or len(set(labels)) != count:
        raise ValueError("its labels are wrong")
    shapes = (
        weights.joint.ndim == 3 and weights.joint.shape[::2] == (1 + FORM_DIM, count),
        weights.words.shape == (NUM_HASHED, count),
        weights.joint_scales.shape == weights.word_scales.shape == (count,),
        weights.joint.dtype == np.int16 and weights.words.dtype == np.int8,
        bool(np.isfinite(weights.joint_scales).all() and np.isfinite(weights.word_scales).all()),
    )
    if not all(shapes):
        raise ValueError("its weights have another form")
