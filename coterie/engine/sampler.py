"""Draws tokens from logits for all draws of a step, with logprobs and beam continuations if needed.

Order: logit bias, penalties, bans (early end, bad words), allowed ids, grammar, temperature, top-k,
top-p, min-p, typical.
Logprobs are the log softmax of the raw logits, before all of these. Rows never influence each
other.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engine.draw import DrawState, noise_key, uniforms
from coterie.engine.grammar import GrammarTask, GrammarWork, allowed_tokens
from coterie.engine.sequence import Sequence
from coterie.engine.step import BeamScores, LateDraw, TokenScore


class SampleResult(NamedTuple):
    """One token per draw; scores and continuations by draw, if needed. The tokens of draws in
    `late` are not final yet."""

    tokens: list[int]
    scores: dict[int, TokenScore]
    beams: dict[int, BeamScores]
    late: dict[int, LateDraw] = {}  # noqa: RUF012


class FilterGroup(NamedTuple):
    """Draws with a temperature, either all with filters or all without. Each row of the tensors
    belongs to an entry of `indices`."""

    indices: list[int]
    filtered: bool
    filters: SampleFilters
    keys: NDArray[np.uint64]

    def without(self, drawn: Container[int]) -> FilterGroup:
        places = [place for place, index in enumerate(self.indices) if index not in drawn]
        if len(places) == len(self.indices):
            return self
        indices = [self.indices[place] for place in places]
        return FilterGroup(indices, self.filtered, self.filters.pick(places), self.keys[places])


class SampleBatch:
    """The draws of a step, grouped by what they need. A batch that stays the same is grouped only
    once, not at every step."""

    def __init__(self, draws: Seq[Sequence], device: torch.device) -> None:
        self.draws = list(draws)
        params = [sequence.draw for sequence in draws]
        self.is_plain = all(draw.is_plain for draw in params)
        self.beams = [i for i, draw in enumerate(params) if draw.num_continuations]
        self.edited = [i for i, draw in enumerate(params) if draw.may_edit and i not in self.beams]
        constrained_draws = [
            (i, draw.constraint) for i, draw in enumerate(params) if draw.constraint is not None
        ]
        self.constrained = [i for i, _ in constrained_draws]
        self.constraints = [constraint for _, constraint in constrained_draws]
        self.scored = [i for i, draw in enumerate(params) if draw.logprobs is not None]
        self.groups = []
        for filtered in (True, False):
            chosen = [
                i
                for i, draw in enumerate(params)
                if not draw.is_greedy and draw.has_filters is filtered and i not in self.beams
            ]
            if chosen:
                some = [params[i] for i in chosen]
                keys = np.array([noise_key(d.seed, d.choice) for d in some], dtype=np.uint64)
                self.groups.append(FilterGroup(chosen, filtered, make_filters(some, device), keys))
        self.num_drawn = sum(len(group.indices) for group in self.groups)


class Sampler:
    """Its only state is the grouping of the last batch."""

    def __init__(self, work: GrammarWork | None = None) -> None:
        self._batch: SampleBatch | None = None
        self._work = work or GrammarWork()

    def sample(self, logits: Tensor, draws: Seq[Sequence], rows: Seq[int]) -> SampleResult:
        """`rows`: for each draw, the row that it draws from; draws with equal rows share logits.

        logits: fp32 [R, V], one for each different row. The logits of constrained rows are changed.
        """
        if not draws:
            return SampleResult([], {}, {})
        if len(draws) != len(logits):
            logits = logits[_places(rows)]
        batch = self._batch
        # sequences compare by identity
        if batch is None or batch.draws != draws:
            batch = self._batch = SampleBatch(draws, logits.device)
        if batch.is_plain:
            return SampleResult(argmax(logits), {}, {})
        edited = _edit(logits, batch)
        drawn: dict[int, int] = {}
        if batch.constrained:
            # logprobs need the unchanged logits
            raw = edited is logits and bool(batch.scored)
            edited, drawn = self._constrain(edited.clone() if raw else edited, batch)
        tokens = [0] * len(draws) if batch.num_drawn == len(draws) else argmax(edited)
        for whole in batch.groups:
            group = whole.without(drawn)
            for index, token in zip(group.indices, _draw(edited, batch, group), strict=True):
                tokens[index] = token
        for index, token in drawn.items():
            tokens[index] = token
        late = self._settle(logits, batch, tokens) if batch.constrained else {}
        return SampleResult(
            tokens,
            _score_draws(logits, batch, tokens),
            {i: _continue_beam(logits[i], draws[i]) for i in batch.beams},
            late,
        )

    def _settle(self, logits: Tensor, batch: SampleBatch, tokens: list[int]) -> dict[int, LateDraw]:
        """Give each grammar its token; a grammar may replace the token. Returns the draws whose
        grammar is slow or has failed."""
        jobs = [
            GrammarTask(constraint.tenant, partial(constraint.take, tokens[index]))
            for index, constraint in zip(batch.constrained, batch.constraints, strict=True)
        ]
        self._work.do(jobs)
        late = {}
        for index, job in zip(batch.constrained, jobs, strict=True):
            if job.done and job.error is None:
                tokens[index] = job.result()
            else:
                num_top = batch.draws[index].draw.logprobs
                row = None if num_top is None else logits[index : index + 1].clone()
                late[index] = LateDraw(job, partial(_late_token, job, row, num_top or 0))
        return late

    def _constrain(self, logits: Tensor, batch: SampleBatch) -> tuple[Tensor, dict[int, int]]:
        """Mask the tokens that a grammar forbids. Returns the logits, and the tokens of rows that
        are already drawn. Changes the logits of constrained rows."""
        drawers = [batch.draws[i] for i in batch.constrained]
        banned = [one.draw.banned_behind(one.tokens, one.num_prompt) for one in drawers]
        allowed = allowed_tokens(batch.constraints, banned, logits.shape[1])
        if logits.device.type != "cpu":
            return mask_rows(logits, batch.constrained, allowed), {}
        values, drawn = logits.detach().numpy(), {}
        for i, row, count in zip(batch.constrained, allowed, allowed.sum(axis=1), strict=True):
            if count <= MAX_CANDIDATES:
                ids = np.flatnonzero(row)
                drawn[i] = draw_among(ids, values[i, ids], batch.draws[i])
            else:
                values[i, np.flatnonzero(~row)] = -np.inf
        return logits, drawn


def _late_token(
    job: GrammarTask, row: Tensor | None, num_top: int
) -> tuple[int, TokenScore | None]:
    token = job.result()
    return token, None if row is None else score(row, [token], num_top)[0]


def mask_rows(logits: Tensor, rows: list[int], allowed: NDArray[np.bool_]) -> Tensor:
    """Set the logits of tokens that are not in `allowed` [len(rows), V] to minus infinity, in
    place, on any device.

    The plain twin of drawing among the few allowed tokens.
    """
    refused = torch.from_numpy(~allowed).to(logits.device, non_blocking=True)
    logits[rows] = logits[rows].masked_fill_(refused, -torch.inf)
    return logits


def _places(rows: Seq[int]) -> list[int]:
    numbered = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    return [numbered[row] for row in rows]


def argmax(logits: Tensor) -> list[int]:
    """[R, V] to R ids; the lowest id among equal logits. On a CPU numpy is ten times faster."""
    if logits.device.type == "cpu":
        ids: list[int] = logits.detach().numpy().argmax(axis=1).tolist()
        return ids
    return [int(token) for token in logits.argmax(dim=1).tolist()]


def ranked(logits: Tensor, tokens: Seq[int], num_top: int) -> list[TokenScore]:
    """The same as `score`, with the number of likelier tokens."""
    picked = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = (logits > picked).sum(dim=1).add(1).tolist()
    scores = score(logits, tokens, num_top)
    return [one._replace(rank=rank) for one, rank in zip(scores, ranks, strict=True)]


def score(logits: Tensor, tokens: Seq[int], num_top: int) -> list[TokenScore]:
    """Log softmax of [R, V] at each row's token, with its `num_top` best alternatives."""
    logprobs = torch.log_softmax(logits, dim=1)
    picked = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    own = picked.squeeze(1).tolist()
    if not num_top:
        return [TokenScore(value, ()) for value in own]
    best = logprobs.topk(min(num_top, logits.shape[1]), dim=1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return [TokenScore(value, top) for value, top in zip(own, tops, strict=True)]


def _edit(logits: Tensor, batch: SampleBatch) -> Tensor:
    """A copy with bias, bans and penalties, or the same tensor if there are none."""
    rows = [i for i in batch.edited if _edits(batch.draws[i])]
    if not rows:
        return logits
    edited = logits.clone()
    for i in rows:
        edited[i] = _edit_row(edited[i], batch.draws[i])
    return edited


def _edits(sequence: Sequence) -> bool:
    return sequence.draw.edits(sequence.tokens, sequence.num_prompt)


def _draw(logits: Tensor, batch: SampleBatch, group: FilterGroup) -> list[int]:
    draws, chosen = batch.draws, group.indices
    if not chosen:
        return []
    noise = uniforms(group.keys, [len(draws[i].tokens) - draws[i].num_prompt for i in chosen])
    ids: list[int] = (draw_filtered if group.filtered else draw_plain)(
        logits if len(chosen) == len(logits) else logits[chosen],
        group.filters,
        torch.from_numpy(noise).to(logits.device).unsqueeze(1),
    ).tolist()
    return ids


def _edit_row(row: Tensor, sequence: Sequence) -> Tensor:
    values = row.detach().cpu().numpy()
    sequence.draw.edit(values, sequence.tokens, sequence.num_prompt)
    return torch.from_numpy(values).to(row.device)


def _score_draws(logits: Tensor, batch: SampleBatch, tokens: list[int]) -> dict[int, TokenScore]:
    if not batch.scored:
        return {}
    num_tops = [batch.draws[i].draw.logprobs or 0 for i in batch.scored]
    scores = score(logits[batch.scored], [tokens[i] for i in batch.scored], max(num_tops))
    return {
        i: TokenScore(token_score.logprob, token_score.top[:num])
        for i, num, token_score in zip(batch.scored, num_tops, scores, strict=True)
    }


def _continue_beam(row: Tensor, sequence: Sequence) -> BeamScores:
    """The best continuations of one beam. Here processors work on log probabilities."""
    logprobs = torch.log_softmax(row, dim=0)
    if _edits(sequence):
        logprobs = _edit_row(logprobs, sequence)
    best = logprobs.topk(min(sequence.draw.num_continuations, len(logprobs)))
    return BeamScores(tuple(best.indices.tolist()), tuple(best.values.tolist()))


# a row with more candidates is drawn together with the other rows
MAX_CANDIDATES = 2048


def draw_among(ids: NDArray[np.int64], values: NDArray[np.float32], sequence: Sequence) -> int:
    """Draw one of `ids` (ascending), whose logits are `values`, with the sequence's noise."""
    draw = sequence.draw
    if len(ids) == 1:
        return int(ids[0])
    if draw.is_greedy:
        return int(ids[values.argmax()])
    keys = np.array([noise_key(draw.seed, draw.choice)], dtype=np.uint64)
    noise = uniforms(keys, [sequence.num_output])
    if draw.has_filters:
        return int(ids[_filtered(values, draw, noise)])
    scaled = values.astype(np.float64) / draw.temperature
    sums = np.exp(scaled - scaled.max()).cumsum()
    place = int(np.searchsorted(sums, noise[0] * sums[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _filtered(values: NDArray[np.float32], draw: DrawState, noise: NDArray[np.float64]) -> int:
    row = torch.from_numpy(np.ascontiguousarray(values)).unsqueeze(0)
    filters = make_filters([draw], row.device)
    return int(draw_filtered(row, filters, torch.from_numpy(noise).unsqueeze(1))[0])


# Nearly always the kept tokens are among the first 256. Rows where they are not try 4096, and at
# last are sorted completely.
NUM_CANDIDATES = (256, 4096)


class SampleFilters(NamedTuple):
    """Filter parameters of R rows, each [R, 1]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor

    def pick(self, rows: Tensor | list[int]) -> SampleFilters:
        return SampleFilters(*(values[rows] for values in self))


def make_filters(draws: Seq[DrawState], device: torch.device) -> SampleFilters:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    return SampleFilters(
        column([draw.temperature for draw in draws], torch.float32),
        column([draw.top_k for draw in draws], torch.int64),
        column([draw.top_p for draw in draws], torch.float64),
        column([draw.min_p for draw in draws], torch.float64),
        column([draw.typical_p for draw in draws], torch.float64),
    )


def draw_plain(logits: Tensor, filters: SampleFilters, noise: Tensor) -> Tensor:
    """[R, V] and uniforms [R, 1] to token ids [R]: draws from the whole distribution, in token-id
    order."""
    weights = torch.softmax(logits / filters.temperature, dim=-1).double()
    return _invert(weights, noise).squeeze(1)


def draw_filtered(logits: Tensor, filters: SampleFilters, noise: Tensor) -> Tensor:
    """[R, V] and uniforms [R, 1] to token ids [R]."""
    logits = logits / filters.temperature
    vocab = logits.shape[1]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rest = torch.arange(len(logits), device=logits.device)
    for num_candidates in (*(n for n in NUM_CANDIDATES if n < vocab), vocab):
        # the first try uses all rows: no need to gather them
        some = logits if len(rest) == len(logits) else logits[rest]
        drawn, done = _draw_among(some, filters.pick(rest), noise[rest], num_candidates)
        tokens[rest] = drawn
        rest = rest[~done]
        if len(rest) == 0:
            break
    return tokens


def _draw_among(
    logits: Tensor, filters: SampleFilters, noise: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Tokens [R], and for which rows the candidates were enough to know the filtered set [R]."""
    values, ids = _best(logits, num_candidates)
    kept, threshold = _rank_filters(logits, values, ids, filters)
    lowest = torch.where(kept, values, torch.inf).amin(dim=1, keepdim=True)
    # there may be tokens with an equal logit after the last candidate, so the cut must be above it.
    # The same holds for top-k's cut, so that the mass of its set is known.
    lowest = torch.where(filters.top_k > 0, torch.minimum(lowest, threshold), lowest)
    # if the last candidate is masked by a grammar, all tokens that can be drawn are known
    known = (lowest > values[:, -1:]) | (values[:, -1:] == -torch.inf)
    done = known.squeeze(1) | (num_candidates == logits.shape[1])
    weights = (values - values[:, :1]).double().exp() * kept
    if bool((filters.typical_p < 1).any()):
        weights = weights * _typical(weights, filters.typical_p)
    ids, order = ids.sort(dim=1)
    place = _invert(weights.gather(1, order), noise)
    return ids.gather(1, place).squeeze(1), done


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest logits, by value and then id, both descending: [R, C] values and ids."""
    if count == logits.shape[1]:
        values, order = logits.flip(1).sort(dim=1, descending=True, stable=True)
        return values, count - 1 - order
    values, ids = logits.topk(count, dim=1, sorted=False)
    ids, order = ids.sort(dim=1, descending=True)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _rank_filters(
    logits: Tensor, values: Tensor, ids: Tensor, filters: SampleFilters
) -> tuple[Tensor, Tensor]:
    """Kept candidates [R, C] after top-k, top-p and min-p, and top-k's lowest value [R, 1].

    `values` descend.
    """
    _, top_k, top_p, min_p, _ = filters
    limited = top_k > 0
    last = torch.where(limited, top_k, values.shape[1]).clamp(max=values.shape[1]) - 1
    threshold = values.gather(1, last)
    kept = values >= threshold
    relative = (values - values[:, :1]).double().exp() * kept
    if bool((top_p < 1).any()):
        sums = relative.cumsum(dim=1)
        mass = sums[:, -1:]
        if not bool(limited.all()):
            # without top-k the mass is the sum over the whole vocabulary
            whole = torch.log_softmax(logits, dim=1).gather(1, ids[:, :1]).double().neg().exp()
            mass = torch.where(limited, mass, whole)
        # a token is kept if the tokens above it have less mass than top_p
        above = (sums - relative) / mass
        kept = kept & ((above < top_p) | (top_p >= 1))
        kept[:, 0] = True
    return kept & (relative >= min_p), threshold


def _typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Of the tokens with weight, keep those nearest to the expected information, up to the mass."""
    share = weights / weights.cumsum(dim=1)[:, -1:]
    information = -share.log()
    entropy = (share * information).nan_to_num(nan=0.0).cumsum(dim=1)[:, -1:]
    distance = (information - entropy).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    sums = share.gather(1, order).cumsum(dim=1)
    last = (sums < typical_p).sum(dim=1, keepdim=True).clamp(max=share.shape[1] - 1)
    return (distance <= ordered.gather(1, last)) | (typical_p >= 1)


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """Positions [R, 1] where the cumulative weights [R, N] first exceed noise times their total."""
    sums = weights.cumsum(dim=1)
    place = torch.searchsorted(sums, noise * sums[:, -1:], right=True)
    return place.clamp(max=weights.shape[1] - 1)
