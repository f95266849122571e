"""How many experts a model has and where, as a value. Knows no bytes and no strategy."""

from __future__ import annotations

from dataclasses import dataclass

# (layer, index): the layer's number in the model, the expert's number in the layer
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The routed experts of a model. Layers without experts (dense ones) are not listed."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    # a pruned store lacks some: the router may not pick these
    absent: frozenset[Key] = frozenset()

    @property
    def total(self) -> int:
        return len(self.layers) * self.num_experts - len(self.absent)

    def present(self, layer: int) -> tuple[int, ...]:
        return tuple(e for e in range(self.num_experts) if (layer, e) not in self.absent)

    def keys(self) -> list[Key]:
        return [(layer, expert) for layer in self.layers for expert in self.present(layer)]
