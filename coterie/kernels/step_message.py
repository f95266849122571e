"""The inputs of a decode step as the host sends them to a device: one array of 32-bit words.

The device puts them where its kernels read them (`receive_step`), and after the draws makes those
of the next step by itself (`advance_step`), so that nothing has to be sent while the same sequences
go on in the same blocks. `kernels.triton.fill` has the kernels, `kernels.reference.step` their
plain twins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.kernels.batch import AttentionBatch
from coterie.kernels.draws import DrawParameters

# words before the rows: the number of rows and the width of the block tables
HEADER = 4
# words of a row: key, top_p and min_p have two
ROW_WORDS = 11


@dataclass(frozen=True, slots=True)
class DecodeFields:
    """Inputs of a decode step at fixed addresses, for so many rows as `token_ids` has."""

    token_ids: Tensor
    # the rows whose logits are needed: all of them, in order
    rows: Tensor
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class DrawFields:
    """What the draws of a step read at fixed addresses, and the tokens that they give."""

    parameters: DrawParameters
    # fp64 [R]: the noise of this draw; int64 [R]: the key of the row's noise, and its output tokens
    noise: Tensor
    keys: Tensor
    counts: Tensor
    # int64, at least [R]
    tokens: Tensor

    @staticmethod
    def empty(rows: int, room: int, device: torch.device) -> DrawFields:
        """For `rows` rows that take the greatest logit; `room` for so many tokens."""

        def zeros(dtype: torch.dtype, size: int = rows) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return DrawFields(
            DrawParameters.greedy(rows, device),
            zeros(torch.float64),
            zeros(torch.int64),
            zeros(torch.int64),
            zeros(torch.int64, max(room, rows)),
        )

    def first(self, rows: int) -> DrawFields:
        """Views for the first rows; all tokens."""
        old = self.parameters
        fields = (old.temperature, old.top_k, old.top_p, old.min_p)
        parameters = DrawParameters(*(one[:rows] for one in fields))
        noise, keys, counts = self.noise[:rows], self.keys[:rows], self.counts[:rows]
        return DrawFields(parameters, noise, keys, counts, self.tokens)


class MessageWords:
    """A message in the host's memory, for up to `rows` rows with up to `width` blocks each."""

    def __init__(self, rows: int, width: int, pinned: bool = False) -> None:
        words = message_words(rows, width)
        size, kind = words // 2, torch.int64
        self.tensor = torch.zeros(size, dtype=kind, device="cpu", pin_memory=pinned)
        longs = self.tensor.numpy()
        self._longs, self._ints = longs.view(np.uint64), longs.view(np.int32)
        self._floats, self._doubles = longs.view(np.float32), longs.view(np.float64)

    def write(
        self,
        room: int,
        tokens: NDArray[Any],
        positions: NDArray[Any],
        tables: NDArray[np.int32],
        draws: DrawColumns | None,
    ) -> int:
        """Write a step for a device that has `room` rows. `tokens`: the id of each row, or ~i: the
        token of draw i of the step before. Without `draws` rows take the greatest logit. Returns
        how many 64-bit words the message has."""
        live, width = tables.shape
        ints, first = self._ints, HEADER + 6 * room
        ints[0], ints[1], ints[2] = live, width, draws is not None
        ints[first : first + live] = tokens
        ints[first + room : first + room + live] = positions
        if draws is not None:
            longs = HEADER // 2
            self._longs[longs : longs + live] = draws.keys
            self._doubles[longs + room : longs + room + live] = draws.top_p
            self._doubles[longs + 2 * room : longs + 2 * room + live] = draws.min_p
            counts = positions - draws.num_prompt
            ints[first + 2 * room : first + 2 * room + live] = counts
            ints[first + 2 * room : first + 2 * room + live] += 1
            ints[first + 3 * room : first + 3 * room + live] = draws.top_k
            self._floats[first + 4 * room : first + 4 * room + live] = draws.temperature
        start = HEADER + ROW_WORDS * room
        ints[start : start + tables.size].reshape(tables.shape)[:] = tables
        return (start + tables.size + 1) // 2


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """The parameters of all draws of a step as `DrawParameters` has them."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    # of their noise
    keys: NDArray[np.uint64]
    # tokens of their prompts
    num_prompt: NDArray[np.int64]
    # "greedy", "plain" or "filtered": what the draws need at most
    need: str


def message_words(rows: int, width: int) -> int:
    """Words of a message for so many rows and blocks of each; even."""
    words = HEADER + rows * (ROW_WORDS + width)
    return words + words % 2
