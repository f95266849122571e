"""A real model whose experts live where a case says, driven without an engine; faults on demand.

Prompts go in chunks (or whole, where a strategy walks layer groups), then tokens one by one.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import WeightsError
from coterie.core.moe import MoeSettings
from coterie.kernels.batch import AttentionBatch
from coterie.models.base import load_model
from coterie.models.build.moe import MoeRequirements, store_of
from coterie.moe.runtime.heatmap import Heatmap
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.runtime.step import ExpertStep
from coterie.moe.store.disk import DiskReader
from coterie.weights.checkpoint import open_checkpoint

BLOCK = 16
PROMPTS = (
    tuple((7 * i * i + 3 * i + 5) % 94 + 2 for i in range(26)),
    tuple((11 * i * i + i + 9) % 94 + 2 for i in range(15)),
    tuple((5 * i * i + 17 * i + 1) % 94 + 2 for i in range(9)),
)
NEW_TOKENS = 6


class FaultyDisk(DiskReader):
    """Real reads, late or broken when told to."""

    def __init__(self) -> None:
        super().__init__("auto")
        self.reads_until_fault: int | None = None
        self.delay_s = 0.0
        # up to this much more, drawn per read
        self.jitter_s = 0.0
        self._random = random.Random(3)
        self.calls = 0
        self._count = threading.Lock()

    def pread(self, number: int, view: memoryview, offset: int) -> int:
        with self._count:
            self.calls += 1
            if self.reads_until_fault is not None:
                self.reads_until_fault -= 1
                if self.reads_until_fault < 0:
                    raise OSError(5, "injected")
        if self.delay_s or self.jitter_s:
            time.sleep(self.delay_s + self.jitter_s * self._random.random())
        return super().pread(number, view, offset)


@dataclass(frozen=True)
class Setting:
    """A model in a place."""

    path: Path
    strategy: str
    capacity: int = 0
    host: str = "100%"
    dtype: str = "fp32"
    device: str = "cpu"
    predict: str = "auto"

    def dispatch(self) -> MoeSettings:
        return MoeSettings(
            strategy=self.strategy,
            cache_capacity=self.capacity,
            host_budget=self.host,
            predict=self.predict,
            warmup="none",
        )


# by layer, sequence and position: the experts of a row, and their weights
Routes = dict[tuple[int, int, int], tuple[Tensor, Tensor]]


class DispatchedModel:
    """One loaded model; `with` closes it and checks that nothing is left in use."""

    def __init__(self, setting: Setting, heatmap: Heatmap | None = None) -> None:
        self.setting, self.disk = setting, FaultyDisk()
        self._heatmap = heatmap
        # (sequence, position) of the forward's rows, and how many of them each layer has seen
        self._rows: list[tuple[int, int]] = []
        self._seen: Counter[int] = Counter()
        self.runtime: ExpertRuntime
        self.model = load_model(
            open_checkpoint(setting.path),
            dtype=setting.dtype,
            device=setting.device,
            experts=self._open,
        )

    def _open(self, wanted: MoeRequirements) -> ExpertRuntime:
        store: Any = store_of(wanted, "auto")
        store.disk = self.disk
        self.runtime = open_experts(
            store, self.setting.dispatch(), device=wanted.device, heatmap=self._heatmap
        )
        return self.runtime

    def __enter__(self) -> DispatchedModel:
        return self

    def __exit__(self, *problem: object) -> None:
        try:
            if problem[0] is None:
                self.runtime.check()
        finally:
            self.model.close()

    def begin(self, rows: list[tuple[int, int]]) -> None:
        """A forward over these rows starts; a layer may see them in several chunks."""
        self._rows, self._seen = rows, Counter()

    def _places(self, step: ExpertStep) -> list[tuple[int, int, int]]:
        first = self._seen[step.layer]
        self._seen[step.layer] += len(step.topk_ids)
        return [(step.layer, *row) for row in self._rows[first : self._seen[step.layer]]]

    def record_routes(self) -> Routes:
        """Filled from now on."""
        routes: Routes = {}
        real = self.runtime.run

        def run(step: ExpertStep) -> Tensor:
            picked = zip(step.topk_ids, step.topk_weights.cpu(), strict=True)
            routes.update(zip(self._places(step), picked, strict=True))
            return real(step)

        self.runtime.run = run  # type: ignore[method-assign]
        return routes

    def follow(self, routes: Routes) -> list[float]:
        """Send rows where `routes` sent them: near ties between experts are not what is compared.
        Answers a list that gets the share of rows each step would have sent elsewhere."""
        diverged: list[float] = []
        real = self.runtime.run

        def run(step: ExpertStep) -> Tensor:
            known = [routes[place] for place in self._places(step)]
            ids = torch.stack([each[0] for each in known])
            other = ids.sort(-1).values != step.topk_ids.sort(-1).values
            diverged.append(float(other.any(-1).float().mean()))
            weights = torch.stack([each[1] for each in known]).to(step.topk_weights.device)
            return real(replace(step, topk_ids=ids, topk_weights=weights))

        self.runtime.run = run  # type: ignore[method-assign]
        return diverged

    def generate(
        self, prompts: Sequence[Sequence[int]], chunk: int, forced: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [S, N, V] and tokens [S, N]: greedy, or the `forced` tokens fed back."""
        sequences = Sequences(self, prompts)
        step = [sequences.prompt(chunk)]
        logits, tokens = [], []
        for index in range(NEW_TOKENS):
            logits.append(step[-1])
            tokens.append(step[-1].argmax(-1) if forced is None else forced[:, index])
            if index + 1 < NEW_TOKENS:
                step.append(sequences.decode(tokens[-1]))
        return torch.stack(logits, 1), torch.stack(tokens, 1)


