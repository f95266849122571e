"""Captured steps of prompts and decoding rows together: launching their kernels one by one takes
longer than a small model computes them.

A step is padded to a number of rows, sequences and blocks. The last sequence has the rows behind
the others: these have slot -1 and no context, so nothing of them is stored. The step is captured
when such a size comes for the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from coterie.core.lane import LaneConfig
from coterie.kernels.batch import AttentionBatch
from coterie.models.build.cuda_graph import CONTEXTS, Compute, DecodeGraphs, StepOutput
from coterie.models.build.graph_memory import MixedSize, mixed_bytes, sizes_up_to, step_bytes
from coterie.models.spec import ModelSpec

# rows of captured steps, and sequences; never equal, which would mean that every sequence decodes
ROWS = (384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
SEQUENCES = (32, 256)
# Rows times bytes of weights up to which a device computes a step before it is launched: padding
# then costs nothing. Prompts that cuDNN would compute faster are captured up to the second.
MAX_WORK, MAX_FRESH_WORK = 4e12, 1e12
# larger models take longer than their launches
MAX_WEIGHT_BYTES = 2 << 30


def mixed_sizes(
    spec: ModelSpec, dtype: str, weight_bytes: int, longest: int, sequences: int
) -> list[MixedSize]:
    """The padded sizes that steps of up to `longest` rows and so many sequences are captured in,
    largest first; none of models whose steps take longer than their launches."""
    if spec.moe is not None or dtype == "fp32" or weight_bytes > MAX_WEIGHT_BYTES:
        return []
    rows, rooms = sizes_up_to(ROWS, longest), sizes_up_to(SEQUENCES, sequences)
    graphs = 1 + any(context < spec.max_positions for context in CONTEXTS)
    return [
        MixedSize(size, room, graphs)
        for size in reversed(rows)
        for room in reversed(rooms)
        if size * weight_bytes <= MAX_WORK
    ]


# rows, sequences, blocks of a sequence, block size
MixKey = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class CapturedMix:
    token_ids: Tensor
    batch: AttentionBatch
    rows: Tensor
    replay: Callable[[], None]
    logits: Tensor

    def fill(self, token_ids: Tensor, batch: AttentionBatch, rows: Tensor) -> None:
        count, fixed = len(token_ids), self.batch
        sequences, width = batch.block_tables.shape
        self.token_ids[:count].copy_(token_ids)
        self.rows[: len(rows)].copy_(rows)
        fixed.positions[:count].copy_(batch.positions)
        fixed.slots[:count].copy_(batch.slots)
        fixed.slots[count:].fill_(-1)
        fixed.query_starts[: sequences + 1].copy_(batch.query_starts)
        fixed.query_starts[sequences + 1 : -1].fill_(count)
        fixed.context_lens[:sequences].copy_(batch.context_lens)
        fixed.context_lens[sequences:].fill_(0)
        fixed.block_tables[:sequences, :width].copy_(batch.block_tables)


class MixedGraphs:
    def __init__(
        self, compute: Compute, graphs: DecodeGraphs, spec: ModelSpec, weight_bytes: int
    ) -> None:
        """Graphs are recorded by `graphs`, whose memory they share. `weight_bytes`: what a step
        reads."""
        self._compute, self._graphs = compute, graphs
        self._spec, self._weight_bytes = spec, weight_bytes
        # by a lane's first cache, and deleted with it; None: seen once
        self._captured = WeakIdKeyDictionary()
        # by number of sequences: valid until the next captured step
        self._logits: dict[int, Tensor] = {}

    def prepare(
        self, kv: Sequence[Tensor], lane: LaneConfig, dtype: str
    ) -> Iterator[tuple[int, int]]:
        """Capture every size that steps of this lane are padded to, for short and for long
        contexts. Yields how many are done, and how many there are."""
        spec, size = self._spec, lane.block_size
        most = -(-spec.max_positions // size)
        blocks = sorted({*(min(most, context // size) for context in CONTEXTS), most})
        limits = lane.max_step_tokens, lane.max_sequences
        wanted = [
            (mix.rows, mix.sequences, each, size)
            for mix in mixed_sizes(spec, dtype, self._weight_bytes, *limits)
            for each in reversed(blocks)
        ]
        for done, key in enumerate(wanted):
            yield done, len(wanted)
            self._find(key, kv)
        yield len(wanted), len(wanted)

    def forward(
        self, token_ids: Tensor, batch: AttentionBatch, kv: Sequence[Tensor], rows: Tensor
    ) -> StepOutput | None:
        """The output, valid until the next captured step; None when it must run eagerly."""
        count, (sequences, width) = len(token_ids), batch.block_tables.shape
        size = next((size for size in ROWS if size >= count), None)
        room = next((room for room in SEQUENCES if room >= max(sequences, len(rows))), None)
        if size is None or room is None or batch.patches or not len(rows):
            return None
        work = count * self._weight_bytes
        others = batch.fresh or batch.continued
        if work > (MAX_FRESH_WORK if others else MAX_WORK) and (others or size != count):
            return None
        most = -(-self._spec.max_positions // batch.block_size)
        contexts = (context // batch.block_size for context in CONTEXTS)
        blocks = min(most, next((some for some in contexts if some >= width), most))
        key = (size, room, blocks, batch.block_size)
        found = self._captured.setdefault(kv[0], {})  # type: ignore[no-untyped-call]
        if width > blocks or key not in found:
            found.setdefault(key, None)
            return None
        captured = self._find(key, kv)
        if captured is None:
            return None
        captured.fill(token_ids, replace(batch, fresh=(), continued=()), rows)
        captured.replay()
        return captured.logits[: len(rows)], None

    def _find(self, key: MixKey, kv: Sequence[Tensor]) -> CapturedMix | None:
        """Captured now, if there is room and it was not before."""
        found: dict[MixKey, CapturedMix | None]
        found = self._captured.setdefault(kv[0], {})  # type: ignore[no-untyped-call]
        if found.get(key) is None:
            size, room, *_ = key
            memory, spec = self._graphs.memory, self._spec
            nbytes = step_bytes(spec, "bf16", size)
            nbytes += mixed_bytes(spec, MixedSize(size, room, 1))
            if not memory.spares(nbytes):
                return None
            with memory.measured():
                found[key] = self._capture(key, kv)
        return found.get(key)

    def _capture(self, key: MixKey, kv: Sequence[Tensor]) -> CapturedMix:
        size, room, blocks, block_size = key
        device = kv[0].device

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        token_ids, rows = zeros(torch.int64, size), zeros(torch.int64, room)
        starts = zeros(torch.int32, room + 2)
        starts[-1] = size
        batch = AttentionBatch(
            positions=zeros(torch.int64, size),
            slots=zeros(torch.int64, size) - 1,
            query_starts=starts,
            context_lens=zeros(torch.int32, room + 1),
            block_tables=zeros(torch.int32, room + 1, blocks),
            block_size=block_size,
        )
        if room not in self._logits:
            self._logits[room] = zeros(torch.float32, room, self._spec.vocab)
        logits = self._logits[room]

        def run() -> tuple[Tensor]:
            return (logits.copy_(self._compute(token_ids, batch, kv, rows)[0]),)

        # of 40 sizes only some have kernels that are not compiled yet
        replay, _ = self._graphs.record(run, warm_ups=1)
        return CapturedMix(token_ids, batch, rows, replay, logits)
