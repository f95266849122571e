"""Logits to tokens for every draw of a step, with logprobs and beam continuations where asked.

Order: logit bias, early-end ban, penalties, temperature, top-k, top-p, min-p, typical. Logprobs are
the log softmax of the raw logits, before any of these. Rows never influence each other.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from coterie.engine.draw import Draw, uniform
from coterie.engine.filters import draw_filtered, draw_plain, make_filters
from coterie.engine.sequence import Sequence
from coterie.engine.step import BeamScores, StepResult, TokenScore


def sample(logits: Tensor, draws: Seq[Sequence], rows: Seq[int]) -> StepResult:
    """`rows` names, in order, the row each draw takes its token from; equal ones share logits.

    logits: fp32 [R, V], one for each different row; not changed.
    """
    if not draws:
        return StepResult([])
    if len(draws) != len(logits):
        logits = logits[_places(rows)]
    if all(sequence.draw.is_plain for sequence in draws):
        return StepResult(argmax(logits))
    beams = {i: s for i, s in enumerate(draws) if s.draw.num_continuations}
    edited = _edit(logits, draws)
    tokens = argmax(edited)
    drawn = [i for i, s in enumerate(draws) if not s.draw.is_greedy and i not in beams]
    if drawn:
        for index, token in zip(drawn, _draw(edited, draws, drawn), strict=True):
            tokens[index] = token
    return StepResult(
        tokens,
        scores=_score_draws(logits, draws, tokens),
        beams={i: _continue_beam(logits[i], s) for i, s in beams.items()},
    )


def _places(rows: Seq[int]) -> list[int]:
    numbered = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    return [numbered[row] for row in rows]


def argmax(logits: Tensor) -> list[int]:
    """[R, V] to R ids, the lowest among equals. numpy's is ten times torch's on a CPU."""
    if logits.device.type == "cpu":
        found: list[int] = logits.detach().numpy().argmax(axis=1).tolist()
        return found
    return [int(token) for token in logits.argmax(dim=1).tolist()]


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


def _edit(logits: Tensor, draws: Seq[Sequence]) -> Tensor:
    """A copy with bias, bans and penalties, or the same tensor when there are none."""
    edited = None
    for index, sequence in enumerate(draws):
        draw, num_output = sequence.draw, sequence.num_output
        if draw.num_continuations or not draw.edits(num_output):
            continue
        if edited is None:
            edited = logits.clone()
        edited[index] = _edit_row(edited[index], draw, num_output)
    return logits if edited is None else edited


def _edit_row(row: Tensor, draw: Draw, num_output: int) -> Tensor:
    values = row.detach().cpu().numpy()
    draw.edit(values, num_output)
    return torch.from_numpy(values).to(row.device)


def _draw(logits: Tensor, draws: Seq[Sequence], indices: list[int]) -> list[int]:
    """Tokens of the rows in `indices`, all with a temperature."""
    tokens: dict[int, int] = {}
    for draw_rows, filtered in ((draw_filtered, True), (draw_plain, False)):
        chosen = [i for i in indices if draws[i].draw.has_filters is filtered]
        if not chosen:
            continue
        params = [draws[i].draw for i in chosen]
        noise = [
            uniform(draw.seed, draw.choice, draws[i].num_output)
            for i, draw in zip(chosen, params, strict=True)
        ]
        found = draw_rows(
            logits if len(chosen) == len(logits) else logits[chosen],
            make_filters(params, logits.device),
            torch.tensor(noise, dtype=torch.float64, device=logits.device).unsqueeze(1),
        )
        tokens.update(zip(chosen, found.tolist(), strict=True))
    return [tokens[i] for i in indices]


def _score_draws(logits: Tensor, draws: Seq[Sequence], tokens: list[int]) -> dict[int, TokenScore]:
    wanted = [i for i, s in enumerate(draws) if s.draw.logprobs is not None]
    if not wanted:
        return {}
    asked = [draws[i].draw.logprobs or 0 for i in wanted]
    scores = score(logits[wanted], [tokens[i] for i in wanted], max(asked))
    return {
        i: TokenScore(found.logprob, found.top[:num])
        for i, num, found in zip(wanted, asked, scores, strict=True)
    }


def _continue_beam(row: Tensor, sequence: Sequence) -> BeamScores:
    """The best continuations of one beam; processors work on log probabilities here."""
    logprobs = torch.log_softmax(row, dim=0)
    draw, num_output = sequence.draw, sequence.num_output
    if draw.edits(num_output):
        logprobs = _edit_row(logprobs, draw, num_output)
    best = logprobs.topk(min(draw.num_continuations, len(logprobs)))
    return BeamScores(tuple(best.indices.tolist()), tuple(best.values.tolist()))
