"""Turns a step plan into tensors, runs the model and draws tokens. Owns the KV tensors of a lane.

Fixed arrays hold the block tables; a step with any mix of prefill chunks and decode rows gathers
from them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.lane import LaneConfig
from coterie.engine.blocks import BlockTables
from coterie.engine.sampler import Sampler, ranked
from coterie.engine.step import StepPlan, StepResult, TokenScore, step_usage
from coterie.kernels.batch import AttentionBatch
from coterie.kernels.patch import Segment

if TYPE_CHECKING:
    from coterie.engine.grammar import GrammarWork
    from coterie.models.base import CausalLM


class Runner:
    def __init__(
        self,
        model: CausalLM,
        config: LaneConfig,
        tables: BlockTables,
        adapters: bool = False,
        work: GrammarWork | None = None,
    ) -> None:
        """With `adapters` rows may use adapters. `work` runs the grammar tasks."""
        self._model = model
        self._tables = tables
        self._sampler = Sampler(work)
        self._block_size = config.block_size
        self._counting = list(range(config.max_sequences + 1))
        self._on_cpu = model.device.type == "cpu"
        self._kv = model.new_kv(config.num_blocks, config.block_size)
        model.prepare(self._kv, config.block_size, config.max_sequences, adapters)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy blocks, run the model, draw tokens. Raises what the model raises."""
        started = time.perf_counter()
        self._copy(plan)
        token_ids, batch, bounds = self._inputs(plan)
        wanted, scored = self._wanted_rows(plan, bounds)
        wanted_rows = self._tensor(np.array(wanted, dtype=np.int64))
        try:
            logits = self._model.forward(token_ids, batch, self._kv, wanted_rows)
        finally:
            # take the counts even if the step fails, so that the next step does not get them
            usage = self._model.take_usage()
        forwarded = time.perf_counter()
        drawn, prompt_scores = logits, {}
        if scored:
            drawn = logits[: len(logits) - len(scored)]
            prompt_scores = self._score_prompts(plan, logits[len(drawn) :], scored)
        tokens, scores, beams, late = self._sampler.sample(drawn, plan.draws, plan.draw_rows)
        return StepResult(
            tokens,
            scores=scores,
            beams=beams,
            late=late,
            prompt_scores=prompt_scores,
            run_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
            dispatch=None if usage is None else step_usage(plan, *usage),
        )

    def _copy(self, plan: StepPlan) -> None:
        if not plan.copies:
            return
        sources, targets = (list(side) for side in zip(*plan.copies, strict=True))
        for layer in self._kv:
            layer[:, targets] = layer[:, sources]

    def _inputs(self, plan: StepPlan) -> tuple[Tensor, AttentionBatch, list[int]]:
        """Token ids, the batch description, and the first row of each sequence (and the end)."""
        rows, num_rows, size = plan.rows, len(plan.rows), self._block_size
        table_rows = np.array([row[0].row for row in rows])
        starts = np.array([row[1] for row in rows])
        if plan.num_tokens == num_rows:
            tokens = [row[0].tokens[row[1]] for row in rows]
            bounds = self._counting[: num_rows + 1]
            positions, owners, context_lens = starts, table_rows, starts + 1
        else:
            tokens, bounds = [], [0]
            for sequence, start, count, _ in rows:
                tokens += sequence.tokens[start : start + count]
                bounds.append(bounds[-1] + count)
            counts = np.diff(bounds)
            positions = np.arange(plan.num_tokens) + np.repeat(starts - bounds[:-1], counts)
            owners, context_lens = np.repeat(table_rows, counts), starts + counts
        width = (int(context_lens.max()) - 1) // size + 1
        table = self._tables.array
        places, offsets = np.divmod(positions, size)
        slots = table[owners, places] * np.int64(size) + offsets
        batch = AttentionBatch(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            query_starts=self._tensor(np.array(bounds, dtype=np.int32)),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            block_tables=self._tensor(table[table_rows, :width]),
            block_size=size,
            phase="prefill" if plan.num_prefill_tokens else "decode",
            patches=tuple(
                Segment(bounds[first], bounds[last], stack) for first, last, stack in plan.segments
            ),
        )
        return self._tensor(np.array(tokens)), batch, bounds

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._on_cpu else tensor.to(self._model.device, non_blocking=True)

    def _wanted_rows(
        self, plan: StepPlan, bounds: list[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Rows whose logits are needed: one per drawing row, then all scored prompt positions.

        The second list describes the latter: (row of the plan, position of the predicted token).
        Soft tokens and the first token of the text have no score.
        """
        logit_rows = [bounds[row + 1] - 1 for row in dict.fromkeys(plan.draw_rows)]
        scored: list[tuple[int, int]] = []
        for index, (sequence, start, count, phase) in enumerate(plan.rows):
            if phase == "prefill" and sequence.draw.prompt_logprobs is not None:
                first = max(start, sequence.num_virtual)
                last = min(start + count, sequence.num_prompt - 1)
                row = bounds[index] - start
                logit_rows += range(row + first, row + last)
                scored += [(index, position + 1) for position in range(first, last)]
        return logit_rows, scored

    def _score_prompts(
        self, plan: StepPlan, logits: Tensor, scored: list[tuple[int, int]]
    ) -> dict[tuple[int, int], TokenScore]:
        targets = [plan.rows[index].sequence.tokens[position] for index, position in scored]
        num_tops = [plan.rows[index].sequence.draw.prompt_logprobs or 0 for index, _ in scored]
        scores = ranked(logits, targets, max(num_tops))
        return {
            place: one._replace(top=one.top[:num])
            for place, num, one in zip(scored, num_tops, scores, strict=True)
        }
