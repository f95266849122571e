"""The plan of one step, made by the scheduler, and its result: frozen values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from coterie.core.moe import MoeUsage
from coterie.engine.sequence import Sequence

if TYPE_CHECKING:
    from coterie.engine.grammar import GrammarTask
    from coterie.kernels.patch import PatchStack


class StepRow(NamedTuple):
    """The step computes tokens [start, start + num_tokens) of `sequence`."""

    sequence: Sequence
    start: int
    num_tokens: int
    # "prefill" or "decode"
    phase: str


class DecodeRows(Seq[StepRow]):
    """Rows of a step in which each of these sequences decodes one token, as arrays."""

    __slots__ = ("limits", "runs_ahead", "sequences", "starts", "table_rows")

    def __init__(
        self,
        sequences: list[Sequence],
        starts: NDArray[np.int64],
        table_rows: NDArray[np.int64],
        limits: NDArray[np.int64],
        runs_ahead: bool = False,
    ) -> None:
        self.sequences, self.starts = sequences, starts
        # their rows in the block tables, and their numbers of tokens at which they end
        self.table_rows, self.limits = table_rows, limits
        # whether all are known to draw independently of the tokens drawn before
        self.runs_ahead = runs_ahead

    @staticmethod
    def of(sequences: list[Sequence], starts: list[int]) -> DecodeRows:
        return DecodeRows(
            sequences,
            np.array(starts, dtype=np.int64),
            np.array([sequence.row for sequence in sequences], dtype=np.int64),
            np.array([sequence.max_total for sequence in sequences], dtype=np.int64),
        )

    def advanced(self) -> DecodeRows:
        """The rows of the next step, if all of them continue."""
        return DecodeRows(
            self.sequences, self.starts + 1, self.table_rows, self.limits, self.runs_ahead
        )

    def pick(self, places: NDArray[np.int64]) -> DecodeRows:
        sequences = [self.sequences[place] for place in places.tolist()]
        arrays = (self.starts[places], self.table_rows[places], self.limits[places])
        return DecodeRows(sequences, *arrays, self.runs_ahead)

    def __len__(self) -> int:
        return len(self.sequences)

    @overload
    def __getitem__(self, index: int) -> StepRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRow]: ...
    def __getitem__(self, index: int | slice) -> StepRow | list[StepRow]:
        if isinstance(index, slice):
            return list(self)[index]
        return StepRow(self.sequences[index], int(self.starts[index]), 1, "decode")

    def __iter__(self) -> Iterator[StepRow]:
        for sequence, start in zip(self.sequences, self.starts.tolist(), strict=True):
            yield StepRow(sequence, start, 1, "decode")


class StepSegment(NamedTuple):
    """Rows first to last (exclusive) of a plan, which run with `stack`."""

    first: int
    last: int
    stack: PatchStack


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    # rows without adapters first, rows of the same stack together
    rows: Seq[StepRow]
    # (source, target) blocks to copy before the computation
    copies: Seq[tuple[int, int]]
    # the sequences that draw a token, in this order, and their rows: followers draw from the row of
    # their leader
    draws: Seq[Sequence]
    draw_rows: Seq[int]
    num_tokens: int
    num_prefill_tokens: int
    # in order; rows that are in no segment run without adapters
    segments: Seq[StepSegment] = ()
    # by row: the draw of the step before whose token it computes, made before that token is known;
    # None: all tokens are known
    sources: NDArray[np.int64] | None = None


class TokenScore(NamedTuple):
    """The log softmax of the raw logits at the token, and its alternatives, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    # 1 = no token was likelier; 0 = not computed
    rank: int = 0


class BeamScores(NamedTuple):
    """The best continuations of one beam, best first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class LateDraw(NamedTuple):
    """A draw whose grammar work did not end within its step. When `job` is done, `finish` returns
    the token, and its score if it was asked for."""

    job: GrammarTask
    finish: Callable[[], tuple[int, TokenScore | None]]


class StepUsage(NamedTuple):
    """The cost of a step's MoE experts: the total, and each row's share in the plan's order."""

    total: MoeUsage
    rows: Seq[MoeUsage]


def step_usage(plan: StepPlan, total: MoeUsage, rows: Seq[MoeUsage]) -> StepUsage:
    """Routing is one product for all rows: each row is charged in proportion to its tokens."""
    token_s = total.routing_s / plan.num_tokens
    shared = [
        replace(cost, routing_s=token_s * row.num_tokens)
        for row, cost in zip(plan.rows, rows, strict=True)
    ]
    return StepUsage(total, shared)


@dataclass(frozen=True, slots=True)
class StepResult:
    # one token per draw
    tokens: Seq[int]
    # by index into the draws, if asked for
    scores: Mapping[int, TokenScore] = field(default_factory=dict)
    beams: Mapping[int, BeamScores] = field(default_factory=dict)
    late: Mapping[int, LateDraw] = field(default_factory=dict)
    # by (index of the row in the plan, position of the prompt token)
    prompt_scores: Mapping[tuple[int, int], TokenScore] = field(default_factory=dict)
    run_s: float = 0.0
    sample_s: float = 0.0
    # from the first kernel of the step to its last, by the device's clock; None: the host computes
    device_s: float | None = None
    # None if the model has no routed experts
    dispatch: StepUsage | None = None
