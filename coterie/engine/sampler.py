"""Draws tokens from logits for all draws of a step, with logprobs and beam continuations if needed.

Order: logit bias, penalties, bans (early end, bad words), allowed ids, grammar, temperature, top-k,
top-p, min-p, typical.
Logprobs are the log softmax of the raw logits, before all of these. Rows never influence each
other.

`Sampler.sample` draws and returns the tokens. On a GPU, draws that need nothing from the host are
enqueued by `launch` and read by `read_draws`, so that the host need not wait in between.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engine.draw import DrawState, noise_key, uniforms
from coterie.engine.edits import edit_arrays
from coterie.engine.grammar import GrammarTask, GrammarWork, allowed_tokens
from coterie.engine.sequence import Sequence
from coterie.engine.step import BeamScores, LateDraw, TokenScore
from coterie.kernels.draws import DrawParameters, LogitEdits
from coterie.kernels.step_message import DrawColumns


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
        self.num_top = max((params[i].logprobs or 0 for i in self.scored), default=0)
        # drawn with noise
        self.noisy = [
            i for i, draw in enumerate(params) if not draw.is_greedy and not draw.num_continuations
        ]
        self._params, self._device = params, device

    @cached_property
    def groups(self) -> list[FilterGroup]:
        groups = []
        for filtered in (True, False):
            chosen = [i for i in self.noisy if self._params[i].has_filters is filtered]
            if chosen:
                some = [self._params[i] for i in chosen]
                filters = make_filters(some, self._device)
                groups.append(FilterGroup(chosen, filtered, filters, _keys(some)))
        return groups

    @cached_property
    def columns(self) -> DrawColumns:
        return draw_columns(self.draws)

    @cached_property
    def is_host_drawn(self) -> bool:
        """A grammar may replace a token, and its logprob with it."""
        scored = bool(self.constrained) and bool(self.scored)
        return scored or any(draw.is_host_drawn for draw in self._params)

    def num_output(self, chosen: Seq[int], ahead: int) -> list[int]:
        """The output tokens before each draw; `ahead` of them are not known yet."""
        draws = self.draws
        return [len(draws[i].tokens) - draws[i].num_prompt + ahead for i in chosen]


def draw_columns(draws: Seq[Sequence]) -> DrawColumns:
    params = [one.draw for one in draws]
    cuts = any(draw.top_k > 0 or draw.top_p < 1 for draw in params if not draw.is_greedy)
    greedy = all(draw.is_greedy for draw in params)
    return DrawColumns(
        np.array([draw.temperature for draw in params], dtype=np.float32),
        np.array([min(draw.top_k, _MAX_TOP_K) for draw in params], dtype=np.int32),
        np.array([draw.top_p for draw in params], dtype=np.float64),
        np.array([draw.min_p for draw in params], dtype=np.float64),
        _keys(params),
        np.array([one.num_prompt for one in draws], dtype=np.int64),
        "greedy" if greedy else "filtered" if cuts else "plain",
    )


# more than any vocabulary has
_MAX_TOP_K = 2**31 - 1


def _keys(draws: Seq[DrawState]) -> NDArray[np.uint64]:
    return np.array([noise_key(draw.seed, draw.choice) for draw in draws], dtype=np.uint64)


class ModelOutput(NamedTuple):
    """Where a model's logits are, and how many each row has."""

    device: torch.device
    vocab: int


class DeviceDraws(Protocol):
    """Draws on a device. Nothing here may wait for the device."""

    def draw(
        self,
        logits: Tensor,
        parameters: DrawParameters,
        noise: Tensor,
        need: str,
        out: Tensor | None = None,
    ) -> Tensor:
        """Token ids int64 [R] of logits fp32 [R, V] with noise fp64 [R], also in `out`. `need`:
        what all rows need at most: "greedy", "plain" (no top-k and top-p) or "filtered"."""

    def edit(self, logits: Tensor, edits: LogitEdits, unknown: Tensor | None, copy: bool) -> Tensor:
        """Logits with the edits, after `unknown` [R], the last token of each output, is counted.
        With `copy` the given logits stay as they are."""

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
        """See `score_tensors`."""


class LaunchedDraws(NamedTuple):
    """Draws that the device makes. `copies` are in pinned memory and valid when it has made them:
    tokens, and for the scored draws their logprobs, the ids and the logprobs of alternatives."""

    batch: SampleBatch
    # int64 [draws], on the device
    tokens: Tensor
    copies: list[Tensor]


