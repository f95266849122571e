"""Scores of how much an expert was used recently, and residents ranked by them.

Age is counted in visits of the expert's own layer. So an expert of a layer that this token has not
reached yet is not older than one of a layer that it has passed. Old scores are not decayed; newer
uses get a higher weight instead. Scores then only grow, and a heap with outdated (too low) entries
still finds the lowest resident of a layer in O(log n).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

_RESCALE = 1e200
_NOBODY = float("inf")


@dataclass(frozen=True, slots=True)
class DecayPolicy:
    # visits of its layer after which a use counts half; infinite for plain frequency
    half_life: float
    # uses (of now) by which an expert must lead the resident that it replaces
    margin: float
    # the score of one count in the heatmap
    prior: float = 0.0


class DecayedScores:
    """Scores of all experts under one policy. Experts are numbered layer by layer."""

    def __init__(self, policy: DecayPolicy, width: int, prior: Iterable[float]) -> None:
        self.policy = policy
        # experts of a layer
        self.width = width
        # scores before division by the layer's weight; a use adds its layer's current weight
        self.raw = [count * policy.prior for count in prior]
        self.weights = [1.0] * (len(self.raw) // width)
        self.rankings: list[ScoreRanking] = []
        self._growth = 2.0 ** (1.0 / policy.half_life)

    def value(self, expert: int) -> float:
        """The score in current uses, comparable between layers."""
        return self.raw[expert] / self.weights[expert // self.width]

    def above(self, bar: float) -> list[int]:
        """The experts with a higher value than this."""
        width = self.width
        return [
            expert
            for layer, weight in enumerate(self.weights)
            for expert, score in enumerate(
                self.raw[layer * width : (layer + 1) * width], layer * width
            )
            if score > bar * weight
        ]

    def record_use(self, layer: int, experts: Sequence[int]) -> None:
        """Count one visit of the layer that uses these."""
        weight = self.weights[layer] = self.weights[layer] * self._growth
        raw = self.raw
        for expert in experts:
            raw[expert] += weight
        if weight > _RESCALE:
            self.weights[layer] = 1.0
            self._scale(layer, 1.0 / weight)
        for ranking in self.rankings:
            ranking.stale.add(layer)

    def record_prompt(
        self, layer: int, experts: Sequence[int], counts: Sequence[int], rows: int
    ) -> None:
        """Count one visit for each row of a prompt chunk, as if all rows used the same experts."""
        decay = self._growth**-rows
        remaining = (1.0 - decay) / (1.0 - 1.0 / self._growth) if self._growth > 1.0 else rows
        each = self.weights[layer] * remaining / rows
        self._scale(layer, decay)
        for expert, count in zip(experts, counts, strict=True):
            self.raw[expert] += each * count

    def _scale(self, layer: int, scale: float) -> None:
        own = slice(layer * self.width, (layer + 1) * self.width)
        self.raw[own] = [score * scale for score in self.raw[own]]
        for ranking in self.rankings:
            ranking.rank_layer(layer)


class ScoreRanking:
    """A set of experts that finds its member with the lowest value."""

    def __init__(self, scores: DecayedScores) -> None:
        self.members: set[int] = set()
        # layers whose lowest member may have changed
        self.stale: set[int] = set()
        # per layer (score when pushed, expert); removed experts stay until they come to the top
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in scores.weights]
        self._lows = [_NOBODY] * len(scores.weights)
        self._scores = scores
        scores.rankings.append(self)

    def add(self, expert: int) -> None:
        self.members.add(expert)
        layer = expert // self._scores.width
        heap = self._heaps[layer]
        heappush(heap, (self._scores.raw[expert], expert))
        self.stale.add(layer)
        if len(heap) > 2 * self._scores.width + 16:
            self.rank_layer(layer)

    def remove(self, expert: int) -> None:
        self.members.discard(expert)
        self.stale.add(expert // self._scores.width)

    def rank_by(self, scores: DecayedScores) -> None:
        """Rank all members again, by these scores. O(n)."""
        self._scores.rankings.remove(self)
        scores.rankings.append(self)
        self._scores = scores
        heaps: list[list[tuple[float, int]]] = [[] for _ in scores.weights]
        width, raw = scores.width, scores.raw
        for expert in self.members:
            heaps[expert // width].append((raw[expert], expert))
        for heap in heaps:
            heapify(heap)
        self._heaps = heaps
        self.stale.update(range(len(heaps)))

    def rank_layer(self, layer: int) -> None:
        width, raw = self._scores.width, self._scores.raw
        own = range(layer * width, (layer + 1) * width)
        self._heaps[layer] = [(raw[expert], expert) for expert in own if expert in self.members]
        heapify(self._heaps[layer])
        self.stale.add(layer)

    def lowest(self, busy: Collection[int] = ()) -> int | None:
        """The member with the lowest value that is not busy; ties go to the lowest number."""
        lows = self._lows
        for layer in self.stale:
            lows[layer] = self._low(layer)
        self.stale.clear()
        passed: list[tuple[int, tuple[float, int]]] = []
        found = None
        while (low := min(lows)) < _NOBODY:
            layer = lows.index(low)
            heap = self._heaps[layer]
            if heap[0][1] not in busy:
                found = heap[0][1]
                break
            passed.append((layer, heappop(heap)))
            lows[layer] = self._low(layer)
        for layer, entry in passed:
            heappush(self._heaps[layer], entry)
            self.stale.add(layer)
        return found

    def _low(self, layer: int) -> float:
        """The lowest value in a layer; that member is then the first of the layer's heap."""
        heap, raw, members = self._heaps[layer], self._scores.raw, self.members
        while heap:
            score, expert = heap[0]
            if expert not in members:
                heappop(heap)
            elif score != raw[expert]:
                heapreplace(heap, (raw[expert], expert))
            else:
                return score / self._scores.weights[layer]
        return _NOBODY


