"""Runs a model under stacks of adapters without an engine: rows, segments, logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.adapters.compose import compose
from coterie.adapters.files import open_adapter
from coterie.kernels import patch
from coterie.kernels.batch import AttentionBatch
from coterie.models.base import CausalLM
from tests.helpers.adapters.peft_adapters import Stack
from tests.helpers.models.paged_model import Paged


class Adapted:
    """A model whose rows run under given segments."""

    def __init__(self, model: CausalLM, segments: tuple[patch.Segment, ...]) -> None:
        self._model, self._segments = model, segments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: Tensor, batch: AttentionBatch, kv: Any, rows: Tensor) -> Tensor:
        return self._model.forward(ids, replace(batch, patches=self._segments), kv, rows)


def composed(model: CausalLM, stack: Stack, slot: int = 0) -> patch.PatchStack:
    parts = [(open_adapter(path, path.name), weight) for path, weight in stack]
    made = compose(parts, model.targets)
    return patch.PatchStack(str(stack), slot, made.patches, made.soft)


def virtual(model: CausalLM, stack: patch.PatchStack) -> list[int]:
    count = 0 if stack.soft is None else len(stack.soft)
    return [model.spec.vocab + place for place in range(count)]


def our_logits(model: CausalLM, ids: Sequence[int], stack: Stack, chunk: int = 0) -> Tensor:
    """At the positions of `ids`, all at once or `chunk` tokens at a time."""
    run = _Run(model, composed(model, stack), len(ids))
    tokens = [*run.virtual, *ids]
    size = chunk or len(tokens)
    found = [run(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    return torch.cat(found)[-len(ids) :]


def our_greedy(model: CausalLM, ids: Sequence[int], stack: Stack, count: int) -> list[int]:
    run = _Run(model, composed(model, stack), len(ids) + count)
    answer = [int(run([*run.virtual, *ids])[-1].argmax())]
    while len(answer) < count:
        answer.append(int(run(answer[-1:])[-1].argmax()))
    return answer


class _Run:
    """One sequence under one stack: tokens in, their logits out."""

    def __init__(self, model: CausalLM, stack: patch.PatchStack, length: int) -> None:
        self.virtual = virtual(model, stack)
        self._model, self._stack = model, stack
        self._paged = Paged(model, 1, len(self.virtual) + length)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        segments = (patch.Segment(0, len(tokens), self._stack),)
        self._paged.model = Adapted(self._model, segments)  # type: ignore[assignment]
        return self._paged.step([(0, tokens)])[0]
