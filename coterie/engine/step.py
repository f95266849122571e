"""What the scheduler decides for one step, and what comes back: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from coterie.engine.sequence import Sequence


class StepRow(NamedTuple):
    """Tokens [start, start + num_tokens) of `sequence` are computed."""

    sequence: Sequence
    start: int
    num_tokens: int
    # "prefill" or "decode"
    phase: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    adapter_key: str
    rows: Seq[StepRow]
    # (source, target) blocks copied before anything is computed
    copies: Seq[tuple[int, int]]
    # who draws a token, in this order, and from which row: a leader's followers draw with it
    draws: Seq[Sequence]
    draw_rows: Seq[int]
    num_tokens: int
    num_prefill_tokens: int


class TokenScore(NamedTuple):
    """log softmax of the raw logits at the token, its alternatives most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class BeamScores(NamedTuple):
    """The best continuations of one beam, best first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    # one token per draw
    tokens: Seq[int]
    # by index into the draws, where asked for
    scores: Mapping[int, TokenScore] = field(default_factory=dict)
    beams: Mapping[int, BeamScores] = field(default_factory=dict)
    # by (sequence row index in the plan, position of the prompt token)
    prompt_scores: Mapping[tuple[int, int], TokenScore] = field(default_factory=dict)
    run_s: float = 0.0
    sample_s: float = 0.0
