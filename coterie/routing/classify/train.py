"""Trains a router: multinomial logistic regression over the features, in numpy.

Calibration and the report use prompts that were left out in turn: whole groups where prompts have
groups, so that no author is in both parts. Runs in a command, never in a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError
from coterie.routing.classify.evaluate import quality
from coterie.routing.classify.features import (
    FORM_DIM,
    FORM_SCALE,
    FORM_UNIT,
    MEANING_UNIT,
    NUM_HASHED,
    arrays,
    hashed_parts,
)
from coterie.routing.classify.traffic import LabelledPrompt, labels_of
from coterie.routing.classify.trained import (
    RouterCalibration,
    RouterRecord,
    RouterWeights,
    TrainedRouter,
    calibrated,
)

Floats = NDArray[np.float32]

# strength of the penalty on weights, for one prompt
PENALTY = 0.1
# weights of meaning times form and of form alone, relative to those of meaning
JOINT, ALONE = 2.5**0.5, 0.3**0.5
FOLDS = 4
MAX_STEPS, MIN_GAIN = 150, 2e-6
_MEMORY = 10
# least prompts of a label
MIN_PROMPTS = 8
# least prompts for a calibration
MIN_CALIBRATED = 50
# share of left-out prompts whose right label must be among the choice and its viable alternates
COVERAGE = 0.99
# bounds of that least probability: never certain, never anything
MIN_VIABLE, MAX_VIABLE = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class _TrainingRows:
    """Features of many prompts."""

    # [rows, 1 + FORM_DIM], [rows, 1 + dim]
    form: Floats
    meaning: Floats
    # words of all rows, one after the other: bucket, weight, row
    buckets: NDArray[np.int64]
    amounts: Floats
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, items: Sequence[LabelledPrompt]) -> _TrainingRows:
        form, meaning, buckets, amounts = [], [], [], []
        for item in items:
            vector, shape, words = arrays(item.given)
            form.append(shape)
            meaning.append(vector)
            buckets.append(words.astype(np.int64))
            weight = np.zeros(len(words))
            for start, end, each in hashed_parts(words):
                weight[start:end] = each
            amounts.append(weight)
        scaled = np.stack(form).astype(np.float32) * np.float32(FORM_SCALE / FORM_UNIT)
        vectors = np.stack(meaning).astype(np.float32) / np.float32(MEANING_UNIT)
        return cls(
            np.insert(scaled, 0, 1.0, axis=1),
            np.insert(vectors, 0, 1.0, axis=1),
            np.concatenate(buckets),
            np.concatenate(amounts).astype(np.float32),
            np.array([len(item) for item in buckets]),
        )

    def part(self, rows: NDArray[np.int64]) -> _TrainingRows:
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        taken = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        return _TrainingRows(
            self.form[rows],
            self.meaning[rows],
            self.buckets[taken],
            self.amounts[taken],
            self.counts[rows],
        )

    def logits(self, joint: Floats, words: Floats) -> Floats:
        """`joint` is [form, meaning, labels], `words` is [NUM_HASHED, labels]."""
        count = joint.shape[2]
        by_column = (self.form @ joint.reshape(len(joint), -1)).reshape(len(self.form), -1, count)
        total: Floats = np.einsum("nmc,nm->nc", by_column, self.meaning)
        filled = self.counts > 0
        starts = np.concatenate([[0], np.cumsum(self.counts)[:-1]])[filled]
        if len(starts):
            each = self.amounts[:, None] * words[self.buckets]
            total[filled] += np.add.reduceat(each, starts, axis=0)
        return total


def train(
    items: Sequence[LabelledPrompt],
    calibrate_on: Sequence[LabelledPrompt] = (),
    start: TrainedRouter | None = None,
    seed: int = 0,
) -> TrainedRouter:
    """Refuses labels with too few prompts. Calibrated and reported on `calibrate_on`, or, which
    takes five times as long, on prompts of `items` that are left out in turn. From the weights of
    `start` fewer steps are needed to nearly the same result."""
    items = _unique(items)
    labels = labels_of(items)
    _check(items, labels)
    rows = _TrainingRows.of(items)
    truth = np.array([labels.index(item.label) for item in items])
    begun = None if start is None or start.labels != labels else _real(start.weights)
    fitted = _fit(rows, truth, len(labels), begun)
    if calibrate_on:
        name = "calibrated_on"
        logits, known = _outside(fitted, labels, items, calibrate_on)
    else:
        name, known = "left_out_in_turn", truth
        logits = _in_turn(rows, truth, len(labels), _folds(items, seed))
    calibration = fit_calibration(logits, known)
    report: dict[str, Any] = quality(labels, calibrated(logits, calibration.temperature), known)
    record = RouterRecord(
        trained_on=dict(sorted(Counter(item.label for item in items).items())),
        report={name: report},
        seen=np.sort(np.array([item.hash for item in items], np.uint64)),
    )
    weights = _rounded(*fitted)
    return TrainedRouter(labels, items[0].given.features, weights, calibration, record)


def _in_turn(
    rows: _TrainingRows, truth: NDArray[np.int64], count: int, folds: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Logits of each prompt by weights that were fitted without its fold."""
    logits = np.zeros((len(truth), count))
    for fold in range(FOLDS):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        fitted = _fit(rows.part(inside), truth[inside], count)
        logits[outside] = rows.part(outside).logits(*fitted)
    return logits


