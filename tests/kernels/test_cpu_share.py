"""The native thread that computes the CPU's share of a step, against torch on random records."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.kernels import cpu_share
from coterie.kernels.cpu.build import native
from coterie.kernels.cpu.compile import find_compiler
from coterie.kernels.cpu.share import (
    HINT_WORDS,
    ShareBell,
    ShareCoordinator,
    ShareCounts,
    ShareRecords,
    share_torch,
)
from coterie.kernels.device_record import DeviceRecord

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
pytestmark = needs_compiler

# integers of 15 bits stand for the input of int8 and int4
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-5, "int8": 1e-3, "int4": 1e-3}
# whole vectors; groups that are a part of one
SHAPES = ((256, 128), (160, 96))
EXPERTS = 5


def bell_of(rows: int, pairs: int, hidden: int) -> ShareBell:
    memory = torch.zeros(ShareBell.nbytes(rows, pairs, hidden), dtype=torch.uint8)
    return ShareBell(memory, rows, pairs, hidden)


def random_records(kind: str, hidden: int, inner: int) -> ShareRecords:
    """Expert 3 is missing."""
    record = DeviceRecord(kind, hidden, inner)
    rows = torch.randint(0, 256, (EXPERTS, record.nbytes), dtype=torch.uint8)
    matrices, scales = record.gate_up_scales_at, record.nbytes - record.gate_up_scales_at
    for own in rows:
        if kind in ("fp32", "bf16"):
            dtype = torch.float32 if kind == "fp32" else torch.bfloat16
            values = torch.randn(matrices // dtype.itemsize) * 0.1
            own[:matrices] = values.to(dtype).view(torch.uint8)
        else:
            values = torch.rand(scales // 2) * (1e-3 if kind == "int8" else 2e-2)
            if kind == "int4":
                values[1::2] *= -7
            own[matrices:] = values.half().view(torch.uint8)
    return ShareRecords([None if e == 3 else own for e, own in enumerate(rows)], record)


@contextmanager
def answering(
    bell: ShareBell, layers: list[ShareRecords], threads: int = 2
) -> Iterator[ShareCoordinator]:
    library = native()
    assert library is not None
    coordinator = ShareCoordinator(library, bell, layers, threads)
    try:
        yield coordinator
    finally:
        coordinator.close()


def random_job(rows: int, inner: int, hidden: int) -> tuple[Tensor, Tensor]:
    count = int(torch.randint(1, 13, ()))
    pairs = torch.zeros((count, 4), dtype=torch.int32)
    pairs[:, 0] = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (count,))]
    pairs[:, 1] = torch.randint(0, rows, (count,))
    pairs[:, 2] = 32 * torch.randint(1, inner // 32 + 1, (count,))
    pairs[:, 3] = torch.rand(count).view(torch.int32)
    return torch.randn(rows, hidden), pairs


def ring(bell: ShareBell, x: Tensor, pairs: Tensor, number: int, layer: int = 0) -> None:
    bell.x[: len(x)] = x
    bell.pairs[: len(pairs)] = pairs
    bell.job.copy_(torch.tensor([layer, len(x), len(pairs)], dtype=torch.int32))
    bell.rung.fill_(number)


def answers(bell: ShareBell, number: int, seconds: float = 30.0) -> bool:
    answered, end = bell.answered.numpy(), time.perf_counter() + seconds
    while answered[0] != number and time.perf_counter() < end:
        time.sleep(1e-4)
    return bool(answered[0] == number)


@pytest.mark.parametrize("kind", TOLERANCE)
def test_share_is_that_of_torch(kind: str) -> None:
    torch.seed()
    for hidden, inner in SHAPES:
        bell, layers = bell_of(9, 9 * 12, hidden), [random_records(kind, hidden, inner)] * 2
        with answering(bell, layers) as coordinator:
            for number, rows in enumerate((1, 2, 9), start=1):
                x, pairs = random_job(rows, inner, hidden)
                ring(bell, x, pairs, number, layer=1)
                assert answers(bell, number)
                want = share_torch(layers[1], x, pairs)
                error = (bell.out(number, rows) - want).abs().max() / want.abs().max()
                assert error < TOLERANCE[kind], (hidden, rows)
            found = coordinator.counts()
            assert found.jobs == 3 and found.nbytes > 0 and found.busy_ns > 0


def test_rows_do_not_depend_on_one_another() -> None:
    bell, layer = bell_of(5, 12, 160), random_records("int4", 160, 96)
    pairs = torch.tensor([[e, row, 64, 0] for e in (0, 4) for row in range(5)], dtype=torch.int32)
    pairs[:, 3] = torch.rand(len(pairs)).view(torch.int32)
    x = torch.randn(5, 160)
    with answering(bell, [layer]):
        ring(bell, x, pairs, 1)
        assert answers(bell, 1)
        together = bell.out(1, 5).clone()
        for row in range(5):
            own = pairs[pairs[:, 1] == row]
            own[:, 1] = 0
            ring(bell, x[row : row + 1], own, row + 2)
            assert answers(bell, row + 2)
            assert torch.equal(bell.out(row + 2, 1)[0], together[row])


def test_what_makes_no_sense_is_left_out() -> None:
    bell, layer = bell_of(2, 12, 160), random_records("fp32", 160, 96)
    one = np.float32(1.0).view(np.int32)
    good = [0, 1, 32, one]
    bad = [[3, 0, 32, one], [EXPERTS, 0, 32, one], [-1, 0, 32, one], [0, 2, 32, one],
           [0, 0, 33, one], [0, 0, 128, one], [0, -1, 32, one]]  # fmt: skip
    pairs, x = torch.tensor([*bad, good], dtype=torch.int32), torch.randn(2, 160)
    with answering(bell, [layer]) as coordinator:
        ring(bell, x, pairs, 1)
        assert answers(bell, 1)
        want = share_torch(layer, x, pairs[-1:])
        out = bell.out(1, 2)
        assert torch.allclose(out, want, atol=1e-4) and not out[0].any()
        # no such layer, too many rows: nobody waits for them
        ring(bell, x, pairs[-1:], 2, layer=7)
        assert not answers(bell, 2, seconds=0.05)
        ring(bell, x, pairs[-1:], 3)
        assert answers(bell, 3)
        assert coordinator.counts().refused == 1


def is_told(bell: ShareBell, number: int, rows: int, seconds: float = 30.0) -> bool:
    """Whether the answer is there, as the device sees it."""
    numbers, end = bell.answer_of(number, rows)[:, :, 1].numpy(), time.perf_counter() + seconds
    while not (numbers == number).all() and time.perf_counter() < end:
        time.sleep(1e-5)
    return bool((numbers == number).all())


def answers_of_many(kind: str, threads: int, count: int, repeats: int) -> tuple[int, ShareCounts]:
    """So many jobs at least, and until so many parts were computed again: how many answers are not
    those of one thread alone, and the counts."""
    hidden, inner = 1024, 512
    bell, layers = bell_of(12, 36, hidden), [random_records(kind, hidden, inner) for _ in "ab"]
    # three in turns, so that a space has another one each time, and one with more rows than a space
    jobs = [(i % 2, *random_job(rows, inner, hidden)) for i, rows in enumerate((1, 2, 1, 12))]
    wanted = []
    with answering(bell, layers, threads=1):
        for number, (layer, x, pairs) in enumerate(jobs, start=1):
            ring(bell, x, pairs, number, layer)
            assert answers(bell, number)
            wanted.append(bell.out(number, len(x)).clone())
    with answering(bell, layers, threads) as coordinator:
        deadline, number, changed = time.perf_counter() + 60, int(bell.rung), 0
        while coordinator.counts().repeated < repeats or number < count:
            assert time.perf_counter() < deadline, coordinator.counts()
            number += 1
            # the large one now and then: it waits for those that are away
            own = number % 3 if number % 50 else 3
            layer, x, pairs = jobs[own]
            ring(bell, x, pairs, number, layer)
            assert is_told(bell, number, len(x)), (changed, coordinator.counts())
            changed += not torch.equal(bell.out(number, len(x)), wanted[own])
            # as the device does behind the answer
            bell.x.zero_()
        return changed, coordinator.counts()


@pytest.mark.parametrize("kind", ["int4", "bf16"])
def test_parts_of_threads_that_lost_their_core_are_computed_again(kind: str) -> None:
    """More threads than their one core has: they lose it in the middle of jobs."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        changed, counts = answers_of_many(kind, threads=5, count=300, repeats=50)
    finally:
        os.sched_setaffinity(0, cores)
    assert changed == 0 and counts.refused == 0


