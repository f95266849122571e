"""Steps of prompts and decoding rows of a model with experts, captured in pieces: what lies between
two layers' attention.

Such a step has about 20 kernels a layer, and to launch them one by one takes longer than to run
them. Attention depends on lengths that the host knows, and is launched as ever. The rest depends
only on the number of rows: one small graph for each layer and padded number of rows, captured when
such a number comes for the second time. Rows behind the live ones are computed and not used. All
steps share one set of buffers, since they never run together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from coterie.models.build.graph_memory import MixedSize, sizes_up_to, step_bytes

if TYPE_CHECKING:
    from coterie.kernels.batch import AttentionBatch
    from coterie.models.build.cuda_graph import DecodeGraphs, StepOutput
    from coterie.models.spec import ModelSpec
    from coterie.moe.runtime.device_pool import DevicePool

# rows of captured steps; those of a part of a prompt (2,048) beside up to 128 or 256 decoding rows.
# The device takes longer for larger steps than the host does.
ROWS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 2176, 2304)


def piece_sizes(spec: ModelSpec, longest: int) -> list[MixedSize]:
    """The padded sizes that steps of up to `longest` rows are captured in, largest first; none of
    models without experts."""
    if spec.moe is None:
        return []
    sizes = reversed(sizes_up_to(ROWS, longest))
    return [MixedSize(size, 0, spec.num_layers + 1) for size in sizes]


@dataclass(frozen=True, slots=True)
class PieceBuffers:
    """What one piece of a step leaves for the next, at fixed addresses."""

    # the residual [T, D]; what a layer's attention reads, and what it returns
    hidden: Tensor
    qkv: Tensor
    mixed: Tensor
    # behind the last norm [T, D]
    normed: Tensor
    # the gates' choices: int32 [layers, T, K]
    routed: Tensor

    def first(self, rows: int) -> PieceBuffers:
        parts = (self.hidden, self.qkv, self.mixed, self.normed)
        hidden, qkv, mixed, normed = (part[:rows] for part in parts)
        return PieceBuffers(hidden, qkv, mixed, normed, self.routed[:, :rows])


# (layer, rows of qkv, its cache) -> rows of mixed
Attend = Callable[[int, Tensor, Tensor], Tensor]


class PieceRunner(Protocol):
    """A decoder that can run a step in pieces: one before each layer's attention, and one behind
    the last."""

    def new_buffers(self, rows: int) -> PieceBuffers: ...

    def run_piece(self, index: int, buffers: PieceBuffers, pool: DevicePool) -> None: ...

    def takes(self, batch: AttentionBatch, pool: DevicePool | None) -> bool: ...

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def attend(self, hidden: Tensor, batch: AttentionBatch) -> Attend: ...

    def logits(self, normed: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class CapturedPieces:
    buffers: PieceBuffers
    replays: Sequence[Callable[[], None]]


class PieceGraphs:
    def __init__(
        self, decoder: PieceRunner, graphs: DecodeGraphs, spec: ModelSpec, dtype: str
    ) -> None:
        """Graphs are recorded by `graphs`, whose memory they share."""
        self._decoder, self._graphs = decoder, graphs
        self._spec, self._dtype = spec, dtype
        # for the most rows
        self._buffers: PieceBuffers | None = None
        # by number of rows; None: seen once
        self._captured: dict[int, CapturedPieces | None] = {}

    def prepare(self, longest: int, pool: DevicePool) -> None:
        """Capture the sizes of steps of up to `longest` rows."""
        for size in piece_sizes(self._spec, longest):
            self._find(size.rows, pool)

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Tensor],
        rows: Tensor,
        pool: DevicePool,
    ) -> StepOutput | None:
        """The output, with choices that are valid until the next captured step; None when it must
        run eagerly."""
        count, decoder = len(token_ids), self._decoder
        size = next((size for size in ROWS if size >= count), None)
        if size is None or batch.patches or not decoder.takes(batch, pool):
            return None
        if size not in self._captured:
            self._captured[size] = None
            return None
        captured = self._find(size, pool)
        if captured is None:
            return None
        own = captured.buffers
        own.hidden[:count].copy_(decoder.embed(token_ids))
        # rows that are not used have values that nothing overflows with
        own.hidden[count:].zero_()
        own.mixed[count:].zero_()
        attend = decoder.attend(own.hidden[:count], batch)
        *before, last = captured.replays
        for layer, replay in enumerate(before):
            replay()
            own.mixed[:count].copy_(attend(layer, own.qkv[:count], kv[layer]))
        last()
        return decoder.logits(own.normed[rows]), own.routed

    def _find(self, size: int, pool: DevicePool) -> CapturedPieces | None:
        """Captured now, if there is room and it was not before."""
        if self._captured.get(size) is None:
            memory = self._graphs.memory
            if not memory.spares(step_bytes(self._spec, self._dtype, size)):
                return None
            with memory.measured(graphs=self._spec.num_layers + 1, small=True):
                self._captured[size] = self._capture(size, pool)
        return self._captured.get(size)

    def _capture(self, size: int, pool: DevicePool) -> CapturedPieces:
        if self._buffers is None:
            self._buffers = self._decoder.new_buffers(ROWS[-1])
        buffers = self._buffers.first(size)

        run, count = self._decoder.run_piece, self._spec.num_layers + 1
        pieces = [partial(run, index, buffers, pool) for index in range(count)]
        return CapturedPieces(buffers, self._graphs.record_all(pieces))