def _outside(
    fitted: tuple[Floats, Floats],
    labels: Sequence[str],
    items: Sequence[LabelledPrompt],
    others: Sequence[LabelledPrompt],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits and labels of the prompts of `others` that are not in `items`."""
    seen = {item.hash for item in items}
    fresh = [item for item in others if item.hash not in seen and item.label in labels]
    if len(fresh) < MIN_CALIBRATED:
        raise ConfigError(
            f"{len(fresh)} prompts for the calibration are not trained on; at least "
            f"{MIN_CALIBRATED} are needed",
            param="calibrate_on",
        )
    truth = np.array([labels.index(item.label) for item in fresh])
    return _TrainingRows.of(fresh).logits(*fitted).astype(np.float64), truth


def fit_calibration(logits: NDArray[np.float64], truth: NDArray[np.int64]) -> RouterCalibration:
    """The temperature with the least loss, and the least probability of a viable alternate: with
    it, the right label of COVERAGE of these prompts is the choice or viable (split conformal)."""
    steps = np.exp(np.linspace(np.log(0.2), np.log(5.0), 81))
    index = np.arange(len(truth))
    losses = [-np.log(calibrated(logits, step)[index, truth] + 1e-12).mean() for step in steps]
    temperature = float(steps[int(np.argmin(losses))])
    chances = calibrated(logits, temperature)
    right = np.where(chances.argmax(axis=1) == truth, 1.0, chances[index, truth])
    lowest = float(np.quantile(right, 1 - COVERAGE, method="lower"))
    viable_at = min(MAX_VIABLE, max(MIN_VIABLE, lowest))
    return RouterCalibration(round(temperature, 6), round(viable_at, 6))


def recalibrated(router: TrainedRouter, items: Sequence[LabelledPrompt]) -> TrainedRouter:
    """The same weights with a calibration that was fitted on `items`, which it must not have been
    trained on."""
    known = [item for item in items if item.label in router.labels]
    if len(known) < MIN_CALIBRATED:
        raise ConfigError(
            f"{len(known)} prompts with labels that this router knows and that it was not trained "
            f"on; at least {MIN_CALIBRATED} are needed",
            param="files",
        )
    logits = np.stack([router.logits(item.given) for item in known])
    truth = np.array([router.labels.index(item.label) for item in known])
    record = replace(router.record, parent=router.version)
    calibration = fit_calibration(logits, truth)
    return TrainedRouter(router.labels, router.features, router.weights, calibration, record)


def _unique(items: Sequence[LabelledPrompt]) -> list[LabelledPrompt]:
    """Each prompt once, in the order of their hashes; the last label counts."""
    known = {item.hash: item for item in items}
    return [known[key] for key in sorted(known)]


def _check(items: Sequence[LabelledPrompt], labels: Sequence[str]) -> None:
    if len({item.given.features for item in items}) > 1:
        raise ConfigError("the prompts' features are of different releases", param="data")
    counts = Counter(item.label for item in items)
    few = [f"{name} ({counts[name]})" for name in labels if counts[name] < MIN_PROMPTS]
    if few or len(labels) < 2:
        raise ConfigError(
            f"each label needs {MIN_PROMPTS} prompts, `reject` too, and there must be two labels; "
            f"too few: {', '.join(few) or 'labels'}",
            param="data",
        )


def _folds(items: Sequence[LabelledPrompt], seed: int) -> NDArray[np.int64]:
    """The fold of each prompt: groups stay together if there are enough of them."""
    groups = Counter(item.group for item in items)
    if len(groups) < 2 * FOLDS:
        return np.random.default_rng(seed).permutation(len(items)) % FOLDS
    sizes, fold_of = [0] * FOLDS, {}
    for group, size in sorted(groups.items(), key=lambda entry: (-entry[1], entry[0])):
        fold_of[group] = fold = sizes.index(min(sizes))
        sizes[fold] += size
    return np.array([fold_of[item.group] for item in items])


def _fit(
    rows: _TrainingRows,
    truth: NDArray[np.int64],
    count: int,
    begun: tuple[Floats, Floats] | None = None,
) -> tuple[Floats, Floats]:
    """(joint, words) with the least penalised loss. All labels count the same, however many
    prompts they have. `begun`: weights to start from."""
    shares = 1.0 / np.bincount(truth, minlength=count).clip(1)
    worth = (shares[truth] / shares[truth].sum()).astype(np.float32)[:, None]
    wanted = np.eye(count, dtype=np.float32)[truth]
    used, buckets = np.unique(rows.buckets, return_inverse=True)
    compact = _TrainingRows(rows.form, rows.meaning, buckets, rows.amounts, rows.counts)
    order = np.argsort(buckets, kind="stable")
    starts = np.searchsorted(buckets[order], np.arange(len(used)))
    row_of = np.repeat(np.arange(len(truth)), rows.counts)[order]
    amounts = rows.amounts[order][:, None]
    scale = _scales(rows.meaning.shape[1])
    size = scale.size * count
    penalty = np.float32(PENALTY / len(truth))

    def split(point: Floats) -> tuple[Floats, Floats]:
        joint = point[:size].reshape(*scale.shape[:2], count) * scale
        return joint, point[size:].reshape(len(used), count)

    def loss(point: Floats) -> tuple[float, Floats]:
        chances = calibrated(compact.logits(*split(point)).astype(np.float64), 1.0)
        picked = (chances * wanted).sum(axis=1) + 1e-12
        error = ((chances - wanted) * worth).astype(np.float32)
        spread = (rows.meaning[:, :, None] * error[:, None, :]).reshape(len(truth), -1)
        joint = (rows.form.T @ spread).reshape(*scale.shape[:2], count) * scale
        words = np.add.reduceat(amounts * error[row_of], starts, axis=0)
        slope = np.concatenate([joint.ravel(), words.ravel()]) + penalty * point
        value = -float((worth[:, 0] * np.log(picked)).sum())
        return value + 0.5 * float(penalty) * float(point @ point), slope.astype(np.float32)

    point = np.zeros(size + len(used) * count, np.float32)
    if begun is not None:
        point = np.concatenate([(begun[0] / scale).ravel(), begun[1][used].ravel()])
    best = _least(loss, point)
    joint, kept = split(best)
    words = np.zeros((NUM_HASHED, count), np.float32)
    words[used] = kept
    return joint.astype(np.float32), words


def _scales(columns: int) -> Floats:
    """[1 + FORM_DIM, columns, 1]: how cheap each weight is."""
    scale = np.full((1 + FORM_DIM, columns, 1), JOINT, np.float32)
    scale[0], scale[1:, 0] = 1.0, ALONE
    return scale


def _least(loss: Callable[[Floats], tuple[float, Floats]], point: Floats) -> Floats:
    """A minimum of a convex function, by L-BFGS with halved steps."""
    value, slope = loss(point)
    moves: list[tuple[Floats, Floats]] = []
    for _ in range(MAX_STEPS):
        way = _direction(slope, moves)
        gain, step = float(slope @ way), 1.0
        while True:
            ahead = point - np.float32(step) * way
            value_ahead, slope_ahead = loss(ahead)
            if value_ahead <= value - 1e-4 * step * gain or step < 1e-8:
                break
            step /= 2
        moved, turned = ahead - point, slope_ahead - slope
        if float(moved @ turned) > 1e-12:
            moves = [*moves[1 - _MEMORY :], (moved, turned)]
        gained, point, value, slope = value - value_ahead, ahead, value_ahead, slope_ahead
        if gained < MIN_GAIN:
            break
    return point


def _direction(slope: Floats, moves: Sequence[tuple[Floats, Floats]]) -> Floats:
    way, shares = slope.copy(), []
    for moved, turned in reversed(moves):
        share = (moved @ way) / (moved @ turned)
        shares.append(share)
        way -= share * turned
    if moves:
        moved, turned = moves[-1]
        way *= (moved @ turned) / (turned @ turned)
    for (moved, turned), share in zip(moves, reversed(shares), strict=True):
        way += moved * (share - (turned @ way) / (moved @ turned))
    return way


def _rounded(joint: Floats, words: Floats) -> RouterWeights:
    """As integers. The form's scale becomes part of the weights."""
    joint = joint.copy()
    joint[1:] *= np.float32(FORM_SCALE)
    joint_scales = _unit(joint, 32767)
    scales = _unit(words, 127)
    return RouterWeights(
        np.rint(joint / joint_scales).astype(np.int16),
        joint_scales,
        np.rint(words / scales).astype(np.int8),
        scales,
    )


def _real(weights: RouterWeights) -> tuple[Floats, Floats]:
    """(joint, words) of stored weights."""
    joint = (weights.joint * weights.joint_scales).astype(np.float32)
    joint[1:] /= np.float32(FORM_SCALE)
    return joint, (weights.words * weights.word_scales).astype(np.float32)


def _unit(weights: Floats, most: int) -> NDArray[np.float64]:
    largest = np.abs(weights.reshape(-1, weights.shape[-1])).max(axis=0).astype(np.float64)
    unit: NDArray[np.float64] = np.maximum(largest, 1e-9) / most
    return unit