@pytest.mark.full
@pytest.mark.timeout(600)
def test_answers_where_threads_lose_their_core_everywhere(tmp_path: Path) -> None:
    """Also in front of a mark, in the middle of an answer, and for longer than few spaces last."""
    header, root = Path(__file__).with_name("losing_cores.h"), Path(__file__).resolve().parents[2]
    program = (
        "from coterie.kernels.cpu import share\n"
        "from tests.kernels.test_cpu_share import answers_of_many\n"
        "for kind, share.JOB_SPACES in (('int4', 32), ('int8', 2), ('bf16', 1)):\n"
        "    print(*answers_of_many(kind, threads=4, count=2000, repeats=1000))\n"
    )
    flags = f"'-DCT_LOSING_CORES=\"{header}\"'"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "COTERIE_HOME": str(tmp_path), "COTERIE_CXXFLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 3 and all(line.startswith("0 ") for line in told), told


def test_hints_are_read_and_change_nothing() -> None:
    bell, layers = bell_of(1, 12, 160), [random_records("int4", 160, 96)] * 3
    x, _ = random_job(1, 96, 160)
    pairs = torch.tensor([[e, 0, 96, 0] for e in (4, 0, 2)], dtype=torch.int32)
    pairs[:, 3] = torch.rand(len(pairs)).view(torch.int32)
    with answering(bell, layers) as coordinator:
        ring(bell, x, pairs, 1, layer=1)
        assert answers(bell, 1)
        plain = bell.out(1, 1).clone()
        # experts that the job has, that it has not, and that nobody has; and hints of no sense
        hints = {2: [4, 1, 4, 2, -1], 1: [99, 3, 77, -7, 2], 0: [-5, 4]}
        for named, told in hints.items():
            # in turns with a hint of an expert that the job has not, and on two layers in turns; as
            # in a step, a hint comes before the job of the layer in front of it. A thread that
            # did not run in time has none
            found: list[int] = []
            deadline = time.perf_counter() + 60
            while len(found) % 2 or found[-6:] != [0, named] * 3:
                assert time.perf_counter() < deadline, found[-20:]
                number, layer = int(bell.rung) + 1, 1 + len(found) % 2
                words = [1, 1] if len(found) % 2 else told
                rest = [-1] * (HINT_WORDS - 2 - len(words))
                bell.hint.copy_(torch.tensor([3 - layer, number, *words, *rest]))
                before = coordinator.counts().hinted
                coordinator.wake()
                ring(bell, x, pairs, number, layer=layer)
                assert answers(bell, number)
                assert torch.equal(bell.out(number, 1), plain)
                found.append(coordinator.counts().hinted - before)
                time.sleep(5e-4)
            assert set(found) <= {0, named}


