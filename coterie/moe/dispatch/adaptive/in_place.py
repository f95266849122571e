"""adaptive where the device reads misses from RAM: all layers of a step at once, behind it.

An upload serves later steps only. It has the link alone, while misses are divided between link and
CPU, so it must save more than three. A layer that misses nothing rings no bell and waits for
nobody, which is worth some hits more. Policies compete, each with a simulated cache over a sample
of the layers; hits and such layers count for it and uploads against it. Most have memories of
different length. One moves nothing. One has whole layers: the best there is where all experts are
used about equally often, and where nothing is known. A prompt may tell enough before the first
election. No measured time takes part.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from coterie.moe.dispatch.base import StrategyContext
    from coterie.moe.store.base import Key

Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

# visits of its layer after which a use counts half; uses by which an expert must lead the one that
# it replaces; tokens as which the whole heatmap counts
_HALF_LIFE = np.array([np.inf, np.inf, 256.0, 64.0, 16.0, 5.0, np.inf])
_MARGIN = np.array([np.inf, 2.5, 3.5, 3.0, 2.5, 1.5, 0.5])
_PRIOR_TOKENS = np.array([0.0, 128.0, 0.0, 0.0, 0.0, 0.0, 0.0])
# the first leader, if something is known, and if not; the second does not count uses
_FREQUENCY, _WHOLE_LAYERS = 1, 6
_WATCHED_LAYERS = 6
# in the election a hit counts half after this many tokens
_KEEP = 0.5 ** (1.0 / 64.0)
# by this share of its own hits, and this many, another policy must lead to replace the leader
_AHEAD, _AHEAD_HITS = 0.01, 1.0
# steps that do not count, because a policy first pays for what it wants; and those without election
_UNCOUNTED, _UNELECTED = 16, 32
# tokens in which another leader, by what it leads for each, must save the uploads that it asks for;
# and if it would replace whole layers, which counted nothing, or the other way round
_PAID_BACK_TOKENS, _PAID_BACK_WHOLE = 128, 768
# tokens of a prompt that may be alike, and say the same together
_ALIKE = 8
# decoding steps that are decided about at once, at least and at most; and uploads behind them, for
# each layer: a step that is half as long waits for half as many
_AT_ONCE, _MOST_AT_ONCE, _MOST = 4, 16, 2
# with fewer uploads for each of these steps next time there are twice as many, with more half as
# many; where nothing was known at start, not more before so many steps
_FEW, _MANY, _LEARNT = 0.25, 1.0, 192
# hits for which an upload counts: on an H200 a copy takes 54 us, a miss by link and CPU 18
_UPLOAD_HITS = 3.0
# bytes of missing experts that take as long as the rest of a layer that misses some (20 us there)
_LAYER_BYTES = 3e6


class InPlacePlacement:
    """Which experts are in slots, decided behind prompts and behind every few decoding steps."""

    def __init__(self, context: StrategyContext) -> None:
        geometry, self._slots = context.geometry, context.slots
        self._geometry, shape = geometry, (len(geometry.layers), geometry.num_experts)
        self._row = {layer: row for row, layer in enumerate(geometry.layers)}
        counts = np.zeros(shape) if context.heatmap is None else context.heatmap.counts
        # [policies, layers, experts], in uses of now
        asked = _PRIOR_TOKENS * geometry.top_k * shape[0] / max(1.0, float(counts.sum()))
        self._scores: Values = np.minimum(1.0, asked)[:, None, None] * counts
        self._whole_first = far_apart(shape[0])
        self._scores[_WHOLE_LAYERS, self._whole_first] = np.arange(shape[0], 0, -1)[:, None]
        self._decay: Values = 0.5 ** (1.0 / _HALF_LIFE)
        # [policies, 1, 1]: whether it counts uses
        self._counts = (np.arange(len(_MARGIN)) != _WHOLE_LAYERS)[:, None, None]
        self._present = np.zeros(shape, dtype=bool)
        for row, layer in enumerate(geometry.layers):
            self._present[row, list(geometry.present(layer))] = True
        step = max(1, shape[0] // _WATCHED_LAYERS)
        # of layers that are whole, as large a part as of all
        self._watched = np.sort(self._whole_first[step // 2 :: step])
        self._shadow_slots = round(context.slots.num_slots * len(self._watched) / shape[0])
        # [policies, watched layers, experts]: what each policy would have in slots, from the first
        # step on; and its hits less its uploads
        self._shadows: Mask | None = None
        self._net: Values = np.zeros(len(_MARGIN))
        self._steps = 0
        # uploads behind prompts that are in that, and tokens; older ones count less
        self._prompt_uploads: Values = np.zeros(len(_MARGIN))
        self._tokens = 0.0
        # what decoding steps used that are not counted yet
        self._uncounted: list[Mask] = []
        self._at_once = _AT_ONCE
        self._leader, self._learnt = _FREQUENCY, 0
        if context.known is None:
            self._leader, self._learnt = _WHOLE_LAYERS, _LEARNT
        self._layer_hits = _LAYER_BYTES / context.in_place_bytes
        self._here, self._movable = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self._known_changes = -1
        # decisions made, and experts that replaced another
        self.updates = self.replaced = 0

    def step(self, rows: npt.NDArray[np.int64], phase: str) -> list[tuple[Key, int]]:
        """A step used experts so often, [layers, experts]: what to load for later ones. Steps that
        decode are counted and decided about some at a time, because the host has little time."""
        used = rows > 0
        if phase == "decode":
            self._uncounted.append(used)
            if len(self._uncounted) < self._at_once:
                return []
        self.updates += 1
        self._refresh()
        if self._shadows is None:
            self._shadows = np.repeat(self._here[self._watched][None], len(_MARGIN), axis=0)
        steps, self._uncounted = self._uncounted, []
        if steps:
            self._score(np.array(steps))
        if phase != "decode":
            self._record(rows)
            steps.append(used)
        self._count(np.array(steps))
        self._elect(np.any(steps, axis=0), phase)
        if phase != "decode":
            if self._steps < _UNELECTED and self._leader == _WHOLE_LAYERS:
                self._learn()
            return self._move(rows.size)
        loads = self._move(_MOST * len(rows))
        if len(loads) < _FEW * len(steps) and self._steps >= self._learnt:
            self._at_once = min(2 * self._at_once, _MOST_AT_ONCE)
        elif len(loads) > _MANY * len(steps):
            self._at_once = max(self._at_once // 2, _AT_ONCE)
        return loads

    def _score(self, steps: Mask) -> None:
        """Uses of decoding steps [steps, layers, experts]: each counts what is left of it behind
        the last one."""
        left = self._decay[:, None] ** np.arange(len(steps) - 1, -1, -1)
        # a product of matrices would wake the threads of BLAS, which take the CPU from others
        added = np.einsum("ps,sle->ple", left, steps.astype(np.float64))
        self._scores *= (self._decay ** len(steps))[:, None, None]
        self._scores += self._counts * added

    def _count(self, steps: Mask) -> None:
        """Hits of the simulated caches, and their layers that miss nothing."""
        assert self._shadows is not None
        # [watched layers, experts, steps], and with policies instead of steps
        asked = steps[:, self._watched].transpose(1, 2, 0).astype(np.float32)
        held = self._shadows.transpose(1, 2, 0).astype(np.float32)
        # [watched layers, policies, steps]
        hits = held.transpose(0, 2, 1) @ asked
        whole = (hits == asked.sum(axis=1)[:, None]).sum(axis=0)
        left = _KEEP ** np.arange(len(steps) - 1, -1, -1)
        self._net *= _KEEP ** len(steps)
        self._prompt_uploads *= _KEEP ** len(steps)
        self._net += (hits.sum(axis=0) + self._layer_hits * whole) @ left
        self._tokens = self._tokens * _KEEP ** len(steps) + float(left.sum())
        self._steps += len(steps)

    def whole_layers(self, count: int) -> list[Key]:
        """So many experts, layer after layer."""
        geometry = self._geometry
        layers = (geometry.layers[row] for row in self._whole_first)
        keys = ((layer, expert) for layer in layers for expert in geometry.present(layer))
        return list(islice(keys, count))

    def worth(self) -> Values:
        """[layers, experts], by the leading policy."""
        found: Values = self._scores[self._leader]
        return found

    def _record(self, rows: npt.NDArray[np.int64]) -> None:
        """A prompt: each of its rows counts as one visit, as if all used the same experts. (A batch
        of decoded rows is one visit.)"""
        visits = max(1, int(rows[0].sum()) // self._geometry.top_k)
        decay = self._decay**visits
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = (1.0 - decay) / (1.0 - self._decay)
        weights = np.where(self._decay < 1.0, weights, visits) / visits
        weights = self._counts * weights[:, None, None]
        self._scores = self._scores * decay[:, None, None] + weights * rows

    def _elect(self, used: Mask, phase: str) -> None:
        """Exchange in the simulated caches what these experts replace, then see who leads."""
        assert self._shadows is not None
        asked = used[self._watched].reshape(-1)
        shadows = self._shadows.reshape(len(_MARGIN), -1)
        scores = self._scores[:, self._watched].reshape(shadows.shape)
        room = self._shadow_slots - shadows.sum(axis=1)
        held = np.where(shadows, scores, np.inf)
        bars = np.where(room > 0, 0.0, held.min(axis=1) + _MARGIN)
        coming = asked & ~shadows & (scores > bars[:, None])
        # few have something to exchange
        for policy in np.flatnonzero(coming.any(axis=1) & np.isfinite(_MARGIN)):
            wanted, free = np.flatnonzero(coming[policy]), int(room[policy])
            margin = float(_MARGIN[policy])
            more = exchange(scores[policy], held[policy], wanted, margin, free, asked.size)
            shadows[policy, more[0]] = True
            shadows[policy, more[1]] = False
            self._net[policy] -= _UPLOAD_HITS * len(more[0])
            if phase != "decode":
                self._prompt_uploads[policy] += len(more[0])
        if self._steps <= _UNCOUNTED:
            self._net[:] = self._prompt_uploads[:] = self._tokens = 0.0
        if self._steps < _UNELECTED:
            return
        # to move nothing gives its hits only where everything is still as it was
        missing = (self._shadows & ~self._here[self._watched]).sum(axis=(1, 2))
        possible = np.isfinite(_MARGIN) | (missing == 0)
        best = int(np.argmax(np.where(possible, self._net, -np.inf)))
        led = float(self._net[self._leader]) if possible[self._leader] else 0.0
        lead = float(self._net[best]) - led
        if lead <= abs(led) * _AHEAD + _AHEAD_HITS:
            return
        # Policies that take turns would move all slots each time. What prompts ask for comes once,
        # and tells nothing about the tokens to come.
        once = self._prompt_uploads[best] - self._prompt_uploads[self._leader]
        lead = (lead + _UPLOAD_HITS * float(once)) / self._tokens
        whole = _WHOLE_LAYERS in (best, self._leader)
        tokens = _PAID_BACK_WHOLE if whole else _PAID_BACK_TOKENS
        if lead * tokens > _UPLOAD_HITS * int(missing[best]):
            self._leader = best

    def _learn(self) -> None:
        """Whole layers give way at once to the experts that prompts used most, if those would be
        hit so much more often that their uploads are soon saved."""
        values, here = self._scores[_FREQUENCY], self._here[self._present]
        uses = values[self._present]
        # equally likely experts differ too, by chance, and what is by chance does not come again
        chance, spread = _ALIKE * float(uses.mean()), float(uses.var())
        tokens = float(uses.sum()) / (len(values) * self._geometry.top_k)
        if tokens < 1 or spread <= chance:
            return
        slots = min(self._slots.num_slots, len(uses))
        most_used = np.argpartition(-uses, slots - 1)[:slots]
        lead = (1.0 - chance / spread) * float((uses[most_used] - uses.mean()).sum()) / tokens
        lead -= self._layer_hits * int((self._here | ~self._present).all(axis=1).sum())
        uploads = int((~here[most_used]).sum())
        if lead * _PAID_BACK_WHOLE > _UPLOAD_HITS * uploads:
            self._leader = _FREQUENCY

    def _move(self, most: int) -> list[tuple[Key, int]]:
        margin = float(_MARGIN[self._leader])
        if margin == np.inf:
            return []
        slots, shape = self._slots, self._here.shape
        here, movable = self._here.reshape(-1), self._movable.reshape(-1)
        values, free = self._scores[self._leader].reshape(-1), slots.free()
        held = np.where(movable, values, np.inf)
        bar = 0.0 if free > 0 else float(held.min()) + margin
        wanted = np.flatnonzero(self._present.reshape(-1) & ~here & (values > bar))
        taken, lost = exchange(values, held, wanted, margin, free, most)
        for number in lost.tolist():
            slots.evict(self._key(number, shape[1]))
        keys = [self._key(number, shape[1]) for number in taken.tolist()]
        loads = [(key, slots.place(key)) for key in keys]
        here[lost] = movable[lost] = False
        here[taken] = movable[taken] = True
        self._known_changes = slots.changes
        self.replaced += len(lost)
        return loads

    def _key(self, number: int, width: int) -> Key:
        return self._geometry.layers[number // width], number % width

    def _refresh(self) -> None:
        """Another strategy may have changed slots or pins."""
        slots = self._slots
        if slots.changes == self._known_changes:
            return
        self._known_changes = slots.changes
        self._here[:] = self._movable[:] = False
        for key in list(slots.keys()):
            at = self._row[key[0]], key[1]
            self._here[at], self._movable[at] = True, not slots.is_pinned(key)


def far_apart(count: int) -> list[int]:
    """Layers in an order in which the first few, however many, are spread evenly: between two that
    miss nothing a prompt copies others."""
    bits = max(1, count - 1).bit_length()
    return sorted(range(count), key=lambda row: int(f"{row:0{bits}b}"[::-1], 2))


def exchange(
    values: Values, held: Values, wanted: Numbers, margin: float, free: int, most: int
) -> tuple[Numbers, Numbers]:
    """The numbers of those that come and of those that go, at most `most`: the highest of `wanted`
    fill `free` places, then replace the lowest that they lead by `margin`. `held`: values of
    members that may go, and infinity."""
    coming = wanted[np.argsort(-values[wanted], kind="stable")][:most]
    filling, coming = coming[: max(0, free)], coming[max(0, free) :]
    if not len(coming):
        return filling, coming
    # few are that low
    lowest = np.flatnonzero(held + margin < values[coming[0]])
    lowest = lowest[np.argsort(held[lowest], kind="stable")][: len(coming)]
    coming = coming[: len(lowest)]
    leads = values[coming] > held[lowest] + margin
    return np.concatenate((filling, coming[leads])), lowest[leads]
