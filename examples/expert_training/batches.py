"""Examples as token ids, in batches of similar length. Knows the chat template, no model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core.request import Chat, Message
from coterie.models.text.tokenizer import Tokenizer
from examples.expert_data.base import Example

# rows of this many batches are sorted by length together
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class Encoded:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # with the end token

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [rows, length], right padded
    # flat positions in [rows * length] whose next token is trained, and that token
    at: Tensor
    target: Tensor


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_prompt(Chat((Message("user", prompt),))))


def encode(tokenizer: Tokenizer, examples: Sequence[Example]) -> list[Encoded]:
    end = tokenizer.eos_ids[0]
    return [
        Encoded(
            encode_prompt(tokenizer, item.prompt),
            (*tokenizer.encode(item.answer, special=False), end),
        )
        for item in examples
    ]


def padded(rows: Sequence[Sequence[int]], device: str) -> Tensor:
    length = max(map(len, rows))
    table = [[*row, *([0] * (length - len(row)))] for row in rows]
    return torch.tensor(table, device=device)


def make_batch(rows: Sequence[Encoded], device: str) -> Batch:
    ids = padded([row.prompt + row.answer for row in rows], device)
    at = [
        index * ids.shape[1] + len(row.prompt) - 1 + step
        for index, row in enumerate(rows)
        for step in range(len(row.answer))
    ]
    target = [token for row in rows for token in row.answer]
    return Batch(ids, torch.tensor(at, device=device), torch.tensor(target, device=device))


def batches(rows: Sequence[Encoded], size: int, device: str, seed: int) -> Iterator[Batch]:
    """Endless: every epoch in another order; rows of a batch have similar lengths."""
    draw = random.Random(seed)
    while True:
        order = list(rows)
        draw.shuffle(order)
        for start in range(0, len(order), size * _WINDOW):
            window = sorted(order[start : start + size * _WINDOW], key=len)
            groups = [window[at : at + size] for at in range(0, len(window), size)]
            draw.shuffle(groups)
            for group in groups:
                yield make_batch(group, device)
