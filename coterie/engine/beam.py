"""Beam search for one request: which beams continue, and which hypotheses are the best so far.

Gives the same result as transformers with `early_stopping=False`. Beams are ordinary sequences. A
beam with more than one continuation is forked, with copy-on-write KV blocks. The next beams are
chosen when all beams have reported. No text is sent before the end; after a crash the search starts
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.engine.scheduler import Scheduler
from coterie.engine.sequence import Sequence, SequenceStatus
from coterie.engine.step import BeamScores


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    score: float
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BeamContinuation:
    score: float
    parent: Sequence
    token: int


def num_continuations(num_beams: int, num_stop_ids: int) -> int:
    """How many of a beam's best tokens to keep: enough even if some are stop tokens."""
    return max(2, 1 + num_stop_ids) * num_beams


class BeamSearch:
    def __init__(
        self, first: Sequence, num_beams: int, length_penalty: float, stop_ids: frozenset[int]
    ) -> None:
        self.num_beams = num_beams
        self._length_penalty = length_penalty
        self._stop_ids = stop_ids
        self._kept = num_continuations(num_beams, len(stop_ids))
        # live beams with their sums of log probabilities, best first
        self._live: list[tuple[float, Sequence]] = [(0.0, first)]
        self._reports: dict[int, BeamScores] = {}
        self._num_made = 1
        # at most num_beams, best first
        self.done: list[BeamHypothesis] = []

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self._live]

    def best(self, choice: int) -> tuple[int, ...]:
        """The choice's best output so far; empty if there is none."""
        live = [tuple(s.tokens[s.num_prompt :]) for s in self.sequences]
        outputs = [one.output for one in self.done] + live
        return outputs[choice] if choice < len(outputs) else ()

    def report(self, sequence: Sequence, scores: BeamScores) -> bool:
        """Add the continuations of one beam. True if all beams have reported."""
        self._reports[id(sequence)] = scores
        return len(self._reports) == len(self._live)

    def advance(self, scheduler: Scheduler) -> bool:
        """Choose the next beams and update their sequences. False if the search is over."""
        best = self._best_continuations()
        length = self._live[0][1].num_output + 1
        full = self._live[0][1].num_prompt + length >= self._live[0][1].max_total
        ended = [full or continuation.token in self._stop_ids for continuation in best]
        for continuation, over in zip(best[: self.num_beams], ended, strict=False):
            if over:
                self._add_done(continuation, length)
        continuations = [
            continuation for continuation, over in zip(best, ended, strict=True) if not over
        ]
        self._reports.clear()
        if not continuations or not self._can_improve(continuations[0].score, length):
            return False
        self._continue_with(continuations[: self.num_beams], scheduler)
        return True

    def _best_continuations(self) -> list[BeamContinuation]:
        continuations = [
            BeamContinuation(score + logprob, sequence, token)
            for score, sequence in self._live
            for token, logprob in zip(*self._reports[id(sequence)], strict=True)
        ]
        return sorted(continuations, key=lambda continuation: -continuation.score)[: self._kept]

    def _add_done(self, continuation: BeamContinuation, length: int) -> None:
        output = (*continuation.parent.tokens[continuation.parent.num_prompt :], continuation.token)
        self.done.append(BeamHypothesis(continuation.score / length**self._length_penalty, output))
        self.done = sorted(self.done, key=lambda one: -one.score)[: self.num_beams]

    def _can_improve(self, best_score: float, length: int) -> bool:
        if len(self.done) < self.num_beams:
            return True
        possible: float = best_score / length**self._length_penalty
        return possible > self.done[-1].score

    def _continue_with(self, continuations: list[BeamContinuation], scheduler: Scheduler) -> None:
        """A parent's sequence takes its first continuation; the others fork it. Parents without
        continuations end."""
        taken: set[int] = set()
        live: list[tuple[float, Sequence]] = []
        for continuation in continuations:
            sequence = continuation.parent
            if id(sequence) in taken:
                sequence = self._fork(sequence, scheduler)
            taken.add(id(continuation.parent))
            live.append((continuation.score, sequence))
        # append tokens after all forks, because a fork copies its parent's tokens
        for continuation, (_, sequence) in zip(continuations, live, strict=True):
            sequence.tokens.append(continuation.token)
            if sequence.draw.penalties is not None:
                sequence.draw.penalties.produced(continuation.token)
        for sequence in self.sequences:
            if id(sequence) not in taken:
                scheduler.end(sequence)
        self._live = live

    def _fork(self, parent: Sequence, scheduler: Scheduler) -> Sequence:
        penalties = parent.draw.penalties
        child = replace(
            parent,
            tokens=list(parent.tokens),
            rank=(*parent.rank[:3], self._num_made),
            draw=replace(parent.draw, penalties=penalties and penalties.fork()),
            followers=[],
            blocks=[],
            chain=list(parent.chain),
            num_computed=0,
            num_preemptions=0,
            row=None,
        )
        self._num_made += 1
        if parent.status is SequenceStatus.RUNNING:
            scheduler.fork(parent, child)
        else:
            scheduler.add(child)
        return child