POLICIES = (
    # recent use: about a paragraph
    DecayPolicy(half_life=5.0, margin=0.25),
    # almost only recency, for slots that hold nearly all experts in use
    DecayPolicy(half_life=1.5, margin=0.0),
    # this conversation, slow to change
    DecayPolicy(half_life=16.0, margin=1.0),
    # all time and the heatmap
    DecayPolicy(half_life=1e9, margin=1.5, prior=4.0),
)
_WATCHED_LAYERS = 6
# in the election a hit counts half after this many tokens
_HALF_LIFE = 128.0
# factor by which another policy must lead to replace the leader
_AHEAD = 1.02


class ShadowCache:
    """Simulates a cache that these scores would rank, and counts its hits."""

    def __init__(self, scores: DecayedScores, num_slots: int) -> None:
        self.hits = 0.0
        self.ranking = ScoreRanking(scores)
        self._scores = scores
        self._num_slots = num_slots

    def replay(self, experts: Sequence[int]) -> None:
        members = self.ranking.members
        absent = [expert for expert in experts if expert not in members]
        self.hits += len(experts) - len(absent)
        for expert in absent:
            self.admit(expert)

    def admit(self, expert: int) -> None:
        ranking, scores = self.ranking, self._scores
        if len(ranking.members) >= self._num_slots:
            lowest = ranking.lowest()
            if (
                lowest is None
                or scores.value(expert) <= scores.value(lowest) + scores.policy.margin
            ):
                return
            ranking.remove(lowest)
        ranking.add(expert)


class PolicyElection:
    """Finds the policy whose simulated cache hits most, over a sample of the layers.

    Experts are numbered layer by layer: layer index * num_experts + expert.
    """

    def __init__(self, layers: int, num_experts: int, num_slots: int, prior: list[float]) -> None:
        self.policies = [DecayedScores(policy, num_experts, prior) for policy in POLICIES]
        step = max(1, layers // _WATCHED_LAYERS)
        self.watched = frozenset(range(step // 2, layers, step))
        share = max(1, round(num_slots * len(self.watched) / layers))
        self._shadows = [ShadowCache(scores, share) for scores in self.policies]
        if any(prior):
            self._load_hottest(num_experts, share, prior)
        # the first leader: with a heatmap all-time frequency, otherwise recent use
        self.leader = self.policies[-1 if any(prior) else 0]
        self._keep = 0.5 ** (1.0 / _HALF_LIFE)

    def _load_hottest(self, num_experts: int, share: int, prior: list[float]) -> None:
        """All simulated caches start with the hottest experts of the heatmap, as the slots do."""
        watched = [i for i in range(len(prior)) if i // num_experts in self.watched]
        watched.sort(key=lambda expert: (-prior[expert], expert))
        for shadow in self._shadows:
            for expert in watched[:share]:
                shadow.ranking.add(expert)

    def record_use(self, layer_index: int, experts: Sequence[int]) -> None:
        """Count a demand in all scores, and replay it in the caches when the layer is watched."""
        for scores in self.policies:
            scores.record_use(layer_index, experts)
        self._replay(layer_index, experts)

    def record_prompt(
        self, layer_index: int, experts: Sequence[int], counts: Sequence[int], rows: int
    ) -> None:
        """The same for a prompt chunk."""
        for scores in self.policies:
            scores.record_prompt(layer_index, experts, counts, rows)
        self._replay(layer_index, experts)

    def _replay(self, layer_index: int, experts: Sequence[int]) -> None:
        if layer_index in self.watched:
            for shadow in self._shadows:
                shadow.replay(experts)

    def tick(self) -> bool:
        """Called after each token. True when another policy leads from now on."""
        for shadow in self._shadows:
            shadow.hits *= self._keep
        return self._elect()

    def _elect(self) -> bool:
        hits = {id(scores): shadow.hits for scores, shadow in self._pairs()}
        best, _ = max(self._pairs(), key=lambda pair: pair[1].hits)
        if hits[id(best)] <= hits[id(self.leader)] * _AHEAD + 1.0:
            return False
        self.leader = best
        return True

    def _pairs(self) -> Iterable[tuple[DecayedScores, ShadowCache]]:
        return zip(self.policies, self._shadows, strict=True)
