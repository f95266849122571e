"""Measures how a CUDA device runs a model's experts: a few of its layers, with made-up experts,
all on the device, half of them, and none.

The same kernels, captured steps, bank and CPU share run as in a served model. It takes seconds and
is done once (`moe/planner/machine.py` keeps the result).
"""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.core.moe import MoeSettings
from coterie.kernels.batch import FRESH_ROWS, AttentionBatch
from coterie.kernels.device_record import device_record
from coterie.models.base import CausalLM, load_model
from coterie.moe.planner.cost_curve import CostCurve
from coterie.moe.planner.device_path import DevicePath, missing_by_steps
from coterie.moe.planner.measure import sample_record
from coterie.moe.runtime.runtime import ExpertRuntime, open_experts
from coterie.moe.store.base import StoreTimings
from coterie.moe.store.disk import DiskReader

if TYPE_CHECKING:
    from coterie.kernels.expert_layout import ExpertLayout
    from coterie.models.build.moe import MoeRequirements
    from coterie.models.spec import MoeSpec
    from coterie.moe.store.base import ExpertGeometry, ExpertStore, Key
    from coterie.weights.checkpoint import Checkpoint
    from coterie.weights.files import FileExtent
    from coterie.weights.quantize import Weight

# roughly the time that measuring takes, for the message to the user
SECONDS = 15.0
# layers with experts that are measured, and the bytes of their experts
MOST_LAYERS, MOST_BYTES = 6, 8 << 30
# streams of steps that decode, and rows of prompts
STREAMS, PROMPTS = (1, 8), (128, 512, 2048, 8192)
_CONTEXT, _BLOCK = 160, 16
# steps that are measured, and those before them: the CPU's share follows the rates of steps
_STEPS, _WARM = 32, 24
_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")

# opens a few layers of a model with its experts placed like this
OpenSlice = Callable[[MoeSettings], CausalLM]


def measure_device_path(
    open_slice: OpenSlice, device_bytes_s: float, prompts: Sequence[int] = PROMPTS
) -> DevicePath:
    """`open_slice` is called three times; its models are closed."""
    whole = _measured(
        open_slice, _settings("persistent", "100%", ""), partial(_whole_slice, prompts=prompts)
    )
    half = _measured(open_slice, _settings("hot_cached_static", "50%"), _missing_slice)
    none = _measured(open_slice, _settings("cpu_only", "0%"), _missing_slice)
    rest_s = whole.head_bytes / device_bytes_s
    layers = whole.layers

    def of_layer(seconds: float) -> float:
        return max(1e-9, seconds - rest_s) / layers

    extra = [
        (missing, (seconds - whole.decode[streams]) / layers)
        for found in (half, none)
        for streams, (seconds, missing) in found.steps.items()
    ]
    copy, read, cpu = none.rates
    return DevicePath(
        kind=whole.kind,
        record_bytes=whole.record_bytes,
        copy_bytes_s=copy,
        read_bytes_s=read,
        cpu_bytes_s=cpu,
        decode_layer=_curve({rows: of_layer(s) for rows, s in whole.decode.items()}),
        prompt_layer=_curve({rows: of_layer(s) for rows, s in whole.prompts.items()}),
        rest_s=rest_s,
        missing=missing_by_steps(extra),
    )


def _settings(strategy: str, share: str, host: str = "100%") -> MoeSettings:
    return MoeSettings(strategy, device_budget=share, host_budget=host, predict="off")


def _curve(seconds: dict[int, float]) -> CostCurve:
    return CostCurve(tuple(seconds), tuple(seconds.values()))


@dataclass(frozen=True, slots=True)
class _WholeSlice:
    kind: str
    record_bytes: int
    layers: int
    head_bytes: int
    # seconds of a step, by streams; and of a prompt, by rows
    decode: dict[int, float]
    prompts: dict[int, float]


@dataclass(frozen=True, slots=True)
class _MissingSlice:
    # by streams: seconds of a step, and missing experts of a layer
    steps: dict[int, tuple[float, float]]
    rates: tuple[float, float, float]


Found = TypeVar("Found")