class Sampler:
    """Its only state is the grouping of the last batch."""

    def __init__(self, work: GrammarWork | None = None, device: DeviceDraws | None = None) -> None:
        """`device` draws with noise and edits; without it the host takes part in such draws."""
        self._batch: SampleBatch | None = None
        self._work = work or GrammarWork()
        self._device = device
        # of the kernel that takes the greatest logits; as many rows as were needed so far
        self._greedy: DrawParameters | None = None

    def grouped(self, draws: Seq[Sequence], device: torch.device) -> SampleBatch:
        """The draws of a step; the same object as long as they are the same."""
        batch = self._batch
        # sequences compare by identity
        if batch is None or batch.draws != draws:
            batch = self._batch = SampleBatch(draws, device)
        return batch

    def inputs(
        self, draws: Seq[Sequence], rows: Seq[int], model: ModelOutput, ahead: int
    ) -> list[NDArray[Any]] | None:
        """The arrays that `launch` needs on the device; None if the host has to take part in these
        draws. `ahead`: output tokens of each sequence that are not known yet."""
        batch = self.grouped(draws, model.device)
        if batch.is_plain and len(set(rows)) == len(draws):
            return []
        special = batch.noisy or batch.edited or batch.constrained
        if batch.is_host_drawn or (self._device is None and special):
            return None
        columns = batch.columns
        noise = uniforms(columns.keys, batch.num_output(range(len(draws)), ahead))
        shared = _places(rows) if len(set(rows)) < len(draws) else ()
        places = [np.array(place, dtype=np.int64) for place in (shared, batch.scored)]
        edits = None
        if batch.edited or batch.constrained:
            grammars = dict(zip(batch.constrained, self._allowed(batch, model.vocab), strict=True))
            edits = edit_arrays(draws, ahead, model.vocab, grammars=grammars)
        filters = (columns.temperature, columns.top_k, columns.top_p, columns.min_p)
        return [*places, noise, *filters, *(edits or ())]

    def launch(
        self,
        logits: Tensor,
        draws: Seq[Sequence],
        inputs: Seq[Tensor],
        unknown: Tensor | None = None,
    ) -> LaunchedDraws:
        """Enqueue the draws. `inputs` has the arrays of the method above, on the device; `unknown`
        the last token of each sequence, if the host does not know it."""
        batch = self.grouped(draws, logits.device)
        if not inputs:
            tokens = self._best(logits)
            return LaunchedDraws(batch, tokens, [tokens.to("cpu", non_blocking=True)])
        places, scored, noise = inputs[:3]
        if len(draws) != len(logits):
            logits = logits[places]
        edited = logits
        if len(inputs) > 7:
            assert self._device is not None
            edits = LogitEdits(*inputs[7:])
            # logprobs need the unchanged logits
            edited = self._device.edit(logits, edits, unknown, bool(batch.scored))
        if batch.noisy:
            assert self._device is not None
            parameters = DrawParameters(*inputs[3:7])
            tokens = self._device.draw(edited, parameters, noise, batch.columns.need)
        else:
            tokens = self._best(edited)
        made = [tokens]
        if batch.scored:
            raw = logits if len(batch.scored) == len(draws) else logits[scored]
            own = tokens if len(batch.scored) == len(draws) else tokens[scored]
            score_of = score_tensors if self._device is None else self._device.score
            made += score_of(raw, own, batch.num_top)
        return LaunchedDraws(batch, tokens, [one.to("cpu", non_blocking=True) for one in made])

    def _best(self, logits: Tensor) -> Tensor:
        """The ids of the greatest logits, on the device."""
        if self._device is None:
            return logits.argmax(dim=1)
        rows = len(logits)
        if self._greedy is None or len(self._greedy.temperature) < rows:
            self._greedy = DrawParameters.greedy(rows, logits.device)
        return self._device.draw(logits, self._greedy, self._greedy.top_p, "greedy")

    def sample(
        self, logits: Tensor, draws: Seq[Sequence], rows: Seq[int], ahead: int = 0
    ) -> SampleResult:
        """`rows`: for each draw, the row that it draws from; draws with equal rows share logits.
        `ahead`: output tokens of each sequence that are not known yet.

        logits: fp32 [R, V], one for each different row. The logits of constrained rows are changed.
        """
        if not draws:
            return SampleResult([], {}, {})
        if len(draws) != len(logits):
            logits = logits[_places(rows)]
        batch = self.grouped(draws, logits.device)
        if batch.is_plain:
            return SampleResult(argmax(logits), {}, {})
        edited = _edit(logits, batch)
        drawn: dict[int, int] = {}
        if batch.constrained:
            # logprobs need the unchanged logits
            raw = edited is logits and bool(batch.scored)
            edited, drawn = self._constrain(edited.clone() if raw else edited, batch)
        tokens = [0] * len(draws) if len(batch.noisy) == len(draws) else argmax(edited)
        for whole in batch.groups:
            group = whole.without(drawn)
            found = _draw(edited, batch, group, ahead)
            for index, token in zip(group.indices, found, strict=True):
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

    def read(self, launched: LaunchedDraws) -> SampleResult:
        """The result of launched draws. The caller has waited until the device made them."""
        found = read_draws(launched)
        if not launched.batch.constrained:
            return found
        return found._replace(late=self._settle(None, launched.batch, found.tokens))

    def _settle(
        self, logits: Tensor | None, batch: SampleBatch, tokens: list[int]
    ) -> dict[int, LateDraw]:
        """Give each grammar its token; a grammar may replace the token. Returns the draws whose
        grammar is slow or has failed. Without `logits` none of them has logprobs."""
        jobs = [
            GrammarTask(constraint.time, partial(constraint.take, tokens[index]))
            for index, constraint in zip(batch.constrained, batch.constraints, strict=True)
        ]
        self._work.do(jobs)
        late = {}
        for index, job in zip(batch.constrained, jobs, strict=True):
            if job.done and job.error is None:
                tokens[index] = job.result()
            else:
                num_top = batch.draws[index].draw.logprobs
                row = None
                if num_top is not None and logits is not None:
                    row = logits[index : index + 1].clone()
                late[index] = LateDraw(job, partial(_late_token, job, row, num_top or 0))
        return late

    def _allowed(self, batch: SampleBatch, vocab: int) -> NDArray[np.bool_]:
        """The tokens [constrained, V] that may be drawn."""
        if not batch.constrained:
            return np.zeros((0, vocab), dtype=np.bool_)
        drawers = [batch.draws[i] for i in batch.constrained]
        banned = [one.draw.banned_behind(one.tokens, one.num_prompt) for one in drawers]
        return allowed_tokens(batch.constraints, banned, vocab)

    def _constrain(self, logits: Tensor, batch: SampleBatch) -> tuple[Tensor, dict[int, int]]:
        """Mask the tokens that a grammar forbids. Returns the logits, and the tokens of rows that
        are already drawn. Changes the logits of constrained rows."""
        allowed = self._allowed(batch, logits.shape[1])
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
    chosen = torch.tensor(tokens, device=logits.device)
    return _read_scores(score_tensors(logits, chosen, num_top))


