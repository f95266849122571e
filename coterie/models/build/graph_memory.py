"""Device memory of captured graphs: reserved before KV and experts get theirs, measured at each
capture.

A graph keeps the memory of its step, and its outputs, as long as it lives. Steps for which there is
no room any more run eagerly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from coterie.models.spec import ModelSpec

log = logging.getLogger(__name__)

# free memory that no capture may take, for steps that run eagerly
_FREE_BYTES = 256 << 20
# of each graph the driver keeps its launches: of a whole model, and of a few kernels
_GRAPH_BYTES, _SMALL_GRAPH_BYTES = 4 << 20, 128 << 10
# of each step: what receives it, and the kinds of draws that are often used
_SMALL_GRAPHS = 9
# ids of a list of edits in the estimate; longer ones find room in the margin
_EDITED_IDS = 2048
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
        """Whether a graph of so many bytes leaves a quarter of the reserve to others."""
        most = math.inf if self.reserved is None else 0.75 * self.reserved
        # what is free is asked for last: that takes as long as a step
        return self.used + nbytes <= most and self.has_room

    @contextmanager
    def measured(self, graphs: int = 1, small: bool = False) -> Iterator[None]:
        """Count what the `graphs` that are captured inside take (`small`: each has few kernels),
        with what else is allocated there. Where they found too little memory they are not captured,
        and no other will be."""
        before = self._held_bytes()
        try:
            yield
        except torch.OutOfMemoryError:
            self._is_full = True
            log.warning("graph_not_captured", extra={"reason": "no memory"})
            return
        launches = graphs * (_SMALL_GRAPH_BYTES if small else _GRAPH_BYTES)
        self.used += max(0, self._held_bytes() - before) + launches
        self.count += graphs

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


class MixedSize(NamedTuple):
    """A captured size of steps with prompts and decoding rows: `graphs` of it, with so many rows
    of logits."""

    rows: int
    sequences: int
    graphs: int


def sizes_up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    """Those of `sizes`, in order, that numbers from 1 to `most` are padded to."""
    return [size for size, less in zip(sizes, (0, *sizes), strict=False) if less < most]


def estimate_graph_bytes(
    spec: ModelSpec,
    dtype: str,
    sizes: tuple[int, ...],
    prompt: int,
    kinds: int = 1,
    mixes: Sequence[MixedSize] = (),
) -> int:
    """What all graphs of a model take at most: steps of `sizes` sequences, of short and of long
    contexts, of `kinds` (with and without adapters), their draws, prompts up to `prompt` tokens,
    and `mixes`. Graphs share the memory of their steps, since they never run together; each has its
    own inputs, and its logits unless it is of a mix."""
    rows = max(prompt, *sizes, *(mix.rows for mix in mixes))
    step = step_bytes(spec, dtype, rows)
    if spec.latent is not None:
        # mixed latents of the splits of every row's context, in fp32
        step += max(sizes) * spec.num_heads * _LATENT_SPLITS * spec.latent.kv_rank * 4
    kept = 2 * kinds * sum(sizes) * (4 * spec.vocab + spec.max_positions)
    graphs = (2 * kinds + 1) * len(sizes) * _GRAPH_BYTES
    graphs += 2 * kinds * len(sizes) * _SMALL_GRAPHS * _SMALL_GRAPH_BYTES
    graphs += draw_bytes(spec.vocab, sizes)
    graphs += sum(mixed_bytes(spec, mix) for mix in mixes)
    graphs += 4 * spec.vocab * sum({mix.sequences for mix in mixes})
    if spec.moe is not None and dtype in ("fp32", "bf16"):
        # shared experts, cut for steps of one row
        shared = 3 * spec.moe.shared * spec.hidden * (4 if dtype == "fp32" else 2)
        graphs += len(spec.moe.layers) * shared
    return int(_MARGIN * (step + kept)) + graphs + _FIXED_BYTES


def draw_bytes(vocab: int, sizes: tuple[int, ...]) -> int:
    """Draws of all sizes: one copy of logits, which they share, and one list of edits and one mask
    of each size."""
    return 4 * vocab * max(sizes) + sum(sizes) * (12 * _EDITED_IDS + vocab // 8)


def mixed_bytes(spec: ModelSpec, mix: MixedSize) -> int:
    """Launches and inputs of a captured mix, without what all of them share. A piece of a step is
    a small graph and has no inputs."""
    if not mix.sequences:
        return mix.graphs * _SMALL_GRAPH_BYTES
    # positions, slots and ids; block tables with blocks of 8
    inputs = 24 * mix.rows + mix.sequences * spec.max_positions // 2
    return mix.graphs * (_GRAPH_BYTES + inputs)


def step_bytes(spec: ModelSpec, dtype: str, rows: int) -> int:
    """What a step of so many rows takes at most, without its logits."""
    itemsize = 4 if dtype == "fp32" else 2
    step = rows * row_bytes(spec, itemsize)
    if spec.moe is not None:
        moe = spec.moe
        # rows sorted by expert, each expert with whole tiles of up to 128
        pairs = rows * moe.gate_rule.top_k + 128 * moe.num_experts
        step += pairs * itemsize * (spec.hidden + moe.intermediate)
        if dtype in ("int8", "int4"):
            # experts of one layer, widened for a prompt
            step += moe.num_experts * 3 * moe.intermediate * spec.hidden * 2
    return step


def row_bytes(spec: ModelSpec, itemsize: int) -> int:
    """What one row of a step takes at most, without experts."""
    heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return itemsize * (6 * spec.hidden + 3 * heads + 3 * spec.intermediate)
