"""Turns a step plan into tensors, runs the model and draws tokens. Owns the KV tensors of a lane.

Fixed arrays hold the block tables; a step with any mix of prefill chunks and decode rows gathers
from them. On a GPU a step is enqueued and its tokens are read later, so that the next step can be
enqueued first: its token ids then never pass through the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.lane import LaneConfig
from coterie.engine.blocks import BlockTables
from coterie.engine.device_steps import DeviceSteps, LaunchedStep
from coterie.engine.sampler import (
    DeviceDraws,
    LaunchedDraws,
    ModelOutput,
    SampleBatch,
    Sampler,
    ranked,
    score_tensors,
)
from coterie.engine.step import (
    DecodeRows,
    StepPlan,
    StepResult,
    TokenScore,
    step_usage,
)
from coterie.engine.upload import StepEvents, UploadRing
from coterie.kernels.backend import best_backend
from coterie.kernels.batch import FRESH_ROWS, AttentionBatch
from coterie.kernels.patch import Segment
from coterie.models.build.cuda_graph import SIZES

if TYPE_CHECKING:
    from coterie.engine.grammar import GrammarWork
    from coterie.kernels.draws import DrawParameters, LogitEdits
    from coterie.kernels.triton.sample import SampleNeed, SampleScratch
    from coterie.kernels.triton.scores import ScoreScratch
    from coterie.models.base import CausalLM


# up to this many prompts of a step are computed one by one, and those of this many rows always
FEW_PROMPTS, LONG_PROMPT = 4, 1024


class Runner:
    """`launch` enqueues a step, `collect` waits for its tokens. On the CPU, and where the host has
    to take part in a draw, `launch` does all of the work."""

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
        self._output = ModelOutput(model.device, model.spec.vocab)
        self._tables = tables
        on_cpu = model.device.type == "cpu"
        draws = None if on_cpu else device_draws(model.device)
        self._sampler = Sampler(work, draws)
        # whether the device can draw ahead what depends on the output only by counts
        self.counts_on_device = draws is not None
        self._block_size = config.block_size
        # 0, 1, 2, ...
        self._counting = list(range(config.max_sequences + 1))
        self._counted = np.arange(config.max_sequences + 1, dtype=np.int32)
        self._numbers = np.arange(config.max_sequences, dtype=np.int64)
        self._uploads = None if on_cpu else UploadRing(model.device)
        # by number of rows, on the device
        self._fixed: dict[int, list[Tensor]] = {}
        self._kv = model.new_kv(config.num_blocks, config.block_size)
        self._config, self._adapts = config, adapters
        # decode steps that need nothing of the host
        self._steps: DeviceSteps | None = None
        if draws is not None and model.is_captured:
            assert model.graphs is not None
            own = TritonDraws(rows=SIZES[-1])
            self._steps = DeviceSteps(model.graphs, self._kv, config, tables, own, self._output)

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the steps that would be captured when they are first needed. Calls `progress`
        with (graphs done, graphs)."""
        self._model.prepare(self._kv, self._config, progress, self._adapts)
        if self._steps is not None:
            self._steps.prepare()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, before: LaunchedStep | None = None) -> LaunchedStep:
        """Copy blocks, run the model, draw tokens. Raises what the model raises.

        A plan with `sources` takes its token ids from the draws of `before`, which need not be
        collected yet.
        """
        started = time.perf_counter()
        self._copy(plan)
        model = self._model
        if self._steps is not None and model.is_captured and not model.is_loading:
            draws = self._steps.launch(plan, before, partial(self._group, plan))
            if draws is not None:
                return self._launched(plan, draws, started, self._steps)
        events = None if self._uploads is None else StepEvents(model.device).begin()
        arrays, bounds = self._arrays(plan, before)
        wanted, scored = self._wanted_rows(plan, bounds)
        arrays.append(wanted)
        ahead = int(plan.sources is not None)
        noise = None
        if self._uploads is None:
            constrained = False
            tensors = [torch.from_numpy(array) for array in arrays]
        else:
            # masks of grammars are made while the device computes
            constrained = bool(plan.draws) and bool(self._group(plan).constrained)
            if plan.draws and not constrained:
                noise = self._sampler.inputs(plan.draws, plan.draw_rows, self._output, ahead)
            tensors = self._send(self._uploads, plan, arrays, noise or [])
        token_ids, wanted_rows = tensors[0], tensors[6]
        if plan.sources is not None and self._uploads is not None:
            token_ids = _drawn_by(before, plan, token_ids)
        batch = self._batch(plan, bounds, tensors[1:6])
        later = usage = None
        try:
            logits = self._model.forward(token_ids, batch, self._kv, wanted_rows)
            later = self._model.launched_usage()
        finally:
            # take the counts even if the step fails, so that the next step does not get them
            if later is None:
                usage = self._model.take_usage()
        if constrained and self._uploads is not None:
            noise = self._sampler.inputs(plan.draws, plan.draw_rows, self._output, ahead)
            tensors += self._uploads.send(noise or [])
        forwarded = time.perf_counter()
        dispatch = None if usage is None else step_usage(plan, *usage)
        run_s = forwarded - started
        if noise is not None and not scored:
            # the rows of such a plan draw in order
            unknown = token_ids if ahead else None
            draws = self._sampler.launch(logits, plan.draws, tensors[7:], unknown)
            if events is not None:
                events.end()
            sample_s = time.perf_counter() - forwarded
            return LaunchedStep(plan, run_s, sample_s, dispatch, draws, events, usage_later=later)
        if events is not None:
            events.end()
        drawn, prompt_scores = logits, {}
        if scored:
            drawn = logits[: len(logits) - len(scored)]
            prompt_scores = self._score_prompts(plan, logits[len(drawn) :], scored)
        tokens, scores, beams, late = self._sampler.sample(drawn, plan.draws, plan.draw_rows, ahead)
        sample_s = time.perf_counter() - forwarded
        if later is not None:
            dispatch = step_usage(plan, *later())
        device_s = None if events is None else events.seconds()
        result = StepResult(
            tokens, scores, beams, late, prompt_scores, run_s, sample_s, device_s, dispatch
        )
        return LaunchedStep(plan, run_s, sample_s, dispatch, result=result)

    def _batch(self, plan: StepPlan, bounds: list[int], tensors: list[Tensor]) -> AttentionBatch:
        """The rows of the plan for the model. `bounds`: where each sequence's rows begin."""
        positions, slots, query_starts, context_lens, block_tables = tensors
        long = plan.num_prefill_tokens >= FRESH_ROWS
        return AttentionBatch(
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            block_size=self._block_size,
            phase="prefill" if plan.num_prefill_tokens else "decode",
            fresh=_fresh_rows(plan, bounds) if long else (),
            continued=_continued_rows(plan, bounds) if long else (),
            patches=tuple(
                Segment(bounds[first], bounds[last], stack) for first, last, stack in plan.segments
            ),
        )

    def _group(self, plan: StepPlan) -> SampleBatch:
        return self._sampler.grouped(plan.draws, self._model.device)

    def _launched(
        self, plan: StepPlan, draws: LaunchedDraws, started: float, steps: DeviceSteps
    ) -> LaunchedStep:
        later, ran = None, steps.ran
        if ran is not None:
            self._model.ran_captured(*ran)
            later = self._model.launched_usage()
        run_s = time.perf_counter() - started
        return LaunchedStep(plan, run_s, 0.0, None, draws, steps.events, usage_later=later)

    def _send(
        self, uploads: UploadRing, plan: StepPlan, arrays: list[NDArray[Any]], more: list[Any]
    ) -> list[Tensor]:
        """All arrays on the device. Steps that only decode share what is the same in all of them:
        the query starts and the rows whose logits are needed."""
        if not isinstance(plan.rows, DecodeRows):
            return uploads.send([*arrays, *more])
        count = len(plan.rows)
        fixed = self._fixed.get(count)
        if fixed is None:
            fixed = self._fixed[count] = uploads.send([arrays[3], arrays[6]])
        sent = uploads.send([*arrays[:3], *arrays[4:6], *more])
        return [*sent[:3], fixed[0], *sent[3:5], fixed[1], *sent[5:]]

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait until the step is computed. Raises what failed on the device."""
        if launched.result is not None:
            return launched.result
        assert launched.draws is not None
        started = time.perf_counter()
        device_s = None if launched.events is None else launched.events.seconds()
        tokens, scores, _, late = self._sampler.read(launched.draws)
        dispatch = launched.dispatch
        if launched.usage_later is not None:
            dispatch = step_usage(launched.plan, *launched.usage_later())
        return StepResult(
            tokens,
            scores=scores,
            late=late,
            run_s=launched.run_s,
            sample_s=launched.sample_s + time.perf_counter() - started,
            device_s=device_s,
            dispatch=dispatch,
        )

    def _copy(self, plan: StepPlan) -> None:
        if not plan.copies:
            return
        sources, targets = (list(side) for side in zip(*plan.copies, strict=True))
        for layer in self._kv:
            layer[:, targets] = layer[:, sources]

    def _arrays(
        self, plan: StepPlan, before: LaunchedStep | None
    ) -> tuple[list[NDArray[Any]], list[int]]:
        """Token ids (on a device for a plan with `sources`: these), positions, slots, query starts,
        context lengths and block tables; and the first row of each sequence (and the end)."""
        rows, num_rows, size = plan.rows, len(plan.rows), self._block_size
        if isinstance(rows, DecodeRows):
            table_rows, starts = rows.table_rows, rows.starts
        else:
            table_rows = np.array([row[0].row for row in rows])
            starts = np.array([row[1] for row in rows])
        if plan.num_tokens == num_rows:
            tokens = self._decoded(plan, before)
            bounds = self._counting[: num_rows + 1]
            query_starts = self._counted[: num_rows + 1]
            positions, owners, context_lens = starts, table_rows, starts + 1
        else:
            found: list[int] = []
            bounds = [0]
            for sequence, start, count, _ in rows:
                found += sequence.tokens[start : start + count]
                bounds.append(bounds[-1] + count)
            counts = np.diff(bounds)
            tokens, query_starts = np.array(found), np.array(bounds, dtype=np.int32)
            positions = np.arange(plan.num_tokens) + np.repeat(starts - bounds[:-1], counts)
            owners, context_lens = np.repeat(table_rows, counts), starts + counts
        width = (int(context_lens.max()) - 1) // size + 1
        table = self._tables.array
        places, offsets = np.divmod(positions, size)
        slots = table[owners, places] * np.int64(size) + offsets
        arrays = [
            tokens,
            positions,
            slots,
            query_starts,
            context_lens.astype(np.int32),
            table[table_rows, :width],
        ]
        return arrays, bounds

    def _decoded(self, plan: StepPlan, before: LaunchedStep | None) -> NDArray[np.int64]:
        """The token of each row; on a device, for a plan with `sources`, the draw to take it
        from."""
        if plan.sources is None:
            if isinstance(plan.rows, DecodeRows):
                return np.array([sequence.tokens[-1] for sequence in plan.rows.sequences])
            return np.array([row[0].tokens[row[1]] for row in plan.rows])
        if self._uploads is not None:
            return plan.sources
        assert before is not None and before.result is not None
        return np.array(before.result.tokens)[plan.sources]

    def _wanted_rows(
        self, plan: StepPlan, bounds: list[int]
    ) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
        """Rows whose logits are needed: one per drawing row, then all scored prompt positions.

        The second list describes the latter: (row of the plan, position of the predicted token).
        Soft tokens and the first token of the text have no score.
        """
        if isinstance(plan.rows, DecodeRows):
            return self._numbers[: len(plan.rows)], []
        logit_rows = [bounds[row + 1] - 1 for row in dict.fromkeys(plan.draw_rows)]
        scored: list[tuple[int, int]] = []
        for index, (sequence, start, count, phase) in enumerate(plan.rows):
            if phase == "prefill" and sequence.draw.prompt_logprobs is not None:
                first = max(start, sequence.num_virtual)
                last = min(start + count, sequence.num_prompt - 1)
                row = bounds[index] - start
                logit_rows += range(row + first, row + last)
                scored += [(index, position + 1) for position in range(first, last)]
        return np.array(logit_rows, dtype=np.int64), scored

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


def _fresh_rows(plan: StepPlan, bounds: list[int]) -> tuple[tuple[int, int], ...]:
    """The rows of long prompts that begin in this step: each is a call of its own, so that of many
    prompts only the longest are worth it."""
    begun = [index for index, row in enumerate(plan.rows) if row.start == 0]
    long = [index for index in begun if plan.rows[index].num_tokens >= FRESH_ROWS]
    if len(long) > FEW_PROMPTS:
        long = [index for index in long if plan.rows[index].num_tokens >= LONG_PROMPT]
    return tuple((bounds[index], bounds[index + 1]) for index in long)


def _continued_rows(plan: StepPlan, bounds: list[int]) -> tuple[tuple[int, int, int, int], ...]:
    """The rows of long later parts of prompts, with their sequence and the tokens before them."""
    long = [
        (bounds[index], bounds[index + 1], index, row.start)
        for index, row in enumerate(plan.rows)
        if row.start and row.num_tokens >= FRESH_ROWS
    ]
    return tuple(long) if len(long) <= FEW_PROMPTS else ()


def _drawn_by(before: LaunchedStep | None, plan: StepPlan, sources: Tensor) -> Tensor:
    """The tokens that draws of a launched step give, without waiting for them."""
    assert before is not None
    if before.draws is None:
        assert before.result is not None
        return torch.tensor(before.result.tokens, device=sources.device)[sources]
    tokens = before.draws.tokens
    # sources of these rows ascend
    is_same = isinstance(plan.rows, DecodeRows) and len(sources) == len(tokens)
    return tokens if is_same else tokens[sources]


def device_draws(device: torch.device) -> DeviceDraws | None:
    """What draws with noise and edits on `device`. None: the host takes part in such draws."""
    return TritonDraws() if best_backend(device) == "triton" else None


class TritonDraws:
    """Draws with Triton kernels; their memory grows to the largest batch."""

    def __init__(self, dependent: bool = True, rows: int = 0) -> None:
        """`dependent`: kernels start before the ones they wait for have ended (see `gemv`). Batches
        of up to `rows` rows always use the same memory, so that they can be captured."""
        self._scratch: SampleScratch | None = None
        self._score_scratch: ScoreScratch | None = None
        self._dependent, self._rows = dependent, rows

    def draw(
        self,
        logits: Tensor,
        parameters: DrawParameters,
        noise: Tensor,
        need: str,
        out: Tensor | None = None,
    ) -> Tensor:
        from coterie.kernels.triton.sample import SampleScratch, sample_rows

        rows, vocab = logits.shape
        scratch = self._scratch
        if scratch is None or len(scratch.counters) < rows:
            scratch = SampleScratch.empty(self._rows or 2 * rows, vocab, logits.device)
            self._scratch = scratch
        if out is None:
            out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        some, dependent = cast("SampleNeed", need), self._dependent
        sample_rows(logits.contiguous(), parameters, noise, out, scratch, some, dependent)
        return out

    def edit(self, logits: Tensor, edits: LogitEdits, unknown: Tensor | None, copy: bool) -> Tensor:
        from coterie.kernels.triton.logit_edits import edit_rows, note_tokens

        if unknown is not None:
            note_tokens(unknown, edits, self._dependent)
        logits = logits.contiguous()
        out = torch.empty_like(logits) if copy else logits
        edit_rows(logits, edits, out, self._dependent)
        return out

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
        from coterie.kernels.triton.scores import MAX_TOP, ScoreScratch, score_rows

        if num_top > min(MAX_TOP, logits.shape[1]):
            return score_tensors(logits, tokens, num_top)
        rows, vocab = logits.shape
        scratch = self._score_scratch
        if scratch is None or len(scratch.counters) < rows:
            scratch = ScoreScratch.empty(self._rows or 2 * rows, vocab, logits.device)
            self._score_scratch = scratch
        own = torch.empty(rows, dtype=torch.float32, device=logits.device)
        ids = torch.empty((rows, num_top), dtype=torch.int64, device=logits.device)
        values = torch.empty((rows, num_top), dtype=torch.float32, device=logits.device)
        logits = logits.contiguous()
        score_rows(logits, tokens, own, ids, values, scratch, self._dependent)
        return [own, ids, values] if num_top else [own]
