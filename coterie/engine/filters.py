"""Temperature-scaled logits to tokens: top-k, top-p, min-p and typical, then an inverse CDF.

Filters follow each other as in transformers, each on what the former left. Every operation works
row by row (softmax, sort, cumulative sum), so a row's token never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.engine.draw import Draw

# Nearly always the kept tokens are among the first so many; rows where they are not try the next,
# and at last are sorted whole.
NUM_CANDIDATES = (256, 4096)


class Filters(NamedTuple):
    """Parameters of R rows, each [R, 1]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor

    def pick(self, rows: Tensor | list[int]) -> Filters:
        return Filters(*(values[rows] for values in self))


def make_filters(draws: Sequence[Draw], device: torch.device) -> Filters:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    return Filters(
        column([draw.temperature for draw in draws], torch.float32),
        column([draw.top_k for draw in draws], torch.int64),
        column([draw.top_p for draw in draws], torch.float64),
        column([draw.min_p for draw in draws], torch.float64),
        column([draw.typical_p for draw in draws], torch.float64),
    )


def draw_plain(logits: Tensor, filters: Filters, noise: Tensor) -> Tensor:
    """[R, V] and uniforms [R, 1] to token ids [R]: the whole distribution, in token-id order."""
    weights = torch.softmax(logits / filters.temperature, dim=-1).double()
    return _invert(weights, noise).squeeze(1)


def draw_filtered(logits: Tensor, filters: Filters, noise: Tensor) -> Tensor:
    """[R, V] and uniforms [R, 1] to token ids [R]."""
    logits = logits / filters.temperature
    vocab = logits.shape[1]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rest = torch.arange(len(logits), device=logits.device)
    for num_candidates in (*(n for n in NUM_CANDIDATES if n < vocab), vocab):
        # the first try is over all rows: no need to gather them
        some = logits if len(rest) == len(logits) else logits[rest]
        found, done = _draw_among(some, filters.pick(rest), noise[rest], num_candidates)
        tokens[rest] = found
        rest = rest[~done]
        if len(rest) == 0:
            break
    return tokens


def _draw_among(
    logits: Tensor, filters: Filters, noise: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Tokens [R], and where the candidates were enough to know the filtered set [R]."""
    values, ids = _best(logits, num_candidates)
    kept, threshold = _rank_filters(logits, values, ids, filters)
    lowest = torch.where(kept, values, torch.inf).amin(dim=1, keepdim=True)
    # equal tokens may lie beyond the last candidate, so the cut must be above it; top-k's own cut
    # too, for the mass of its set to be known
    lowest = torch.where(filters.top_k > 0, torch.minimum(lowest, threshold), lowest)
    # what a grammar has masked cannot be drawn: before it, all that can is known
    known = (lowest > values[:, -1:]) | (values[:, -1:] == -torch.inf)
    done = known.squeeze(1) | (num_candidates == logits.shape[1])
    weights = (values - values[:, :1]).double().exp() * kept
    if bool((filters.typical_p < 1).any()):
        weights = weights * _typical(weights, filters.typical_p)
    ids, order = ids.sort(dim=1)
    place = _invert(weights.gather(1, order), noise)
    return ids.gather(1, place).squeeze(1), done


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest, by value and then id, both descending: [R, C] values and ids."""
    if count == logits.shape[1]:
        values, order = logits.flip(1).sort(dim=1, descending=True, stable=True)
        return values, count - 1 - order
    values, ids = logits.topk(count, dim=1, sorted=False)
    ids, order = ids.sort(dim=1, descending=True)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _rank_filters(
    logits: Tensor, values: Tensor, ids: Tensor, filters: Filters
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
            # without top-k the mass is that of the whole vocabulary
            whole = torch.log_softmax(logits, dim=1).gather(1, ids[:, :1]).double().neg().exp()
            mass = torch.where(limited, mass, whole)
        # a token stays while those ranked above it hold less than top_p
        above = (sums - relative) / mass
        kept = kept & ((above < top_p) | (top_p >= 1))
        kept[:, 0] = True
    return kept & (relative >= min_p), threshold


def _typical(weights: Tensor, typical_p: Tensor) -> Tensor:
    """Of the tokens with weight, those nearest to the expected information, up to the mass."""
    share = weights / weights.cumsum(dim=1)[:, -1:]
    information = -share.log()
    entropy = (share * information).nan_to_num(nan=0.0).cumsum(dim=1)[:, -1:]
    distance = (information - entropy).abs()
    ordered, order = distance.sort(dim=1, stable=True)
    sums = share.gather(1, order).cumsum(dim=1)
    last = (sums < typical_p).sum(dim=1, keepdim=True).clamp(max=share.shape[1] - 1)
    return (distance <= ordered.gather(1, last)) | (typical_p >= 1)


def _invert(weights: Tensor, noise: Tensor) -> Tensor:
    """Places [R, 1] where the cumulated weights [R, N] first pass noise times their total."""
    sums = weights.cumsum(dim=1)
    place = torch.searchsorted(sums, noise * sums[:, -1:], right=True)
    return place.clamp(max=weights.shape[1] - 1)
