"""Decode steps that a device runs and draws with captured graphs, nearly without the host.

A step is three graphs: the host's message becomes inputs, the model runs, tokens are drawn and the
inputs of the next step are made of them. While the same sequences go on inside their blocks no
message is needed: such a step is two launches and a copy of its tokens to the host.
`Runner.launch` has the general way, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engine.edits import edit_arrays, num_unchanged
from coterie.engine.sampler import DeviceDraws, LaunchedDraws, ModelOutput, SampleBatch
from coterie.engine.step import DecodeRows, StepPlan, StepResult, StepSegment, StepUsage
from coterie.engine.upload import NUM_BUFFERS, StepEvents, UploadRing, recorded_event
from coterie.kernels.batch import AttentionBatch, Places, places_of
from coterie.kernels.draws import LogitEdits
from coterie.kernels.reference import step as reference
from coterie.kernels.step_message import DrawFields, MessageWords, message_words
from coterie.models.build.cuda_graph import SIZES, CapturedStep, DecodeGraphs

if TYPE_CHECKING:
    from coterie.core.lane import LaneConfig
    from coterie.core.moe import MoeUsage
    from coterie.engine.blocks import BlockTables
    from coterie.engine.sequence import Sequence

# tokens that lists of edits on a device have room for before they are sent again
SPARE = 64
# numbers of alternatives that draws are captured for
TOPS = (0, 1, 5, 20)


class DrawKind(NamedTuple):
    """What a captured draw does."""

    # "greedy", "plain" or "filtered", see `DeviceDraws`
    need: str
    # lists of edits with so many ids, 0: none; whether some tokens are masked; whether the token
    # that a row computes is counted first
    width: int = 0
    masked: bool = False
    notes: bool = False
    # alternatives that logprobs are made for; -1: no logprobs
    top: int = -1


# captured before the first request; others when they first come
FIRST_KINDS = (DrawKind("greedy"), DrawKind("filtered"))


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device computes, or has computed already where `result` is given."""

    plan: StepPlan
    run_s: float
    sample_s: float
    dispatch: StepUsage | None
    draws: LaunchedDraws | None = None
    # of a step that ends behind the copies of `draws`
    events: StepEvents | None = None
    result: StepResult | None = None
    # waits for the step and returns the costs of its MoE experts; None: they are in `dispatch`
    usage_later: Callable[[], tuple[MoeUsage, list[MoeUsage]]] | None = None


class CapturedDraw(NamedTuple):
    """Draws the tokens of a step and makes the inputs of the next one."""

    replay: Callable[[], None]
    # logprobs of all rows, as `score_tensors` returns them
    scores: Seq[Tensor | None]


class StepGraph(NamedTuple):
    """A captured step for so many rows, with what fills its inputs and what draws."""

    captured: CapturedStep
    rows: int
    receive: Callable[[], None]
    draws: dict[DrawKind, CapturedDraw]


@dataclass(slots=True)
class RunningStep:
    """The last launched step: the next one may be its continuation."""

    number: int
    sequences: list[Sequence]
    segments: Seq[StepSegment]
    graph: StepGraph
    batch: SampleBatch
    # of the next step
    kind: DrawKind
    # steps for which the lists of edits stay right, the device counting its own tokens
    num_left: int


