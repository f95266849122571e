"""Draws among the few tokens that a grammar lets follow, instead of over the whole vocabulary.

Most tokens of a structured answer have one or some tens of candidates; these rows cost next to
nothing. Knows no grammar: a row of candidates and their logits is all it sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.engine.draw import Draw, noise_key, uniforms
from coterie.engine.filters import draw_filtered, make_filters

if TYPE_CHECKING:
    from coterie.engine.sequence import Sequence

# with more candidates the row is drawn with all others
MAX_CANDIDATES = 2048


def draw_among(ids: NDArray[np.int64], values: NDArray[np.float32], sequence: Sequence) -> int:
    """One of `ids` (ascending), whose logits are `values`, by the sequence's own noise."""
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


def _filtered(values: NDArray[np.float32], draw: Draw, noise: NDArray[np.float64]) -> int:
    row = torch.from_numpy(np.ascontiguousarray(values)).unsqueeze(0)
    filters = make_filters([draw], row.device)
    return int(draw_filtered(row, filters, torch.from_numpy(noise).unsqueeze(1))[0])