class Sequences:
    """Sequences with a cache of their own, blocks of which interleave."""

    def __init__(self, dispatched: DispatchedModel, prompts: Sequence[Sequence[int]]) -> None:
        self.dispatched, self.prompts = dispatched, prompts
        model, count = dispatched.model, len(prompts)
        width = -(-(max(map(len, prompts)) + NEW_TOKENS) // BLOCK)
        self.tables = torch.arange(count * width, dtype=torch.int32).view(width, count).T
        shape = model.kv_shape(count * width, BLOCK)
        self.kv = [
            torch.zeros(shape, dtype=model.kv_dtype, device=model.device)
            for _ in range(model.spec.num_layers)
        ]
        self.lengths = [0] * count

    def prompt(self, chunk: int) -> Tensor:
        """The last position's logits of every sequence."""
        last: dict[int, Tensor] = {}
        grouped = self.dispatched.runtime.groups("prefill") is not None
        self.dispatched.model.chunk_tokens = chunk
        size = max(map(len, self.prompts)) if grouped else chunk
        for start in range(0, max(map(len, self.prompts)), size):
            parts = [(s, p[start : start + size]) for s, p in enumerate(self.prompts)]
            parts = [(s, part) for s, part in parts if part]
            rows = self.forward(parts, "prefill")
            last |= {s: row for (s, _), row in zip(parts, rows, strict=True)}
        return torch.stack([last[s] for s in range(len(self.prompts))])

    def decode(self, tokens: Tensor) -> Tensor:
        parts = [(s, [int(token)]) for s, token in enumerate(tokens)]
        rows = self.forward(parts, "decode")
        self.dispatched.runtime.update()
        return torch.stack(rows)

    def forward(self, parts: Sequence[tuple[int, Sequence[int]]], phase: str) -> list[Tensor]:
        model = self.dispatched.model
        self.dispatched.begin(
            [(s, self.lengths[s] + i) for s, tokens in parts for i in range(len(tokens))]
        )
        batch, ids, ends = self._batch(parts, phase)
        logits = model.forward(ids.to(model.device), batch, self.kv, ends.to(model.device))
        total, shares = model.take_usage() or (None, [])
        assert total is not None
        assert len(shares) in (1, len(parts))
        assert sum(each.moved_bytes for each in shares) == total.moved_bytes
        assert sum(each.read_bytes for each in shares) == total.read_bytes
        return list(logits.float().cpu().clone())

    def _batch(
        self, parts: Sequence[tuple[int, Sequence[int]]], phase: str
    ) -> tuple[AttentionBatch, Tensor, Tensor]:
        positions, slots, context = [], [], []
        for sequence, tokens in parts:
            start = self.lengths[sequence]
            self.lengths[sequence] = start + len(tokens)
            where = torch.arange(start, start + len(tokens))
            block = self.tables[sequence, where // BLOCK].long()
            positions.append(where)
            slots.append(block * BLOCK + where % BLOCK)
            context.append(start + len(tokens))
        starts = torch.tensor([0, *(len(tokens) for _, tokens in parts)]).cumsum(0).int()
        device = self.dispatched.model.device
        batch = AttentionBatch(
            positions=torch.cat(positions).to(device),
            slots=torch.cat(slots).to(device),
            query_starts=starts.to(device),
            context_lens=torch.tensor(context, dtype=torch.int32, device=device),
            block_tables=self.tables[[s for s, _ in parts]].contiguous().to(device),
            block_size=BLOCK,
            phase=phase,
        )
        ids = torch.tensor([token for _, tokens in parts for token in tokens])
        return batch, ids, starts[1:].long() - 1


def expect_weights_error(act: Any) -> None:
    try:
        act()
    except WeightsError:
        return
    raise AssertionError("a broken read did not surface as WeightsError")