class DeviceCopies:
    """Copies of what steps give, in pinned memory: of a step in flight, the one before it, and one
    to spare."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn = device, 0
        self._events = [StepEvents(device) for _ in range(3)]
        # by tensor and number of rows: the first rows on the device, and a copy for each turn
        self._views: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}
        self._kept: list[Tensor] = []

    @property
    def events(self) -> StepEvents:
        """Of the last step."""
        return self._events[self._turn]

    def begin(self) -> None:
        """The next kernel is the first of a step."""
        self._turn = (self._turn + 1) % len(self._events)
        self.events.begin()

    def copy(self, tensors: Seq[Tensor], rows: int) -> tuple[Tensor, list[Tensor]]:
        """Enqueue copies of the first rows, the end of the step. Returns those of the first tensor
        on the device, and all on the host."""
        copies = []
        for tensor in tensors:
            source, targets = self._rows(tensor, rows)
            copies.append(targets[self._turn].copy_(source, non_blocking=True))
        self.events.end()
        return self._rows(tensors[0], rows)[0], copies

    def _rows(self, tensor: Tensor, rows: int) -> tuple[Tensor, list[Tensor]]:
        # tensors are kept here, so that their names stay their own
        key = id(tensor), rows
        found = self._views.get(key)
        if found is None:
            source, pinned = tensor[:rows], self._device.type == "cuda"
            copies = [torch.empty_like(source, device="cpu", pin_memory=pinned) for _ in range(3)]
            found = self._views[key] = source, copies
            self._kept.append(tensor)
        return found


class DeviceSteps:
    def __init__(
        self,
        graphs: DecodeGraphs,
        kv: Seq[Tensor],
        config: LaneConfig,
        tables: BlockTables,
        draws: DeviceDraws,
        output: ModelOutput,
    ) -> None:
        """`draws` keeps the addresses of what it uses."""
        self._output, self._uploads = output, UploadRing(kv[0].device)
        self._graphs, self._kv, self._tables, self._draws = graphs, kv, tables, draws
        self._block_size, device = config.block_size, kv[0].device
        self._most = min(config.max_sequences, SIZES[-1])
        room = next(size for size in SIZES if size >= self._most)
        self._fields = DrawFields.empty(room, config.max_sequences, device)
        width = tables.array.shape[1]
        pinned = device.type == "cuda"
        words = message_words(room, width) // 2
        self._message = torch.zeros(words, dtype=torch.int64, device=device)
        self._sent = [MessageWords(room, width, pinned) for _ in range(NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._turn = 0
        self._answers = DeviceCopies(device)
        # by rows, width and whether tokens are masked
        self._edits: dict[tuple[int, int, bool], LogitEdits] = {}
        self._steps: dict[CapturedStep, StepGraph] = {}
        self._running: RunningStep | None = None
        self._tops: Seq[int] = [top for top in TOPS if top <= output.vocab]

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the draws of every size, so that no request waits for it."""
        for size in SIZES:
            if size < 2 * self._most:
                step = self._find(size, 1)
                for kind in FIRST_KINDS:
                    if step is not None:
                        self._drawing(step, kind)

    @property
    def events(self) -> StepEvents:
        """Of the last step, which ends behind the copy of its tokens."""
        return self._answers.events

    @property
    def ran(self) -> tuple[Tensor, AttentionBatch] | None:
        """The choices of the gates of the last step, and its rows; None without experts."""
        if self._running is None or self._running.graph.captured.routed is None:
            return None
        captured, live = self._running.graph.captured, len(self._running.sequences)
        fixed = captured.inputs.batch
        batch = AttentionBatch(
            positions=fixed.positions[:live],
            slots=fixed.slots[:live],
            query_starts=fixed.query_starts[: live + 1],
            context_lens=fixed.context_lens[:live],
            block_tables=fixed.block_tables[:live],
            block_size=fixed.block_size,
            phase="decode",
        )
        assert captured.routed is not None
        return captured.routed, batch

    def launch(
        self, plan: StepPlan, before: LaunchedStep | None, group: Callable[[], SampleBatch]
    ) -> LaunchedDraws | None:
        """Enqueue a step whose blocks are copied already; None if it needs the general way. `group`
        returns the draws of the plan."""
        last, self._running = self._running, None
        rows = plan.rows
        if not isinstance(rows, DecodeRows) or len(rows) > self._most:
            return None
        if last is not None and not self._continues(plan, rows, before, last):
            last = None
        # the device does not know new blocks
        inside = bool((rows.starts % self._block_size).all()) and not plan.copies
        if last is not None and inside:
            running = last
        else:
            found = self._start(plan, rows, before, last, group)
            if found is None:
                return None
            running = found
        graph, kind = running.graph, running.kind
        self._answers.begin()
        graph.captured.replay()
        draw = graph.draws[kind]
        draw.replay()
        made = [self._fields.tokens, *(one for one in draw.scores if one is not None)]
        tokens, copies = self._answers.copy(made, len(rows))
        running.number, running.num_left = plan.step, running.num_left - 1
        if kind.width and not kind.notes:
            running.kind = kind._replace(notes=True)
        self._running = running
        return LaunchedDraws(running.batch, tokens, copies)

    def _start(
        self,
        plan: StepPlan,
        rows: DecodeRows,
        before: LaunchedStep | None,
        last: RunningStep | None,
        group: Callable[[], SampleBatch],
    ) -> RunningStep | None:
        """Send a step's inputs; None if it needs the general way. `last`: the step that it
        continues, in other blocks."""
        batch = group() if last is None else last.batch
        if last is None and not (_takes(batch) and batch.num_top <= self._tops[-1]):
            return None
        width = int(rows.starts.max()) // self._block_size + 1
        places = places_of(plan.segments, self._output.device)
        graph = self._find(len(rows), width * self._block_size, places)
        if graph is None:
            return None
        # to capture draws takes their edits
        same = last is not None and last.graph.rows == graph.rows and last.kind in graph.draws
        if last is not None and same:
            kind, num_left, arrays = last.kind, last.num_left, None
        else:
            kind, num_left, arrays = self._kind(plan, batch)
        # nothing may be captured while a step continues
        counting = [kind._replace(notes=True)] if kind.width and not kind.notes else []
        if not all(self._drawing(graph, each) for each in (kind, *counting)):
            return None
        patched = graph.captured.inputs.batch.patch_rows
        if patched is not None:
            patched.fill(places)
        self._send(plan, rows, before, batch, graph, width)
        if arrays is not None:
            self._send_edits(arrays, self._edits_of(graph, kind))
        return RunningStep(plan.step, rows.sequences, plan.segments, graph, batch, kind, num_left)

    def _kind(
        self, plan: StepPlan, batch: SampleBatch
    ) -> tuple[DrawKind, int, list[NDArray[Any]] | None]:
        """What the draws do, for how many steps, and the lists of edits to send."""
        need, ahead = batch.columns.need, int(plan.sources is not None)
        top = -1
        if batch.scored:
            top = next(count for count in self._tops if count >= batch.num_top)
        arrays = None
        if batch.edited:
            arrays = edit_arrays(batch.draws, ahead, self._output.vocab, SPARE)
        if arrays is None:
            # a ban that has ended does not come again
            return DrawKind(need, top=top), 2**31, None
        ids, lengths, masked = arrays[0], arrays[3], bool(arrays[8].any())
        width = ids.shape[1]
        spare = width - int(lengths.max()) - ahead
        num_left = min(spare, num_unchanged(batch.draws, ahead))
        return DrawKind(need, width, masked, bool(ahead), top), num_left + 1, arrays

    def _edits_of(self, graph: StepGraph, kind: DrawKind) -> LogitEdits:
        key = graph.rows, kind.width, kind.masked
        if key not in self._edits:
            vocab = self._output.vocab if kind.masked else 1
            self._edits[key] = LogitEdits.empty(graph.rows, kind.width, vocab, self._output.device)
        return self._edits[key]

    def _send_edits(self, arrays: list[NDArray[Any]], edits: LogitEdits) -> None:
        live = len(arrays[0])
        fields = (
            edits.ids, edits.bias, edits.counts, edits.lengths, edits.repetition, edits.frequency,
            edits.presence, edits.mask, edits.masked,
        )  # fmt: skip
        for fixed, sent in zip(fields, self._uploads.send(arrays), strict=True):
            fixed[:live].copy_(sent)
        # padding has no edits
        edits.lengths[live:] = 0
        edits.masked[live:] = 0

    def _continues(
        self, plan: StepPlan, rows: DecodeRows, before: LaunchedStep | None, last: RunningStep
    ) -> bool:
        """Whether the device has the tokens and the edits of all rows of this step."""
        return (
            plan.sources is not None
            and before is not None
            and before.plan.step == last.number
            and rows.sequences is last.sequences
            and plan.segments is last.segments
            and last.num_left > 0
        )

    def _send(
        self,
        plan: StepPlan,
        rows: DecodeRows,
        before: LaunchedStep | None,
        batch: SampleBatch,
        graph: StepGraph,
        width: int,
    ) -> None:
        tokens = self._tokens(plan, rows, before)
        turn = self._turn = (self._turn + 1) % NUM_BUFFERS
        copied, words = self._copied[turn], self._sent[turn]
        if copied is not None:
            copied.synchronize()
        columns = None if batch.columns.need == "greedy" else batch.columns
        tables = self._tables.array[rows.table_rows, :width]
        count = words.write(graph.rows, tokens, rows.starts, tables, columns)
        self._message[:count].copy_(words.tensor[:count], non_blocking=True)
        if copied is None:
            self._copied[turn] = recorded_event(self._message.device)
        else:
            copied.record()
        graph.receive()

    def _tokens(
        self, plan: StepPlan, rows: DecodeRows, before: LaunchedStep | None
    ) -> NDArray[np.int64]:
        """The token of each row, or ~i for draw i of the step before."""
        if plan.sources is None:
            return np.array([sequence.tokens[-1] for sequence in rows.sequences])
        assert before is not None
        if before.draws is None:
            assert before.result is not None
            return np.array(before.result.tokens)[plan.sources]
        drawn, own = before.draws.tokens, self._fields.tokens
        if drawn.data_ptr() != own.data_ptr():
            own[: len(drawn)].copy_(drawn)
        return ~plan.sources

    def _find(self, rows: int, context: int, places: Places = ()) -> StepGraph | None:
        captured = self._graphs.step(rows, context, self._kv, self._block_size, places)
        if captured is None:
            return None
        found = self._steps.get(captured)
        if found is None:
            size = len(captured.inputs.token_ids)
            fields, draws = captured.inputs.fields, self._fields.first(size)
            receive_step = step_kernels(self._message.device)[0]
            # no message: every row is padding
            self._message.zero_()
            receive: Callable[[], None] | None = None
            with self._graphs.memory.measured(small=True):
                receive, _ = self._graphs.record(
                    lambda: receive_step(self._message, fields, draws) or ()
                )
            if receive is None:
                return None
            found = self._steps[captured] = StepGraph(captured, size, receive, {})
        return found

    def _drawing(self, step: StepGraph, kind: DrawKind) -> bool:
        """Capture what draws the tokens of a step, unless it is captured or there is no room.
        Returns whether it is. The step's inputs and edits are lost."""
        memory = self._graphs.memory
        if kind not in step.draws and memory.has_room:
            with memory.measured(small=True):
                self._capture_draw(step, kind)
        return kind in step.draws

    def _capture_draw(self, step: StepGraph, kind: DrawKind) -> None:
        inputs, logits = step.captured.inputs.fields, step.captured.logits
        fields, drawer = self._fields.first(step.rows), self._draws
        edits = self._edits_of(step, kind) if kind.width else None
        advance_step = step_kernels(logits.device)[1]

        def draw() -> Seq[Tensor]:
            if edits is not None:
                drawer.edit(logits, edits, inputs.token_ids if kind.notes else None, copy=False)
            out = fields.tokens[: step.rows]
            drawer.draw(logits, fields.parameters, fields.noise, kind.need, out)
            scores = drawer.score(logits, out, kind.top) if kind.top >= 0 else ()
            advance_step(inputs, fields)
            return scores

        # logits are not known while this is captured: nothing may be looked for in them
        fields.parameters.be_greedy()
        kept = self._fields.tokens.clone()
        step.draws[kind] = CapturedDraw(*self._graphs.record(draw))
        self._fields.tokens.copy_(kept)


def _takes(batch: SampleBatch) -> bool:
    """Whether captured draws can do all that these draws need."""
    if batch.is_host_drawn or batch.constrained or (batch.edited and batch.scored):
        return False
    bad_words = any(batch.draws[i].draw.bad_words is not None for i in batch.edited)
    return not bad_words


def step_kernels(device: torch.device) -> tuple[Callable[..., None], Callable[..., None]]:
    """`receive_step` and `advance_step` for a device."""
    if device.type != "cuda":
        return reference.receive_step, reference.advance_step
    from coterie.kernels.triton import fill

    return fill.receive_step, fill.advance_step
