"""Opens the experts of a model: its store, and the runtime that places them.

The one place where models meet the expert tier. Knows no strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coterie.moe.store.base import ExpertGeometry

if TYPE_CHECKING:
    from coterie.core.dispatch import MoeSettings
    from coterie.models.build.moe import MoeExperts
    from coterie.models.spec import MoeSpec
    from coterie.moe.store.base import ExpertStore
    from coterie.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class MoeRequirements:
    """What a model needs of its experts."""

    checkpoint: Checkpoint
    moe: MoeSpec
    hidden: int
    # as the user asked: auto keeps what the file stores
    dtype: str
    device: str
    # of one full context, reserved before experts
    kv_bytes: int

    def geometry(self) -> ExpertGeometry:
        return _geometry(self.moe)


MoeFactory = Callable[[MoeRequirements], "MoeExperts"]


def _geometry(moe: MoeSpec) -> ExpertGeometry:
    return ExpertGeometry(moe.layers, moe.num_experts, moe.routing.top_k)


def moe_factory(dispatch: MoeSettings | None) -> MoeFactory:
    """The ordinary way: a store over the checkpoint, and a runtime as `dispatch` wishes."""

    def opened(wanted: MoeRequirements) -> MoeExperts:
        from coterie.core.dispatch import MoeSettings
        from coterie.moe.runtime.runtime import open_experts

        settings = dispatch or MoeSettings()
        store = store_of(wanted, settings.reads)
        return open_experts(store, settings, device=wanted.device, kv_bytes=wanted.kv_bytes)

    return opened


def store_of(wanted: MoeRequirements, reads: str) -> ExpertStore:
    return open_moe_store(wanted.checkpoint, wanted.moe, wanted.hidden, wanted.dtype, reads)


def open_moe_store(
    checkpoint: Checkpoint, moe: MoeSpec, hidden: int, dtype: str, reads: str = "auto"
) -> ExpertStore:
    """The experts of every MoE layer; reads none of them."""
    from coterie.moe.store.base import ExpertNames
    from coterie.moe.store.checkpoint import open_store

    return open_store(
        checkpoint,
        _geometry(moe),
        ExpertNames(moe.parts),
        dtype,
        reads,
        hidden=hidden,
        intermediate=moe.intermediate,
        gated=moe.gated,
    )
