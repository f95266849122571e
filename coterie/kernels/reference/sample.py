"""Plain torch versions of the kernels that draw tokens on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.kernels.draws import DrawParameters, LogitEdits

# a lower temperature means the greatest logit, as in engine.draw
MIN_TEMPERATURE = 1e-5


def sample_rows(logits: Tensor, parameters: DrawParameters, noise: Tensor) -> Tensor:
    """Token ids [R] of logits fp32 [R, V] with noise fp64 [R]."""
    rows = range(len(logits))
    return torch.stack([_sample_row(logits[r], parameters, r, noise[r]) for r in rows])


def _sample_row(row: Tensor, parameters: DrawParameters, r: int, noise: Tensor) -> Tensor:
    if parameters.temperature[r] < MIN_TEMPERATURE:
        return (row == row.max()).nonzero()[0, 0]
    scaled = row / parameters.temperature[r]
    weights = (scaled - scaled.max()).double().exp()
    kept = kept_tokens(scaled, weights, int(parameters.top_k[r]), float(parameters.top_p[r]))
    kept &= weights >= parameters.min_p[r]
    sums = (weights * kept).cumsum(0)
    place = torch.searchsorted(sums, noise * sums[-1], right=True)
    return place.clamp(max=len(row) - 1)


def kept_tokens(scaled: Tensor, weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Which tokens of a row [V] top-k and then top-p keep. Ties at top-k's cut are all kept, ties
    at top-p's cut from the highest id on."""
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if top_k > 0:
        kept = scaled >= scaled.sort(descending=True).values[min(top_k, len(scaled)) - 1]
    if top_p < 1:
        # by value and then id, both descending
        order = len(scaled) - 1 - scaled.flip(0).argsort(descending=True, stable=True)
        masses = (weights * kept)[order]
        sums = masses.cumsum(0)
        enough = sums - masses >= top_p * sums[-1]
        enough[0] = False
        kept[order[enough]] = False
    return kept


def edit_rows(logits: Tensor, edits: LogitEdits) -> Tensor:
    """A copy of logits fp32 [R, V] with bias, penalties, bans and masks."""
    edited = logits.clone()
    token = torch.arange(logits.shape[1], device=logits.device)
    for r, row in enumerate(edited):
        used = slice(0, int(edits.lengths[r]))
        ids, counts = edits.ids[r, used].long(), edits.counts[r, used]
        values = row[ids] + edits.bias[r, used]
        scale = edits.repetition[r]
        scaled = torch.where(values < 0, values * scale, values / scale)
        values = torch.where(counts >= 0, scaled, values)
        times = counts.clamp(min=0)
        taken = (edits.frequency[r] * times.float()).double() + edits.presence[r] * (times > 0)
        row[ids] = (values.double() - taken).float()
        if edits.masked[r]:
            allowed = (edits.mask[r][token // 32] >> (token % 32)) & 1
            row[allowed == 0] = -torch.inf
    return edited


def note_tokens(tokens: Tensor, edits: LogitEdits) -> None:
    """Count one more output token of each row that has penalties."""
    for r, token in enumerate(tokens.tolist()):
        neutral = edits.repetition[r] == 1 and edits.frequency[r] == 0 and edits.presence[r] == 0
        if neutral:
            continue
        length = int(edits.lengths[r])
        known = (edits.ids[r, :length] == token).nonzero().flatten().tolist()
        if known:
            edits.counts[r, known[0]] = max(int(edits.counts[r, known[0]]), 0) + 1
        elif length < edits.ids.shape[1]:
            edits.ids[r, length], edits.bias[r, length], edits.counts[r, length] = token, 0, 1
            edits.lengths[r] += 1


def score_rows(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log softmax of [R, V] at each row's token [R]; the ids and values of the `num_top` best
    [R, N], the lower id first among equals."""
    logprobs = torch.log_softmax(logits.double(), dim=1).float()
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    return own, ids, logprobs.gather(1, ids)
