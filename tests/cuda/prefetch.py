"""What a device reads ahead over its link.

layer: the tiles of a guess are copied from RAM while other work runs, and a layer of random experts
reads them from the buffer and the others where they lie, against torch. answers: one stream of a
model none of whose experts have slots has the tokens of all resident, and every guess is counted.
hints: the same with a quarter in slots, where nothing is copied and the CPU gets hints alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from coterie.core.moe import MoeSettings
from tests.cuda.share import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOLERANCE,
    TOP_K,
    native_library,
    random_records,
)
from tests.cuda.suite import Check, NotHere


def checks(device: str) -> Iterator[Check]:
    for kind in TOLERANCE:
        yield Check("prefetch", f"prefetch/layer/{kind}", partial(_layer, device, kind))
    yield Check("prefetch", "prefetch/answers", partial(_answers, device))
    yield Check("prefetch", "prefetch/hints", partial(_hints, device))


@torch.inference_mode()
def _layer(device: str, kind: str) -> str:
    if device != "cuda":
        raise NotHere("needs CUDA")
    from coterie.kernels.cpu.share import HINT_WORDS
    from coterie.kernels.expert_gate import GateRule
    from coterie.kernels.triton import expert_gemv as kernels
    from coterie.kernels.triton.link_prefetch import HEAD, SUMS, TILE, TURN, LinkPrefetch
    from coterie.kernels.triton.sizes import pair_sizes

    record, here = random_records(kind, EXPERTS, HIDDEN, INNER)
    there = here.cpu().pin_memory()
    away = (there.data_ptr() - here.data_ptr()) // 16
    places = torch.arange(EXPERTS, device=device) * (here.shape[1] // 16)
    resident = kernels.ExpertPool(here.view(-1), places, record)
    pool = kernels.ExpertPool(here.view(-1), places + away, record)
    told = torch.zeros(SUMS, dtype=torch.int64).pin_memory()
    hint = torch.zeros(HINT_WORDS, dtype=torch.int32).pin_memory()
    ahead = LinkPrefetch.new(pool.base, torch.zeros_like(here[0]), record, 3, told, hint)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    x, gain = (torch.randn((1, HIDDEN), device=device).to(dtype) for _ in range(2))
    gate = torch.randn((EXPERTS, HIDDEN), device=device).to(dtype)
    tiers = torch.ones(EXPERTS, dtype=torch.int8, device=device)
    scratch = (
        torch.empty(EXPERTS, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    slots = torch.zeros(1, device=device).long()
    ids = torch.arange(TOP_K, dtype=torch.int32, device=device)[None]
    following = kernels.NextGate(gain[0], gate, None, tiers, scratch, ahead.layer(1))
    own = torch.empty((1, EXPERTS), device=device), torch.zeros_like(scratch[1])
    out, rule = kernels.RoutedRows.empty(1, TOP_K, device), GateRule(TOP_K, True)
    kernels.route(x, gain[0], 1e-6, gate.flip(0), rule, None, places, own, out, following=following)
    torch.cuda.synchronize()
    guess, order = int(ahead.state[1, 1]), kernels.guess_torch(x, gain[0], gate, tiers, None)
    assert [guess, *hint[3 : TOP_K + 2].tolist()] == order[:TOP_K], "not the twin's guess"
    assert hint[:3].tolist() == [1, 1, TOP_K - 1], "another hint"
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        ahead.start(1, pool.places)
    torch.cuda.synchronize()
    tiles: int = INNER // TILE.value
    flags = ahead.state[1, HEAD.value :]
    assert int((flags == ahead.state[1, TURN.value]).sum()) == tiles, "tiles are missing"
    buffer = ahead.buffer
    assert buffer is not None
    same = buffer == here[guess]
    scales = slice(record.gate_up_scales_at, record.down_scales_at)
    assert bool(same[: record.gate_up_bytes].all() and same[scales].all()), "other bytes"
    # of every second tile neither the bank nor the buffer has what the other has
    flags[::2] -= 1
    for memory, first in ((there[guess], 1), (buffer, 0)):
        for part in (*memory[: record.gate_up_bytes].chunk(2), *memory[scales].chunk(2)):
            if len(part):
                part.view(tiles, -1)[first::2] = 255
    ids[0, 0], ids[0, 1:] = guess, torch.arange(1, TOP_K, device=device) + guess
    ids %= EXPERTS
    weights = torch.rand((1, TOP_K), device=device)
    routed = kernels.RoutedRows(ids, pool.places[ids.long()], weights, weights[:, 0])
    sizes = pair_sizes(record)
    acts = torch.full((TOP_K, INNER), float("nan"), dtype=dtype, device=device)
    hidden = torch.zeros_like(x)
    kernels.pair_gate_up(x, routed, pool, acts, sizes, guess=ahead.layer(1))
    kernels.pair_down(acts, routed, pool, hidden, sizes)
    want = kernels.experts_torch(x, ids, weights, resident)
    error = float((hidden.float() - want).abs().max() / want.abs().max())
    assert error < TOLERANCE[kind], f"error {error:.1e}"
    # the next layer has no guess: it counts this one's
    ahead.start(2, pool.places, (ids, slots))
    torch.cuda.synchronize()
    assert told.tolist() == [1, 1, tiles // 2, 0], str(told.tolist())
    return f"error {error:.1e}, {tiles} tiles"


def _answers(device: str) -> str:
    from tests.cuda import bank

    report = _report_behind_answers(device, bank._settings(0, "cpu_only"))["prediction"]
    # four answers of 95 steps each: of the second layer of four, and of the third unless all of its
    # experts are still in the buffers of the prompt
    assert report["prefetching"] and report["predictions"] >= 4 * 95, str(report)
    assert report["useful_prefetches"] > report["predictions"] / 2, str(report)
    return f"{report['slot_overlap']:.0%} of the guesses right"


def _hints(device: str) -> str:
    from tests.cuda import bank

    total = bank.LARGE["num_hidden_layers"] * bank.LARGE["num_experts"]
    settings = replace(bank._settings(total, "hot_cached_static"), predict="auto")
    report = _report_behind_answers(device, settings)
    share, prediction = report["cpu_share"], report["prediction"]
    assert not prediction["prefetching"] and not prediction["prefetched"], str(prediction)
    assert share["jobs"] > 300 and share["hinted"] > share["jobs"] / 2, str(share)
    return f"{share['hinted'] / share['jobs']:.1f} experts of a job were hinted"


def _report_behind_answers(device: str, settings: MoeSettings) -> Mapping[str, Any]:
    """Of a model whose answers with these settings are those with everything on the device."""
    native_library(device)
    from benchmarks.gpu_runs import drive, make_engine, tokenizer_of
    from benchmarks.random_models import make_prompts
    from tests.cuda import bank

    found = []
    for placement in (None, settings):
        model = bank._large(placement)
        try:
            if placement is not None:
                # until then steps wait for what they use, and read nothing ahead
                bank._runtime(model).wait_loaded()
            engine = make_engine(model, tokenizer_of(model.spec.vocab), 1, 256)
            prompts = [make_prompts(model.spec.vocab, [32], seed=n) for n in range(4)]
            found.append([drive(engine, each, 96).streams[0].tokens for each in prompts])
            report = bank._runtime(model).report() if placement is not None else {}
        finally:
            model.close()
    differ = sum(a != b for a, b in zip(*found, strict=True))
    assert not differ, f"{differ} of {len(found[0])} answers differ"
    return report
