"""Device memory of captured graphs: reserved before KV and experts get theirs, measured at each
capture.

A graph keeps the memory of its step, and its outputs, as long as it lives. Steps for which there is
no room any more run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from coterie.models.spec import ModelSpec

log = logging.getLogger(__name__)

# free memory that no capture may take, for steps that run eagerly
_FREE_BYTES = 256 << 20
# of each graph the driver keeps its launches
_GRAPH_BYTES = 4 << 20
# compiled kernels and workspaces of libraries; and what an estimate may miss
_FIXED_BYTES, _MARGIN = 256 << 20, 2.0
# the most parts of a context in `triton.latent_attention`
_LATENT_SPLITS = 32


class GraphMemory:
    """`reserved` is None where nobody limits it."""

    def __init__(self, device: torch.device, reserved: int | None = None) -> None:
        self._device, self.reserved = device, reserved
        self.used = self.count = 0
        self._is_full = False

    @property
    def has_room(self) -> bool:
        """Once there is none, there is none for good."""
        if self.reserved is not None and not self._is_full:
            self._is_full = self.used >= self.reserved or self._free_bytes() < _FREE_BYTES
        return not self._is_full

    def spares(self, nbytes: int) -> bool:
        """Whether a graph of so many bytes leaves half of the reserve to others."""
        return self.has_room and (self.reserved is None or self.used + nbytes <= self.reserved / 2)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count what the graph that is captured inside takes. Where it found too little memory it
        is not captured, and no other will be."""
        before = self._held_bytes()
        try:
            yield
        except torch.OutOfMemoryError:
            self._is_full = True
            log.warning("graph_not_captured", extra={"reason": "no memory"})
            return
        self.used += max(0, self._held_bytes() - before) + _GRAPH_BYTES
        self.count += 1

    def stats(self) -> dict[str, float]:
        return {
            "graphs": self.count,
            "graph_bytes": self.used,
            "graph_reserved_bytes": self.reserved or 0,
        }

    def _held_bytes(self) -> int:
        """By this process; others may use the device too."""
        if self._device.type != "cuda":
            return 0
        # blocks that torch keeps for later are free
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _free_bytes(self) -> int:
        if self._device.type != "cuda":
            return _FREE_BYTES
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


def estimate_graph_bytes(
    spec: ModelSpec, dtype: str, sizes: tuple[int, ...], prompt: int, kinds: int = 1
) -> int:
    """What all graphs of a model take at most: steps of `sizes` sequences, of short and of long
    contexts, of `kinds` (with and without adapters), and of prompts up to `prompt` tokens. Graphs
    share the memory of their steps, since they never run together; each has its own inputs and
    logits."""
    itemsize = 4 if dtype == "fp32" else 2
    rows = max(prompt, *sizes)
    step = rows * row_bytes(spec, itemsize)
    if spec.moe is not None:
        moe = spec.moe
        # rows sorted by expert, each expert with whole tiles of up to 128
        pairs = rows * moe.gate_rule.top_k + 128 * moe.num_experts
        step += pairs * itemsize * (spec.hidden + moe.intermediate)
        if dtype in ("int8", "int4"):
            # experts of one layer, widened for a prompt
            step += moe.num_experts * 3 * moe.intermediate * spec.hidden * 2
    if spec.latent is not None:
        # mixed latents of the splits of every row's context, in fp32
        step += max(sizes) * spec.num_heads * _LATENT_SPLITS * spec.latent.kv_rank * 4
    kept = 2 * kinds * sum(sizes) * (4 * spec.vocab + spec.max_positions)
    graphs = (2 * kinds + 1) * len(sizes) * _GRAPH_BYTES
    if spec.moe is not None and dtype in ("fp32", "bf16"):
        # shared experts, cut for steps of one row
        shared = 3 * spec.moe.shared * spec.hidden * itemsize
        graphs += len(spec.moe.layers) * shared
    return int(_MARGIN * (step + kept)) + graphs + _FIXED_BYTES


def row_bytes(spec: ModelSpec, itemsize: int) -> int:
    """What one row of a step takes at most, without experts."""
    heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return itemsize * (6 * spec.hidden + 3 * heads + 3 * spec.intermediate)
