"""What bias, penalties, bans and allowed ids change in the logits of a step, as arrays for a device
(`kernels.draws.LogitEdits`). `DrawState.edit` does the same to one row on the host."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.engine.draw import DrawState
from coterie.engine.sequence import Sequence

# lengths of the lists: kernels are compiled for each of them
WIDTHS = tuple(4**power for power in range(3, 12))

# ids, bias and counts of one row
_Entries = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]
_NONE: _Entries = (np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))


def edit_arrays(
    draws: Seq[Sequence],
    ahead: int,
    vocab: int,
    spare: int = 0,
    grammars: Mapping[int, NDArray[np.bool_]] | None = None,
) -> list[NDArray[Any]] | None:
    """The fields of `LogitEdits` in order, one row per draw; None if nothing is changed. The lists
    have room for `spare` more tokens. `grammars`: by draw with a constraint, the tokens [V] that it
    allows (without the bans, which it applies itself).

    The last `ahead` tokens of each output are not known yet: the device adds them to the counts.
    """
    banned = [
        one.draw.banned_behind(one.tokens, one.num_prompt, ahead)
        if one.draw.may_edit and one.draw.constraint is None
        else ()
        for one in draws
    ]
    kept = [_kept(one.draw, some) for one, some in zip(draws, banned, strict=True)]
    rows = [
        _entries(one.draw, () if mask is not None else some) if one.draw.may_edit else _NONE
        for one, some, mask in zip(draws, banned, kept, strict=True)
    ]
    longest = max(len(ids) for ids, _, _ in rows)
    if not (longest or grammars) and all(mask is None for mask in kept):
        return None
    # a token in flight may be a new entry
    width = next(width for width in WIDTHS if width >= longest + ahead + spare)
    ids = np.zeros((len(rows), width), dtype=np.int32)
    bias = np.zeros((len(rows), width), dtype=np.float32)
    counts = np.zeros((len(rows), width), dtype=np.int32)
    for row, (some, added, times) in enumerate(rows):
        ids[row, : len(some)], bias[row, : len(some)], counts[row, : len(some)] = some, added, times
    penalties = [one.draw.penalties for one in draws]
    mask, masked = _masks(kept, grammars or {}, vocab)
    return [
        ids,
        bias,
        counts,
        np.array([len(some) for some, _, _ in rows], dtype=np.int32),
        np.array([1.0 if p is None else p.repetition for p in penalties], dtype=np.float32),
        np.array([0.0 if p is None else p.frequency for p in penalties], dtype=np.float32),
        np.array([0.0 if p is None else p.presence for p in penalties], dtype=np.float64),
        mask,
        masked,
    ]


def num_unchanged(draws: Seq[Sequence], ahead: int) -> int:
    """For how many draws after the next one the same ids are banned, if nothing but the number of
    output tokens decides."""
    early = [one.draw.min_output - one.num_output - ahead for one in draws]
    return min((left for left in early if left > 0), default=2**31) - 1


def _kept(draw: DrawState, banned: Seq[int]) -> NDArray[np.int64] | None:
    """The only ids that may be drawn; None if all may. Bans hold unless they leave nothing."""
    allowed = draw.allowed
    if allowed is None or not banned:
        return allowed
    kept = allowed[~np.isin(allowed, banned)]
    return kept if len(kept) else allowed


def _entries(draw: DrawState, banned: Seq[int]) -> _Entries:
    """Every id once: those that penalties count, then those with a bias or a ban only."""
    if draw.penalties is None:
        places: dict[int, int] = {}
        ids, _, counts = _NONE
    else:
        places, ids, counts = draw.penalties.entries
    added: dict[int, float] = {}
    if draw.bias_ids is not None and draw.bias is not None:
        added = dict(zip(draw.bias_ids.tolist(), draw.bias.tolist(), strict=True))
    for token in banned:
        added[token] = -np.inf
    bias = np.zeros(len(ids), dtype=np.float32)
    if not added:
        return ids, bias, counts
    for token in [token for token in added if token in places]:
        bias[places[token]] = added.pop(token)
    return (
        np.concatenate([ids, np.array(list(added), dtype=np.int64)]),
        np.concatenate([bias, np.array(list(added.values()), dtype=np.float32)]),
        # neither in the prompt nor in the output
        np.concatenate([counts, np.full(len(added), -1, dtype=np.float32)]),
    )


def _masks(
    kept: Seq[NDArray[np.int64] | None], grammars: Mapping[int, NDArray[np.bool_]], vocab: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Bits of the tokens that are kept, [R, words], and which rows have some, [R]."""
    masked = np.array([ids is not None for ids in kept], dtype=np.int32)
    masked[list(grammars)] = 1
    words = -(-vocab // 32) if masked.any() else 1
    packed = np.zeros((len(kept), words * 4), dtype=np.uint8)
    for row in np.flatnonzero(masked).tolist():
        bits = grammars.get(row)
        if bits is None:
            bits = np.zeros(vocab, dtype=np.bool_)
            bits[kept[row]] = True
        some = np.packbits(bits, bitorder="little")
        packed[row, : len(some)] = some
    return packed.view(np.dtype("<i4")).astype(np.int32), masked
