"""A step's experts shared between the device and the CPU.

layer: one layer of random experts, of which most are in RAM, against torch: by pair and with whole
experts. answers: in fp32, alone and in a batch, the tokens of a model whose experts are all
resident. silence: a CPU that does not answer fails the requests of that step, within a second, and
no other ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.share import ShareBell, ShareCoordinator, ShareRecords
from coterie.kernels.device_record import DeviceRecord
from tests.cuda.suite import Check, NotHere

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "int8": 1e-2, "int4": 1e-2}
HIDDEN, INNER, EXPERTS, TOP_K = 1024, 416, 24, 8
# rows: by pair, or with whole experts
WAYS = {"pairs": (1, 3, 4), "whole": (5, 16)}
LIMIT_NS = 400_000_000
# lru and active_only copy what they miss
STRATEGIES = ("hot_cached_static", "adaptive", "cpu_only", "static_pin", "weighted_pin")


def checks(device: str) -> Iterator[Check]:
    for kind in TOLERANCE:
        for way, rows in WAYS.items():
            call = partial(_layer, device, kind, way, rows)
            yield Check("share", f"share/layer/{kind}/{way}", call)
    for strategy in STRATEGIES:
        yield Check("share", f"share/answers/{strategy}", partial(_answers, device, strategy))
    yield Check("share", "share/silence", partial(_silence, device))


def native_library(device: str) -> Any:
    if device != "cuda":
        raise NotHere("needs CUDA")
    # `tests.cuda` sets it to 0
    os.environ["COTERIE_NATIVE"] = "1"
    native.cache_clear()
    library = native()
    if library is None:
        raise NotHere("needs a C++ compiler")
    return library


def random_records(kind: str, count: int, hidden: int, inner: int) -> tuple[DeviceRecord, Any]:
    """uint8 [count, bytes] on the device."""
    record = DeviceRecord(kind, hidden, inner)
    matrices, scales = record.gate_up_scales_at, record.nbytes - record.gate_up_scales_at
    rows = torch.randint(0, 256, (count, record.nbytes), dtype=torch.uint8, device="cuda")
    if kind in ("fp32", "bf16"):
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        values = torch.randn((count, matrices // dtype.itemsize), device="cuda") * 0.05
        rows[:, :matrices] = values.to(dtype).view(torch.uint8)
        return record, rows
    values = torch.rand((count, scales // 2), device="cuda")
    values *= 8e-4 if kind == "int8" else 1e-2
    if kind == "int4":
        values.view(count, -1, 2)[..., 1] *= -7.5
    rows[:, matrices:] = values.half().view(torch.uint8)
    return record, rows


@torch.inference_mode()
def _layer(device: str, kind: str, way: str, all_rows: tuple[int, ...]) -> str:
    from coterie.kernels.triton import cpu_share
    from coterie.kernels.triton import expert_gemv as kernels
    from coterie.kernels.triton.expert_groups import ExpertScratch, run_experts_many
    from coterie.kernels.triton.sizes import pair_sizes

    library = native_library(device)
    record, here = random_records(kind, EXPERTS, HIDDEN, INNER)
    there = here.cpu().pin_memory()
    memory = torch.zeros(ShareBell.nbytes(16, 128, HIDDEN), dtype=torch.uint8).pin_memory()
    bell = ShareBell(memory, 16, 128, HIDDEN)
    share = cpu_share.ShareState.new(bell, EXPERTS * INNER, device)
    coordinator = ShareCoordinator(library, bell, [ShareRecords(list(there), record)], 8)
    step, away = here.shape[1] // 16, (there.data_ptr() - here.data_ptr()) // 16
    places = torch.arange(EXPERTS, device=device) * step
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    wrong, worst, given = 0, 0.0, 0
    try:
        for rows in (*all_rows, *all_rows):
            tiers = (torch.rand(EXPERTS, device=device) < 0.7).to(torch.int8)
            ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
            ids = ids.int().to(device)
            pool = kernels.ExpertPool(here.view(-1), places + tiers.long() * away, record)
            weights = torch.rand((rows, TOP_K), device=device)
            routed = kernels.RoutedRows(ids, pool.places[ids.long()], weights, weights[:, 0])
            part = float(torch.rand(()))
            table = [int(part * n * 32) // 32 * 32 for n in range(len(share.table))]
            share.table.copy_(torch.tensor(table))
            x = torch.randn((rows, HIDDEN), device=device).to(dtype)
            hidden = torch.zeros_like(x)
            told = torch.zeros((rows, TOP_K), dtype=torch.int32, device=device)
            own = tiers, 0, INNER, share, told
            whole = way == "whole"
            cpu_share.ring(x, ids, weights, *own, whole=whole)
            if whole:
                scratch = ExpertScratch.empty(rows, TOP_K, EXPERTS, record, dtype, x.device)
                scratch.values.fill_(float("nan"))
                run_experts_many(x, replace(routed, ids=told), pool, hidden, scratch)
            else:
                sizes = pair_sizes(record)
                acts = torch.full((rows * TOP_K, INNER), float("nan"), dtype=dtype, device=device)
                kernels.pair_gate_up(x, routed, pool, acts, sizes, taken=told)
                kernels.pair_down(acts, routed, pool, hidden, sizes, taken=told)
            cpu_share.await_cpu(hidden, share, LIMIT_NS)
            torch.cuda.synchronize()
            decided = cpu_share.taken_torch(ids.cpu(), tiers.cpu(), share.table.cpu(), INNER, whole)
            wrong += int(not torch.equal(told.cpu(), decided))
            want = kernels.experts_torch(
                x, ids, weights, kernels.ExpertPool(pool.base, places, record)
            )
            worst = max(worst, float((hidden.float() - want).abs().max() / want.abs().max()))
            given += int(share.state[1])
    finally:
        torch.cuda.synchronize()
        coordinator.close()
    assert not wrong, f"{wrong} decisions are not the twin's"
    assert worst < TOLERANCE[kind], f"error {worst:.1e}"
    assert given and not int(bell.failed)
    return f"error {worst:.1e}, {given} pairs to the CPU"


def _model(device: str, strategy: str = STRATEGIES[0]) -> Any:
    from tests.cuda import bank

    native_library(device)
    total = bank.LARGE["num_hidden_layers"] * bank.LARGE["num_experts"]
    model = bank._large(bank._settings(total, strategy))
    bank._runtime(model).wait_loaded()
    pool = bank._runtime(model).device_pool()
    assert pool is not None and pool.share is not None, "the CPU gets nothing"
    return model


def _answers(device: str, strategy: str) -> str:
    from tests.cuda import bank

    native_library(device)
    want, model = bank._large_answers(), _model(device, strategy)
    try:
        got = bank._answers(model)
        report = bank._runtime(model).report()["cpu_share"]
    finally:
        model.close()
    differ = sum(a != b for a, b in zip(got, want, strict=True))
    assert not differ, f"{differ} of {len(want)} answers differ"
    # two of the four layers stay in the buffers of the prompts, and miss nothing
    assert report["jobs"] > 100 and not report["failures"], str(report)
    rates = f"link {report['link_rate'] / 1e9:.0f}, CPU {report['cpu_rate'] / 1e9:.0f} GB/s"
    return f"{len(want)} answers; {report['jobs']} jobs, {report['part']:.0%} of the bytes, {rates}"


def _silence(device: str) -> str:
    from benchmarks.gpu_runs import Streams, make_engine, tokenizer_of
    from benchmarks.random_models import make_prompts
    from coterie.core.events import Failed

    model = _model(device)
    try:
        share = model.experts.device_pool().share
        vocab = model.spec.vocab
        engine = make_engine(model, tokenizer_of(vocab), 2, 256)
        prompts = make_prompts(vocab, [20, 20], seed=1)
        streams = Streams(engine)
        both = [streams.send(prompt, 64) for prompt in prompts]
        while min(len(stream.tokens) for stream in both) < 4:
            streams.step()
        share.pause(True)
        begin = time.perf_counter()
        failed: list[Failed] = []
        while len(failed) < len(both) and time.perf_counter() - begin < 5:
            failed += [event for event in engine.step() if isinstance(event, Failed)]
        told = time.perf_counter() - begin
        assert len(failed) == len(both), f"{len(failed)} requests of the step failed"
        assert told < 1.0, f"told after {told:.2f} s"
        codes = {event.code for event in failed}
        assert codes == {"unavailable"}, codes
        # while it is still silent, and afterwards
        for paused in (True, False):
            share.pause(paused)
            after = Streams(engine)
            again = after.send(prompts[1], 24)
            after.drain()
            assert len(again.tokens) == 24
        jobs = share.report()["jobs"]
        more = Streams(engine)
        more.send(prompts[1], 24)
        more.drain()
        assert share.report()["jobs"] > jobs, "the CPU gets nothing any more"
        assert share.report()["failures"] == 1
    finally:
        model.close()
    return f"{len(failed)} requests: {failed[0].code} after {told:.2f} s, then 3 answers"