def test_sleeps_when_nothing_comes_and_wakes_up() -> None:
    bell, layer = bell_of(1, 12, 160), random_records("fp32", 160, 96)
    x, pairs = random_job(1, 96, 160)
    with answering(bell, [layer]) as coordinator:
        ring(bell, x, pairs, 1)
        assert answers(bell, 1)
        deadline = time.perf_counter() + 30
        while coordinator.counts().naps == 0 and time.perf_counter() < deadline:
            time.sleep(0.01)
        begin, spent = time.perf_counter(), time.process_time()
        time.sleep(0.5)
        busy = (time.process_time() - spent) / (time.perf_counter() - begin)
        assert coordinator.counts().naps > 0 and busy < 0.3
        coordinator.wake()
        ring(bell, x, pairs, 2)
        assert answers(bell, 2)
        # also without a wake-up
        time.sleep(0.01)
        ring(bell, x, pairs, 3)
        assert answers(bell, 3)


def test_paused_answers_nothing_and_then_the_last_job() -> None:
    bell, layer = bell_of(1, 12, 160), random_records("fp32", 160, 96)
    x, pairs = random_job(1, 96, 160)
    with answering(bell, [layer]) as coordinator:
        coordinator.pause(True)
        ring(bell, x, pairs, 1)
        ring(bell, x, pairs, 2)
        assert not answers(bell, 2, seconds=0.05)
        coordinator.pause(False)
        coordinator.wake()
        assert answers(bell, 2)
        assert coordinator.counts().jobs == 1


def test_thread_ends_with_its_owner() -> None:
    bell, layer = bell_of(1, 12, 160), random_records("fp32", 160, 96)
    library = native()
    assert library is not None
    before = len(os.listdir("/proc/self/task"))
    coordinator = ShareCoordinator(library, bell, [layer], 2)
    assert len(os.listdir("/proc/self/task")) == before + 2
    del coordinator
    gc.collect()
    assert len(os.listdir("/proc/self/task")) == before


def test_its_benchmark_tells_fixed_cost_and_rate(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    assert cpu_share.main(["--smoke", "--kinds", "int4", "bf16", "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert told["limit_bytes_s"] > 0 and set(told["kinds"]) == {"int4", "bf16"}
    for found in told["kinds"].values():
        for name in ("seconds", "hinted_seconds"):
            assert all(seconds > 0 for seconds in found[name].values())
    # of a line that is known: 20 us, and 4 GB/s
    known = {count: 2e-5 + count * 10**6 / 4e9 for count in cpu_share.COUNTS}
    fixed, rate = cpu_share.fitted(10**6, known)
    assert fixed == pytest.approx(2e-5) and rate == pytest.approx(4e9)
