"""Several memories in competition: each keeps a shadow cache, the one that hits most leads.

Shadows hold numbers, not experts, and watch a few layers only, with as many slots as those layers'
share; that is enough to rank the policies and keeps a decision cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coterie.moe.dispatch.adaptive.scores import DecayedScores, DecayPolicy, ScoreRanking

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
