"""What the scheduler decides for one step, and what comes back: frozen values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from coterie.core.moe import MoeUsage
from coterie.engine.sequence import Sequence

if TYPE_CHECKING:
    from coterie.engine.grammar import GrammarTask
    from coterie.kernels.patch import PatchStack


class StepRow(NamedTuple):
    """Tokens [start, start + num_tokens) of `sequence` are computed."""

    sequence: Sequence
    start: int
    num_tokens: int
    # "prefill" or "decode"
    phase: str


class StepSegment(NamedTuple):
    """Rows first .. last (exclusive) of a plan run with `stack`."""

    first: int
    last: int
    stack: PatchStack


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    # those with adapters behind those without, equal stacks together
    rows: Seq[StepRow]
    # (source, target) blocks copied before anything is computed
    copies: Seq[tuple[int, int]]
    # who draws a token, in this order, and from which row: a leader's followers draw with it
    draws: Seq[Sequence]
    draw_rows: Seq[int]
    num_tokens: int
    num_prefill_tokens: int
    # in order; rows in none run the model as it is
    shares: Seq[StepSegment] = ()


class TokenScore(NamedTuple):
    """log softmax of the raw logits at the token, its alternatives most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    # 1 = nothing was likelier; 0 = not looked for
    rank: int = 0


class BeamScores(NamedTuple):
    """The best continuations of one beam, best first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class LateDraw(NamedTuple):
    """A draw whose grammar was not worked out within its step. Once `job` is done, `finish` says
    the token, and its score where that was asked for."""

    job: GrammarTask
    finish: Callable[[], tuple[int, TokenScore | None]]


class StepUsage(NamedTuple):
    """What the experts of a step cost: all of it, and each row's share in the plan's order."""

    total: MoeUsage
    rows: Seq[MoeUsage]


def step_usage(plan: StepPlan, total: MoeUsage, rows: Seq[MoeUsage]) -> StepUsage:
    """Routing is one product for all rows: each bears its tokens' share of it."""
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
    # by index into the draws, where asked for
    scores: Mapping[int, TokenScore] = field(default_factory=dict)
    beams: Mapping[int, BeamScores] = field(default_factory=dict)
    late: Mapping[int, LateDraw] = field(default_factory=dict)
    # by (sequence row index in the plan, position of the prompt token)
    prompt_scores: Mapping[tuple[int, int], TokenScore] = field(default_factory=dict)
    run_s: float = 0.0
    sample_s: float = 0.0
    # None where the model has no routed experts
    dispatch: StepUsage | None = None
