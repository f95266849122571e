"""How much an expert was used lately, under one half-life, and residents ranked by that.

Every layer has a clock of its own: age is counted in visits of the layer, so an expert of a layer
that this token has not reached yet is not older than one of a layer it has passed. Instead of
letting old scores fade, newer uses weigh more: scores then only grow, and a heap with outdated (too
low) entries still finds the lowest resident of a layer in O(log n).
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
    # fresh uses by which a newcomer must lead a resident whose place it takes
    margin: float
    # what one count of the heatmap is worth
    prior: float = 0.0


class DecayedScores:
    """Scores of all experts under one policy. Experts are numbered layer by layer."""

    def __init__(self, policy: DecayPolicy, width: int, prior: Iterable[float]) -> None:
        self.policy = policy
        # experts of a layer
        self.width = width
        self.scores = [count * policy.prior for count in prior]
        # what a use of this layer counts now
        self.weights = [1.0] * (len(self.scores) // width)
        self.followers: list[ScoreRanking] = []
        self._growth = 2.0 ** (1.0 / policy.half_life)

    def value(self, expert: int) -> float:
        """In uses of just now: comparable between layers."""
        return self.scores[expert] / self.weights[expert // self.width]

    def above(self, bar: float) -> list[int]:
        """Who has a higher value than this."""
        width = self.width
        return [
            expert
            for layer, weight in enumerate(self.weights)
            for expert, score in enumerate(
                self.scores[layer * width : (layer + 1) * width], layer * width
            )
            if score > bar * weight
        ]

    def saw(self, layer: int, experts: Sequence[int]) -> None:
        """A visit of the layer that asks for these."""
        weight = self.weights[layer] = self.weights[layer] * self._growth
        scores = self.scores
        for expert in experts:
            scores[expert] += weight
        if weight > _RESCALE:
            self.weights[layer] = 1.0
            self._scale(layer, 1.0 / weight)
        for ranking in self.followers:
            ranking.stale.add(layer)

    def read(self, layer: int, experts: Sequence[int], counts: Sequence[int], rows: int) -> None:
        """A piece of a prompt: as many visits as it has rows, alike in what they ask for."""
        fade = self._growth**-rows
        lasting = (1.0 - fade) / (1.0 - 1.0 / self._growth) if self._growth > 1.0 else rows
        each = self.weights[layer] * lasting / rows
        self._scale(layer, fade)
        for expert, count in zip(experts, counts, strict=True):
            self.scores[expert] += each * count

    def _scale(self, layer: int, scale: float) -> None:
        own = slice(layer * self.width, (layer + 1) * self.width)
        self.scores[own] = [score * scale for score in self.scores[own]]
        for ranking in self.followers:
            ranking.rank_layer(layer)


class ScoreRanking:
    """A set of experts that can tell its lowest valued member."""

    def __init__(self, memory: DecayedScores) -> None:
        self.members: set[int] = set()
        # layers whose lowest member may be another one now
        self.stale: set[int] = set()
        # per layer (score when pushed, expert); experts that left stay until they surface
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in memory.weights]
        self._lows = [_NOBODY] * len(memory.weights)
        self._memory = memory
        memory.followers.append(self)

    def add(self, expert: int) -> None:
        self.members.add(expert)
        layer = expert // self._memory.width
        heap = self._heaps[layer]
        heappush(heap, (self._memory.scores[expert], expert))
        self.stale.add(layer)
        if len(heap) > 2 * self._memory.width + 16:
            self.rank_layer(layer)

    def remove(self, expert: int) -> None:
        self.members.discard(expert)
        self.stale.add(expert // self._memory.width)

    def rank_by(self, memory: DecayedScores) -> None:
        """Rank anew, by these scores. O(n)."""
        self._memory.followers.remove(self)
        memory.followers.append(self)
        self._memory = memory
        heaps: list[list[tuple[float, int]]] = [[] for _ in memory.weights]
        width, scores = memory.width, memory.scores
        for expert in self.members:
            heaps[expert // width].append((scores[expert], expert))
        for heap in heaps:
            heapify(heap)
        self._heaps = heaps
        self.stale.update(range(len(heaps)))

    def rank_layer(self, layer: int) -> None:
        width, scores = self._memory.width, self._memory.scores
        own = range(layer * width, (layer + 1) * width)
        self._heaps[layer] = [(scores[expert], expert) for expert in own if expert in self.members]
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
        """The lowest value in a layer, whose heap then begins with that member."""
        heap, scores, members = self._heaps[layer], self._memory.scores, self.members
        while heap:
            score, expert = heap[0]
            if expert not in members:
                heappop(heap)
            elif score != scores[expert]:
                heapreplace(heap, (scores[expert], expert))
            else:
                return score / self._memory.weights[layer]
        return _NOBODY


POLICIES = (
    # this paragraph
    DecayPolicy(half_life=5.0, margin=0.25),
    # plain recency, for slots that hold nearly all that is in use
    DecayPolicy(half_life=1.5, margin=0.0),
    # this conversation, with inertia
    DecayPolicy(half_life=16.0, margin=1.0),
    # all time and the heatmap
    DecayPolicy(half_life=1e9, margin=1.5, prior=4.0),
)
_WATCHED_LAYERS = 6
# hits of so many tokens ago count half in the contest
_HALF_LIFE = 128.0
# share by which a challenger must lead
_AHEAD = 1.02


class ShadowCache:
    """What a cache under this memory would hold, and how often it would hit."""

    def __init__(self, memory: DecayedScores, num_slots: int) -> None:
        self.hits = 0.0
        self.ranking = ScoreRanking(memory)
        self._memory = memory
        self._num_slots = num_slots

    def saw(self, experts: Sequence[int]) -> None:
        members = self.ranking.members
        absent = [expert for expert in experts if expert not in members]
        self.hits += len(experts) - len(absent)
        for expert in absent:
            self.admit(expert)

    def admit(self, expert: int) -> None:
        ranking, memory = self.ranking, self._memory
        if len(ranking.members) >= self._num_slots:
            lowest = ranking.lowest()
            if (
                lowest is None
                or memory.value(expert) <= memory.value(lowest) + memory.policy.margin
            ):
                return
            ranking.remove(lowest)
        ranking.add(expert)


class PolicyElection:
    """Experts are numbered layer by layer: layer index * num_experts + expert."""

    def __init__(self, layers: int, num_experts: int, num_slots: int, prior: list[float]) -> None:
        self.memories = [DecayedScores(policy, num_experts, prior) for policy in POLICIES]
        step = max(1, layers // _WATCHED_LAYERS)
        self.watched = frozenset(range(step // 2, layers, step))
        share = max(1, round(num_slots * len(self.watched) / layers))
        self._shadows = [ShadowCache(memory, share) for memory in self.memories]
        if any(prior):
            self._furnish(num_experts, share, prior)
        # with a heatmap all-time frequency leads, else the conversation
        self.leader = self.memories[-1 if any(prior) else 0]
        self._keep = 0.5 ** (1.0 / _HALF_LIFE)

    def _furnish(self, num_experts: int, share: int, prior: list[float]) -> None:
        """All shadows start with what the heatmap calls hot, as the slots do."""
        watched = [i for i in range(len(prior)) if i // num_experts in self.watched]
        watched.sort(key=lambda expert: (-prior[expert], expert))
        for shadow in self._shadows:
            for expert in watched[:share]:
                shadow.ranking.add(expert)

    def saw(self, layer_index: int, experts: Sequence[int]) -> None:
        """A demand: remembered by all, played by the shadows when the layer is watched."""
        for memory in self.memories:
            memory.saw(layer_index, experts)
        self._play(layer_index, experts)

    def read(
        self, layer_index: int, experts: Sequence[int], counts: Sequence[int], rows: int
    ) -> None:
        """The same of a piece of a prompt."""
        for memory in self.memories:
            memory.read(layer_index, experts, counts, rows)
        self._play(layer_index, experts)

    def _play(self, layer_index: int, experts: Sequence[int]) -> None:
        if layer_index in self.watched:
            for shadow in self._shadows:
                shadow.saw(experts)

    def tick(self) -> bool:
        """A token has passed. True when another memory leads now."""
        for shadow in self._shadows:
            shadow.hits *= self._keep
        return self._elect()

    def _elect(self) -> bool:
        hits = {id(memory): shadow.hits for memory, shadow in self._pairs()}
        best, _ = max(self._pairs(), key=lambda pair: pair[1].hits)
        if hits[id(best)] <= hits[id(self.leader)] * _AHEAD + 1.0:
            return False
        self.leader = best
        return True

    def _pairs(self) -> Iterable[tuple[DecayedScores, ShadowCache]]:
        return zip(self.memories, self._shadows, strict=True)