def score_tensors(logits: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
    """The logprobs of the tokens [R]; if there are alternatives their ids and logprobs [R, N]."""
    logprobs = torch.log_softmax(logits, dim=1)
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if not num_top:
        return [own]
    best = logprobs.topk(min(num_top, logits.shape[1]), dim=1)
    return [own, best.indices, best.values]


def _read_scores(made: Seq[Tensor]) -> list[TokenScore]:
    own = made[0].tolist()
    if len(made) == 1:
        return [TokenScore(value, ()) for value in own]
    pairs = zip(made[1].tolist(), made[2].tolist(), strict=True)
    tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return [TokenScore(value, top) for value, top in zip(own, tops, strict=True)]


def read_draws(launched: LaunchedDraws) -> SampleResult:
    """The result of launched draws. The caller has waited until the device made them."""
    tokens, *scores = launched.copies
    batch = launched.batch
    if scores and len(scores[0]) != len(batch.scored):
        scores = [one[batch.scored] for one in scores]
    scores = scores[:1] + [one[:, : batch.num_top] for one in scores[1:] if batch.num_top]
    found = _by_draw(batch, _read_scores(scores)) if scores else {}
    return SampleResult(tokens.tolist(), found, {})


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


def _draw(logits: Tensor, batch: SampleBatch, group: FilterGroup, ahead: int) -> list[int]:
    chosen = group.indices
    if not chosen:
        return []
    noise = uniforms(group.keys, batch.num_output(chosen, ahead))
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
    scores = score(logits[batch.scored], [tokens[i] for i in batch.scored], batch.num_top)
    return _by_draw(batch, scores)


def _by_draw(batch: SampleBatch, scores: Seq[TokenScore]) -> dict[int, TokenScore]:
    found = {}
    for i, one in zip(batch.scored, scores, strict=True):
        count = batch.draws[i].draw.logprobs or 0
        found[i] = one if len(one.top) == count else TokenScore(one.logprob, one.top[:count])
    return found


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
