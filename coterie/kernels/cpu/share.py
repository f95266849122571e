"""The CPU's share of the experts of a step that runs on a device: the memory that both see, the
thread that answers, and the plain twin of what it computes.

The device writes a job and then its number to `rung`; the native thread computes the job on a crew
of its own and writes the answer, each value with the job's number beside it, and then the number to
`answered`. Python takes no part in that.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.kernels.cpu import abi
from coterie.kernels.cpu.build import NativeLibrary
from coterie.kernels.device_record import DeviceRecord, dense_matrices
from coterie.weights.kinds import GROUP

_KINDS = {name: abi.KINDS[name] for name in ("fp32", "bf16", "int8", "int4")}
# bytes: words that different sides write are a line of memory apart
_LINE = 64
_RUNG, _ANSWERED, _FAILED, _JOB, _SUMS, _HINT, _PAIRS = (_LINE * n for n in range(7))
# of a pair: expert, row, channels, and the bits of its weight
PAIR_WORDS = 4
# of the device's sums, int64: jobs, ns until the device had done its own part, ns that it then
# waited, channels of missing experts that it read over the link
SUM_WORDS = 4
# of a hint: layer, its turn, the number of experts, and these
HINT_WORDS = _LINE // 4
HINT_HEAD = 3
# spaces for the answers of jobs with at most so many rows, a power of two: a job has that of its
# number, so that a thread that lost its core in the middle of one does not hold up the next ones
JOB_SPACES, SPACE_ROWS = 32, 8


@dataclass(frozen=True, slots=True)
class ShareBell:
    """Views of memory that the host and the device see."""

    memory: Tensor
    max_rows: int
    max_pairs: int
    hidden: int

    @staticmethod
    def nbytes(max_rows: int, max_pairs: int, hidden: int) -> int:
        rows = max_rows + 2 * _answer_rows(max_rows)
        return _PAIRS + 4 * PAIR_WORDS * max_pairs + 4 * rows * hidden

    def _view(self, at: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        return self.memory[at : at + nbytes].view(dtype)

    @property
    def rung(self) -> Tensor:
        """int32 [1]: the number of the last job."""
        return self._view(_RUNG, 4, torch.int32)

    @property
    def answered(self) -> Tensor:
        """int32 [1]: the number of the last job that is done."""
        return self._view(_ANSWERED, 4, torch.int32)

    @property
    def failed(self) -> Tensor:
        """int32 [1]: the number of the last job for which the device waited in vain."""
        return self._view(_FAILED, 4, torch.int32)

    @property
    def job(self) -> Tensor:
        """int32 [3]: layer (a row of the layers given), rows, pairs."""
        return self._view(_JOB, 12, torch.int32)

    @property
    def sums(self) -> Tensor:
        """int64 [SUM_WORDS], see there."""
        return self._view(_SUMS, 8 * SUM_WORDS, torch.int64)

    @property
    def hint(self) -> Tensor:
        """int32 [HINT_WORDS]: experts of which a job may come, those that the CPU would take first
        in front. The CPU reads them into its caches when it has nothing else to do. With another
        turn it is another hint."""
        return self._view(_HINT, 4 * HINT_WORDS, torch.int32)

    @property
    def pairs(self) -> Tensor:
        """int32 [pairs, PAIR_WORDS]."""
        nbytes = 4 * PAIR_WORDS * self.max_pairs
        return self._view(_PAIRS, nbytes, torch.int32).view(-1, PAIR_WORDS)

    @property
    def x(self) -> Tensor:
        """fp32 [rows, hidden]: the experts' input."""
        return self._rows(0, self.max_rows, torch.float32).view(-1, self.hidden)

    @property
    def answer(self) -> Tensor:
        """int32 [rows of all spaces, hidden, 2]: the bits of `out`, and the number of the job for
        which they were written."""
        words = self._rows(self.max_rows, 2 * _answer_rows(self.max_rows), torch.int32)
        return words.view(-1, self.hidden, 2)

    @property
    def space_rows(self) -> int:
        return min(SPACE_ROWS, self.max_rows)

    def answer_of(self, number: int, rows: int) -> Tensor:
        """int32 [rows, hidden, 2]: the part of `answer` that this job has."""
        first = number % JOB_SPACES * self.space_rows if rows <= self.space_rows else 0
        return self.answer[first : first + rows]

    def out(self, number: int, rows: int) -> Tensor:
        """fp32 [rows, hidden]: the weighted sum over the pairs of each row of a job."""
        return self.answer_of(number, rows).view(torch.float32)[:, :, 0]

    def _rows(self, before: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many rows of words, behind as many others."""
        at = _PAIRS + 4 * PAIR_WORDS * self.max_pairs + 4 * before * self.hidden
        return self._view(at, 4 * count * self.hidden, dtype)


def _answer_rows(max_rows: int) -> int:
    return max(max_rows, JOB_SPACES * min(SPACE_ROWS, max_rows))


def next_number(number: int) -> int:
    """Of the job behind this one: int32, and never 0, which words have that were never written."""
    return (number + 1 + 2**31) % 2**32 - 2**31 or 1


@dataclass(frozen=True, slots=True)
class ShareRecords:
    """The records of a layer in the device's layout, in RAM, by expert (None: it has no such)."""

    records: Sequence[Tensor | None]
    record: DeviceRecord


@dataclass(frozen=True, slots=True)
class ShareCounts:
    """What a coordinator has done so far."""

    jobs: int
    nbytes: int
    busy_ns: int
    naps: int
    # jobs that were overwritten while the thread did not run
    refused: int
    # experts of jobs that a hint had named
    hinted: int
    # parts of jobs that were computed again because a thread was late
    repeated: int


class ShareCoordinator:
    """Answers the bell until it is closed."""

    def __init__(
        self,
        library: NativeLibrary,
        bell: ShareBell,
        layers: Sequence[ShareRecords],
        threads: int,
    ) -> None:
        # they must live as long as the thread
        self._bell, self._layers, self._native = bell, list(layers), library.call
        self._native_layers = (abi.ShareLayer * len(layers))(*map(_layer, layers))
        parts = bell.rung, bell.answered, bell.job, bell.pairs, bell.x, bell.answer, bell.hint
        setup = abi.ShareSetup(
            self._native_layers, len(layers), bell.max_rows, bell.max_pairs, threads,
            JOB_SPACES, bell.space_rows, bell.max_pairs // bell.max_rows * bell.space_rows,
            *(part.data_ptr() for part in parts),
        )  # fmt: skip
        self._handle: int | None = self._native.ct_share_open(ctypes.byref(setup))
        if self._handle is None:
            raise MemoryError("the system refused memory for the threads of experts on the CPU")
        # the thread must end before the memory that it reads, also when nobody closes this
        self._end = weakref.finalize(self, self._native.ct_share_close, self._handle)

    def wake(self) -> None:
        """A step begins that may ring: do not let it wait for a thread that sleeps."""
        if self._handle is not None:
            self._native.ct_share_wake(self._handle)

    def pause(self, paused: bool) -> None:
        """Do not answer for now: for tests of what then happens."""
        if self._handle is not None:
            self._native.ct_share_pause(self._handle, int(paused))

    def counts(self) -> ShareCounts:
        found: NDArray[np.int64] = np.zeros(7, dtype=np.int64)
        if self._handle is not None:
            self._native.ct_share_read(self._handle, found.ctypes.data)
        return ShareCounts(*found.tolist())

    def close(self) -> None:
        self._handle = None
        self._end()


def _layer(layer: ShareRecords) -> abi.ShareLayer:
    record = layer.record
    assert all(each is None or each.device.type == "cpu" for each in layer.records)
    places = [None if each is None else each.data_ptr() for each in layer.records]
    return abi.ShareLayer(
        (ctypes.c_void_p * len(places))(*places), record.down_at, record.gate_up_scales_at,
        record.down_scales_at, _KINDS[record.kind], len(places), record.hidden,
        record.intermediate,
    )  # fmt: skip


def share_torch(layer: ShareRecords, x: Tensor, pairs: Tensor) -> Tensor:
    """The plain twin of a job, in fp32: [rows, hidden] from x [rows, hidden] and pairs int32
    [pairs, PAIR_WORDS]."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    weights = pairs[:, 3].view(torch.float32).tolist()
    for (expert, row, taken, _), weight in zip(pairs.tolist(), weights, strict=True):
        own = layer.records[expert]
        assert own is not None and taken % GROUP == 0
        gate_up, down = dense_matrices(layer.record, own)
        gate, up = (part[:taken] @ x[row].float() for part in gate_up.chunk(2))
        out[row] += weight * (down[:, :taken] @ (torch.nn.functional.silu(gate) * up))
    return out
