"""Plain torch versions of the kernels that make the inputs of a decode step on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.kernels.step_message import HEADER, ROW_WORDS, DecodeFields, DrawFields

_STRIDE, _MIX, _MIX_AGAIN = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def receive_step(message: Tensor, step: DecodeFields, draws: DrawFields) -> None:
    """Put a message (int64 words of `MessageWords`) where kernels read it. Rows that it does not
    have become padding: slot -1, no context, the greatest logit."""
    room, fixed = len(step.token_ids), step.batch
    ints = message.view(torch.int32)
    live, width, drawn = ints[:3].tolist()
    first = HEADER + 6 * room

    def row_ints(field: int) -> Tensor:
        start = first + field * room
        return ints[start : start + live].long()

    tokens, positions = row_ints(0), row_ints(1)
    source = (~tokens).clamp(min=0)
    step.token_ids[:live] = torch.where(tokens < 0, draws.tokens[source], tokens)
    step.rows.copy_(torch.arange(room, device=step.rows.device))
    start = HEADER + ROW_WORDS * room
    tables = ints[start : start + live * width].view(live, width)
    fixed.block_tables[:live, :width] = tables
    fixed.positions[:live] = positions
    fixed.slots[:live] = _slots(tables, positions, fixed.block_size)
    fixed.context_lens[:live] = (positions + 1).int()
    fixed.slots[live:] = -1
    fixed.context_lens[live:] = 0
    wanted, longs = draws.parameters, HEADER // 2
    wanted.be_greedy()
    draws.keys[:room].zero_()
    draws.counts[:room].zero_()
    if drawn:
        doubles = message.view(torch.float64)
        wanted.temperature[:live] = message.view(torch.float32)[first + 4 * room :][:live]
        wanted.top_k[:live] = row_ints(3).int()
        wanted.top_p[:live] = doubles[longs + room : longs + room + live]
        wanted.min_p[:live] = doubles[longs + 2 * room : longs + 2 * room + live]
        draws.keys[:live] = message[longs : longs + live]
        draws.counts[:live] = row_ints(2)
    draws.noise[:room] = uniforms(draws.keys[:room], draws.counts[:room])


def advance_step(step: DecodeFields, draws: DrawFields) -> None:
    """The inputs of the next step, if every row continues with the token that it drew. A row whose
    next block is not in its table gets a wrong slot: then a message must come first."""
    fixed, room = step.batch, len(step.token_ids)
    live = fixed.context_lens > 0
    step.token_ids.copy_(draws.tokens[:room])
    fixed.positions.add_(live.long())
    fixed.context_lens.add_(live.int())
    slots = _slots(fixed.block_tables, fixed.positions, fixed.block_size)
    fixed.slots.copy_(torch.where(live, slots, -1))
    draws.counts[:room] += 1
    draws.noise[:room] = uniforms(draws.keys[:room], draws.counts[:room])


def _slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    column = (positions // block_size).clamp(max=tables.shape[1] - 1)
    blocks = tables.gather(1, column.unsqueeze(1)).squeeze(1).long()
    slots: Tensor = blocks * block_size + positions % block_size
    return slots


def uniforms(keys: Tensor, counts: Tensor) -> Tensor:
    """The noise of `engine.draw.uniforms`, whose keys have the same bits."""

    def shifted(value: Tensor, bits: int) -> Tensor:
        low: Tensor = (value >> bits) & (2 ** (64 - bits) - 1)
        return low

    state = keys + (counts + 1) * _STRIDE
    state = (state ^ shifted(state, 30)) * _MIX
    state = (state ^ shifted(state, 27)) * _MIX_AGAIN
    state = state ^ shifted(state, 31)
    noise: Tensor = shifted(state, 12).double() * 2.0**-52
    return noise