def _measured(
    open_slice: OpenSlice, settings: MoeSettings, measure: Callable[[CausalLM], Found]
) -> Found:
    model = open_slice(settings)
    try:
        return measure(model)
    finally:
        model.close()
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _whole_slice(model: CausalLM, prompts: Sequence[int]) -> _WholeSlice:
    runtime = cast(ExpertRuntime, model.experts)
    store, spec = runtime.parts.store, model.spec
    record = device_record(store.layout(runtime.geometry.layers[0]))
    most = spec.max_positions - _BLOCK
    return _WholeSlice(
        kind=store.layout(runtime.geometry.layers[0]).kinds[0],
        record_bytes=store.slot_bytes if record is None else record.nbytes,
        layers=len(runtime.geometry.layers),
        head_bytes=model._head.nbytes,
        decode={streams: decode_steps(model, streams, _STEPS)[0] for streams in STREAMS},
        prompts={rows: prompt_seconds(model, rows) for rows in prompts if rows <= most},
    )


def _missing_slice(model: CausalLM) -> _MissingSlice:
    runtime = cast(ExpertRuntime, model.experts)
    steps = {streams: decode_steps(model, streams) for streams in STREAMS}
    # where kernels do not read RAM, nobody asks for their rates
    return _MissingSlice(steps, runtime.wire_rates() or (1e10, 1e10, 0.0))


