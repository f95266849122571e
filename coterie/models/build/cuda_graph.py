"""Decode steps captured as CUDA graphs: in small batches, launching kernels costs more than running
them.

There is one graph per padded number of sequences and KV cache, captured on first use (or by
`prepare`) while there is memory for it, and a second one for rows with adapters, so that steps
without any pay nothing for them.
Padded rows have slot -1, no context and no adapter: the Triton kernels store nothing for them. The
eager path in `base` computes the same; it runs steps with prefill rows, too many sequences, or
adapters that the kernels do not support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from coterie.kernels.batch import KINDS, AttentionBatch, PatchRows, Places, graph_family, places_of
from coterie.kernels.step_message import DecodeFields
from coterie.models.build.graph_memory import GraphMemory

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# a step for short contexts splits attention into fewer parts; multiples of every block size
CONTEXTS = (2048,)


def captured_sizes(max_sequences: int) -> tuple[int, ...]:
    """The padded sizes of steps of up to so many sequences."""
    return tuple(size for size in SIZES if size < 2 * max_sequences)


# token ids, batch, caches, rows -> logits; and the choices of gates, where experts are captured too
StepOutput = tuple[Tensor, Tensor | None]
Outputs = Sequence[Tensor | None]
Compute = Callable[[Tensor, AttentionBatch, Sequence[Tensor], Tensor], StepOutput]


class DecodeInputs:
    """Inputs of a decode step at fixed addresses: `size` rows, of which the first n are in use."""

    def __init__(self, size: int, table_width: int, block_size: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        # rows whose logits are needed; values left from another step are valid rows too
        self.rows = torch.arange(size, device=device)
        self.batch = AttentionBatch(
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            slots=torch.full((size,), -1, dtype=torch.int64, device=device),
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(size, dtype=torch.int32, device=device),
            block_tables=torch.zeros((size, table_width), dtype=torch.int32, device=device),
            block_size=block_size,
        )

    @property
    def fields(self) -> DecodeFields:
        return DecodeFields(self.token_ids, self.rows, self.batch)

    def adapt(self, layers: int, kind: str) -> None:
        """Allow adapters on rows, up to one of KINDS."""
        number = KINDS.index(kind)
        rows = PatchRows(len(self.token_ids), layers, self.token_ids.device, number)
        self.batch = replace(self.batch, patch_rows=rows)

    def fill(
        self, token_ids: Tensor, batch: AttentionBatch, rows: Tensor, places: Places = ()
    ) -> None:
        """Copy a step and its rows' adapters. Rows left from an earlier, larger step become
        padding."""
        live, width = len(token_ids), batch.block_tables.shape[1]
        fixed = self.batch
        if fixed.patch_rows is not None:
            fixed.patch_rows.fill(places)
        if self.token_ids.is_cuda:
            # the same in one kernel
            from coterie.kernels.triton.fill import fill_step

            fill_step(token_ids, batch, rows, self.token_ids, fixed, self.rows)
            return
        self.token_ids[:live].copy_(token_ids)
        self.rows[: len(rows)].copy_(rows)
        fixed.positions[:live].copy_(batch.positions)
        fixed.slots[:live].copy_(batch.slots)
        fixed.context_lens[:live].copy_(batch.context_lens)
        fixed.block_tables[:live, :width].copy_(batch.block_tables)
        if live < len(self.token_ids):
            fixed.slots[live:] = -1
            fixed.context_lens[live:] = 0


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """A decode step that runs with whatever its inputs hold."""

    inputs: DecodeInputs
    replay: Callable[[], None]
    # [size, V], valid until another captured step runs
    logits: Tensor
    routed: Tensor | None


class DecodeGraphs:
    def __init__(self, compute: Compute, max_positions: int, device: torch.device) -> None:
        self._compute, self._max_positions, self._device = compute, max_positions, device
        # by a lane's first cache, and deleted with it: a graph has the addresses of all its caches
        self._captured = WeakIdKeyDictionary()
        # Graphs that never run at the same time share their memory, which torch frees with the last
        # of them: one is kept here.
        self._last: torch.cuda.CUDAGraph | None = None
        # False once a captured step did not read its rows' adapters: this model's kernels support
        # only segments
        self.adapts = True
        self.memory = GraphMemory(device)

    def prepare(
        self, kv: Sequence[Tensor], block_size: int, max_sequences: int, adapters: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Capture every size up to `max_sequences`, for short and for long contexts, so that no
        request waits for it; with `adapters` also the graphs for rows that have some. Yields how
        many are done, and how many there are."""
        contexts = sorted({*(c for c in CONTEXTS if c < self._max_positions), self._max_positions})
        kinds = ("plain", *KINDS) if adapters else ("plain",)
        wanted = list(product(reversed(captured_sizes(max_sequences)), kinds, contexts))
        for done, (size, kind, context) in enumerate(wanted):
            yield done, len(wanted)
            if kind == "plain" or self.adapts:
                self._find(size, kv, block_size, kind, context)
        yield len(wanted), len(wanted)

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> StepOutput | None:
        """The output of a decode step, valid until the next one; None when it must run eagerly."""
        live, width = batch.block_tables.shape
        decode = len(token_ids) == live and len(rows) <= live
        covered = width * batch.block_size <= self._width(batch.block_size)
        if not (decode and covered and live <= SIZES[-1]) or _may_be_soft(batch):
            return None
        places = places_of(batch.patches, self._device)
        kind = graph_family(places, len(kv))
        if not kind or (kind != "plain" and not self.adapts):
            return None
        size = next(size for size in SIZES if size >= live)
        captured = self._find(size, kv, batch.block_size, kind, width * batch.block_size)
        if captured is None:
            return None
        captured.inputs.fill(token_ids, batch, rows, places)
        captured.replay()
        return captured.logits[: len(rows)], captured.routed

    def step(
        self, rows: int, context: int, kv: Sequence[Tensor], block_size: int, places: Places = ()
    ) -> CapturedStep | None:
        """The step for so many sequences, of which the longest has `context` tokens, with adapters
        at `places`; None when it must run eagerly. The caller fills its inputs."""
        kind = graph_family(places, len(kv))
        if rows > SIZES[-1] or context > self._width(block_size):
            return None
        if not kind or (kind != "plain" and not self.adapts):
            return None
        size = next(size for size in SIZES if size >= rows)
        return self._find(size, kv, block_size, kind, context)

    def record(
        self, work: Callable[[], Outputs], warm_ups: int = 2
    ) -> tuple[Callable[[], None], Outputs]:
        """`work` as a graph of its own, and its outputs, whose addresses stay. It must not ask the
        device. Without CUDA the same without a graph."""
        if self._device.type != "cuda":
            output = work()

            def again() -> None:
                for kept, new in zip(output, work(), strict=True):
                    if kept is not None and new is not None:
                        kept.copy_(new)

            return again, output
        self.warm_up(work, warm_ups)
        graph = torch.cuda.CUDAGraph()
        pool = None if self._last is None else self._last.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = work()
        self._last = graph
        return graph.replay, output

    def record_all(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Each of `works` as a graph, of work that runs in this order and leaves what it makes at
        addresses of its own. All run once before."""
        if self._device.type != "cuda":
            return list(works)
        self.warm_up(lambda: [work() for work in works], 1)
        replays = []
        # torch.cuda.graph would wait for the device and free its caches before each
        with torch.cuda.stream(_side_stream(self._device)):
            for work in works:
                graph = torch.cuda.CUDAGraph()
                pool = None if self._last is None else self._last.pool()
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
                self._last = graph
                replays.append(graph.replay)
        return replays

    def warm_up(self, work: Callable[[], object], times: int) -> None:
        """Compile kernels and make library handles before a capture."""
        if self._device.type != "cuda" or not times:
            return
        side = _side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(times):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)

    def _width(self, block_size: int) -> int:
        """Positions that a block table covers, in whole blocks."""
        return -(-self._max_positions // block_size) * block_size

    def _find(
        self, size: int, kv: Sequence[Tensor], block_size: int, kind: str, context: int
    ) -> CapturedStep | None:
        """A captured step for contexts up to `context`."""
        graphs: dict[tuple[int, int, str, int], CapturedStep | None]
        graphs = self._captured.setdefault(kv[0], {})  # type: ignore[no-untyped-call]
        most = self._width(block_size)
        width = min(most, next((c for c in CONTEXTS if c >= context), most)) // block_size
        key = (size, block_size, kind, width)
        if key not in graphs:
            if not self.memory.has_room:
                return None
            with self.memory.measured():
                graphs[key] = self._capture(size, kv, block_size, kind, width)
        return graphs.get(key)

    def _capture(
        self, size: int, kv: Sequence[Tensor], block_size: int, kind: str, width: int
    ) -> CapturedStep | None:
        """None where adapters would be ignored."""
        inputs = DecodeInputs(size, width, block_size, self._device)
        if kind != "plain":
            inputs.adapt(len(kv), kind)

        def run() -> StepOutput:
            return self._compute(inputs.token_ids, inputs.batch, kv, inputs.rows)

        # all rows are padding
        replay, (logits, routed) = self.record(run)
        assert logits is not None
        if inputs.batch.patch_rows is not None and not inputs.batch.patch_rows.read:
            self.adapts = False
            return None
        return CapturedStep(inputs, replay, logits, routed)


# rows of captured prompts: one of another length is padded to the next
PROMPTS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True, slots=True)
class _CapturedPrompt:
    token_ids: Tensor
    batch: AttentionBatch
    rows: Tensor
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    routed: Tensor | None


class PromptGraphs:
    """Steps with one whole prompt, captured: a short prompt is computed faster than its kernels are
    launched. Rows behind a padded prompt have slot -1, and no row attends to a later one. A length
    is captured when it comes for the second time."""

    def __init__(self, compute: Compute, device: torch.device) -> None:
        self._compute, self._device = compute, device
        # by a lane's first cache, and deleted with it
        self._captured = WeakIdKeyDictionary()
        self._pool: Any = None
        self.memory = GraphMemory(device)

    def prepare(self, kv: Sequence[Tensor], block_size: int, longest: int) -> None:
        """Capture prompts of every size up to `longest` tokens."""
        found = self._captured.setdefault(kv[0], {})  # type: ignore[no-untyped-call]
        for size in reversed([size for size in PROMPTS if size <= longest]):
            if found.get((size, block_size)) is None and self.memory.has_room:
                with self.memory.measured():
                    found[size, block_size] = self._capture(size, kv, block_size)

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> StepOutput | None:
        """The output, valid until the next prompt; None when it must run eagerly."""
        count = len(token_ids)
        size = next((size for size in PROMPTS if size >= count), None)
        if batch.fresh != ((0, count),) or size is None or len(rows) != 1 or batch.patches:
            return None
        found: dict[tuple[int, int], _CapturedPrompt | None]
        found = self._captured.setdefault(kv[0], {})  # type: ignore[no-untyped-call]
        key = (size, batch.block_size)
        if key not in found:
            found[key] = None
            return None
        captured = found[key]
        if captured is None:
            if not self.memory.has_room:
                return None
            with self.memory.measured():
                captured = found[key] = self._capture(size, kv, batch.block_size)
        if captured is None:
            return None
        captured.token_ids[:count].copy_(token_ids)
        captured.batch.slots[:count].copy_(batch.slots)
        captured.batch.slots[count:] = -1
        captured.rows.copy_(rows)
        captured.graph.replay()
        return captured.logits, captured.routed

    def _capture(self, size: int, kv: Sequence[Tensor], block_size: int) -> _CapturedPrompt:
        device = self._device
        token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        whole = torch.tensor([0, size], dtype=torch.int32, device=device)
        batch = AttentionBatch(
            positions=torch.arange(size, device=device),
            slots=torch.full((size,), -1, dtype=torch.int64, device=device),
            query_starts=whole,
            context_lens=whole[1:],
            block_tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
            block_size=block_size,
            fresh=((0, size),),
        )
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._compute(token_ids, batch, kv, rows)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = self._pool if _any_captured(self._captured) else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits, routed = self._compute(token_ids, batch, kv, rows)
        self._pool = graph.pool()
        return _CapturedPrompt(token_ids, batch, rows, graph, logits, routed)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where steps run before they are captured. One for all: libraries keep tens of megabytes for
    every stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _any_captured(by_cache: WeakIdKeyDictionary) -> bool:
    """A pool is freed with its last graph."""
    graphs = by_cache.values()  # type: ignore[no-untyped-call]
    return any(found for by_size in graphs for found in by_size.values())


def _may_be_soft(batch: AttentionBatch) -> bool:
    """Whether a prompt row may be a soft token, for which captured steps have no embedding."""
    prompts = batch.phase != "decode"
    return prompts and any(part.stack.soft is not None for part in batch.patches)