@torch.inference_mode()
def decode_steps(model: CausalLM, streams: int, in_flight: int = 1) -> tuple[float, float]:
    """Seconds of a step that decodes so many streams, and the experts of a layer that it did not
    find on the device. As an engine does, the next `in_flight` steps are launched before one is
    counted; with few layers the host would else be what is measured."""
    runtime = cast(ExpertRuntime, model.experts)
    total = _WARM + _STEPS
    kv = model.new_kv(streams * -(-(_CONTEXT + total) // _BLOCK), _BLOCK)
    draw = torch.Generator().manual_seed(streams)
    drawn = torch.randint(model.spec.vocab, (total, streams), generator=draw).to(model.device)
    batches = [_decode_batch(streams, _CONTEXT + number, total, model) for number in range(total)]
    last = torch.arange(streams, device=model.device)
    launched: deque[Callable[[], Any]] = deque()
    started = missed = 0.0
    for number, batch in enumerate(batches):
        if number == _WARM:
            _count_all(launched)
            missed = _missed(runtime)
            _wait(model)
            started = time.perf_counter()
        model.forward(drawn[number], batch, kv, last)
        usage = model.launched_usage()
        launched.append(usage or model.take_usage)
        if usage is None or len(launched) > in_flight:
            launched.popleft()()
    _wait(model)
    seconds = (time.perf_counter() - started) / _STEPS
    _count_all(launched)
    missing = (_missed(runtime) - missed) / _STEPS / len(runtime.geometry.layers)
    return seconds, missing


def _count_all(launched: deque[Callable[[], Any]]) -> None:
    while launched:
        launched.popleft()()


@torch.inference_mode()
def prompt_seconds(model: CausalLM, rows: int) -> float:
    """Of one prompt in one step; the first ones compile, plan and capture."""
    kv = model.new_kv(-(-rows // _BLOCK), _BLOCK)
    device = model.device
    where = torch.arange(rows, device=device)
    batch = AttentionBatch(
        positions=where,
        slots=where,
        query_starts=torch.tensor([0, rows], dtype=torch.int32, device=device),
        context_lens=torch.tensor([rows], dtype=torch.int32, device=device),
        block_tables=torch.arange(-(-rows // _BLOCK), dtype=torch.int32, device=device)[None],
        block_size=_BLOCK,
        phase="prefill",
        fresh=((0, rows),) if rows >= FRESH_ROWS else (),
    )
    draw = torch.Generator().manual_seed(rows)
    times = []
    for _ in range(4):
        ids = torch.randint(model.spec.vocab, (rows,), generator=draw).to(device)
        _wait(model)
        started = time.perf_counter()
        model.forward(ids, batch, kv, where[-1:])
        _wait(model)
        times.append(time.perf_counter() - started)
        (model.launched_usage() or model.take_usage)()
    return min(times)


def _decode_batch(streams: int, context: int, most: int, model: CausalLM) -> AttentionBatch:
    """One row of each stream behind `context` tokens."""
    device, each = model.device, -(-(_CONTEXT + most) // _BLOCK)
    tables = torch.arange(streams * each, dtype=torch.int32).view(streams, each)
    slots = tables[:, context // _BLOCK].long() * _BLOCK + context % _BLOCK
    return AttentionBatch(
        positions=torch.full((streams,), context, device=device),
        slots=slots.to(device),
        query_starts=torch.arange(streams + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((streams,), context + 1, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        block_size=_BLOCK,
        phase="decode",
    )


def _missed(runtime: ExpertRuntime) -> float:
    counts = runtime.telemetry.total().as_dict()
    return counts["device_misses"] + counts["host_runs"]


def _wait(model: CausalLM) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


class SlicedCheckpoint:
    """The first layers of another checkpoint."""

    def __init__(self, whole: Checkpoint, layers: int) -> None:
        self._whole, self._layers = whole, layers
        self.path, self.generation = whole.path, whole.generation
        self.config = {**whole.config, "num_hidden_layers": layers}

    def names(self) -> list[str]:
        found = []
        for name in self._whole.names():
            inside = _IN_LAYER.search(name)
            if inside is None or int(inside[1]) < self._layers:
                found.append(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(name)

    def stored_as(self, name: str) -> str:
        return self._whole.stored_as(name)

    def read(self, name: str) -> Weight:
        return self._whole.read(name)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self._whole.raw(name)

    def extent(self, name: str) -> FileExtent:
        return self._whole.extent(name)

    def unmap(self) -> None:
        self._whole.unmap()

    def release(self) -> None:
        self._whole.release()

    def fingerprint(self) -> str:
        return self._whole.fingerprint()


class SampleExperts:
    """An `ExpertStore` without a file: every expert is the same small random record."""

    fingerprint = "sample experts"
    lineage = ("sample experts",)
    staging_bytes = 0

    def __init__(self, geometry: ExpertGeometry, layout: ExpertLayout, slot_bytes: int) -> None:
        self.geometry, self._layout, self.slot_bytes = geometry, layout, slot_bytes
        self.expert_bytes = geometry.total * slot_bytes
        self.disk, self.spent = DiskReader("buffered"), StoreTimings()
        self._record = sample_record(layout, slot_bytes)

    def layout(self, layer: int) -> ExpertLayout:
        return self._layout

    def read_bytes(self, key: Key) -> int:
        return 0

    def read(self, key: Key, out: Tensor) -> int:
        # ctypes lets other threads run meanwhile
        ctypes.memmove(out.data_ptr(), self._record.data_ptr(), self._layout.nbytes)
        return 0

    def tensors(self) -> frozenset[str]:
        return frozenset()

    def files(self) -> frozenset[Path]:
        return frozenset()

    def close(self) -> None:
        self.disk.close()


def slice_layers(layers: Sequence[int], experts: int, slot_bytes: int) -> int:
    """Layers of the model, from the first on, that are measured; `layers`: those with experts."""
    count = min(MOST_LAYERS, max(2, MOST_BYTES // max(1, experts * slot_bytes)), len(layers))
    return layers[count - 1] + 1


def slice_opener(
    checkpoint: Checkpoint, moe: MoeSpec, store: ExpertStore, dtype: str, device: str
) -> OpenSlice:
    """Opens the first layers of `checkpoint` with experts of the same size as in `store`."""
    count = slice_layers(moe.layers, moe.num_experts, store.slot_bytes)
    layout = store.layout(store.geometry.layers[0])

    def opened(settings: MoeSettings) -> CausalLM:
        def experts(wanted: MoeRequirements) -> ExpertRuntime:
            samples = SampleExperts(wanted.geometry(), layout, store.slot_bytes)
            return open_experts(samples, settings, device=device)

        part = SlicedCheckpoint(checkpoint, count)
        return load_model(part, dtype=dtype, device=device, experts=experts)

    return opened
