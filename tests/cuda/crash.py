"""A worker that is killed in the middle of 8 streams, with a quarter of its experts on the device.

The process gets SIGKILL; another one continues every stream behind the tokens that its client has.
In fp32 the tokens are those of an undisturbed run. In bf16 and int4 every stream is completed, and
the check says how many of them differ: the prompt and the emitted tokens are computed again in one
step, whose products may round otherwise than those of single tokens, as may those of other batches.

pipe: over a pipe (`pipe_worker`). process: with `ProcessReplica`, where ZeroMQ and msgspec are.
share: over a pipe, and the CPU computes a part of the experts that are not on the device.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.moe import random_moe
from coterie.core.events import Delta, Event, Failed, Finished
from coterie.core.lane import LaneConfig
from coterie.core.moe import MoeSettings
from coterie.core.plan import Admitted, Assignment
from coterie.core.request import Limits, Sampling
from coterie.workers.contract import WorkerSpec
from tests.cuda.pipe_worker import PipeReplica
from tests.cuda.share import native_library
from tests.cuda.suite import Check, NotHere

KINDS = ("fp32", "bf16", "int4")
STREAMS, OUTPUT, KILLED_AT = 8, 96, 24
# four layers of Qwen3-30B-A3B, with fewer words
LARGE = random_moe.Shape(
    layers=4, experts=128, top_k=8, hidden=2048, intermediate=768, heads=32, kv_heads=4,
    head_dim=128, vocab=32768, spread=10.0,
)  # fmt: skip
SMALL = random_moe.Shape(
    layers=4, experts=16, top_k=4, hidden=64, intermediate=32, heads=4, kv_heads=2, head_dim=16,
    vocab=512, spread=10.0,
)  # fmt: skip
# of a start, or of all streams
LIMIT_S = 150.0


def checks(device: str) -> Iterator[Check]:
    for kind in KINDS:
        yield Check(f"crash {kind}", f"crash/{kind}/pipe", partial(_check, device, kind, "pipe"))
    yield Check("crash process", "crash/fp32/process", partial(_check, device, "fp32", "process"))
    # the CPU computes a part of the missing experts, as it does where nobody says otherwise
    yield Check("crash share", "crash/fp32/share", partial(_check, device, "fp32", "share"))


@cache
def _checkpoint(device: str) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    # the folder is removed when the process ends
    folder = tempfile.TemporaryDirectory(prefix="coterie-crash-")
    shape = LARGE if device == "cuda" else SMALL
    return folder, random_moe.write(Path(folder.name) / "model", shape)


def _check(device: str, kind: str, transport: str) -> str:
    if transport == "process" and (find_spec("zmq") is None or find_spec("msgspec") is None):
        raise NotHere("needs ZeroMQ and msgspec")
    if transport == "share":
        native_library(device)  # the worker inherits what it says
    spec = WorkerSpec(
        name="crash",
        model=str(_checkpoint(device)[1]),
        lanes=(LaneConfig("crash", context=512, max_sequences=STREAMS, prefix_cache=False),),
        dtype=kind,
        device=device,
        threads=0 if device == "cuda" else 1,
        kv_bytes=1 << (31 if device == "cuda" else 25),
        dispatch=MoeSettings(
            strategy="adaptive", device_budget="25%", warmup="none", predict="off"
        ),
    )
    return asyncio.run(_kill_in_the_middle(spec, transport))


async def _kill_in_the_middle(spec: WorkerSpec, transport: str) -> str:
    replica: Any = PipeReplica(spec)
    if transport == "process":
        from coterie.workers.supervisor import ProcessReplica, RestartPolicy

        replica = ProcessReplica(spec, RestartPolicy(backoff_s=0.05))
    async with asyncio.timeout(LIMIT_S):
        await replica.start()
    try:
        want = await _tokens(await _sent(replica, "whole"))
        streams = await _sent(replica, "killed")
        async with asyncio.timeout(LIMIT_S):
            while min(len(stream.tokens) for stream in streams) < KILLED_AT:
                await asyncio.sleep(0.001)
        ended = [stream for stream in streams if stream.end is not None]
        assert not ended, f"{len(ended)} streams ended before the worker was killed"
        killed, had = replica.pid, [len(stream.tokens) for stream in streams]
        os.kill(killed, signal.SIGKILL)
        begin = time.perf_counter()
        got = await _tokens(streams)
        spent = time.perf_counter() - begin
        stats = replica.stats()
        # the next request finds a whole worker
        after = await _tokens((await _sent(replica, "after"))[:1])
    finally:
        await replica.close()
    assert replica.pid != killed and stats["restarts"] == 1
    assert stats["requests_continued"] == STREAMS, stats
    differ, changed = _compared(want, got)
    if spec.dtype == "fp32":
        assert not differ, f"{differ} of {STREAMS} streams differ"
        assert after[0] == want[0]
    pause = max(stream.longest_pause_s for stream in streams)
    return (
        f"killed behind {min(had)} to {max(had)} of {OUTPUT} tokens; {STREAMS} streams complete "
        f"{spent:.1f} s later (pause {pause:.1f} s), {differ} differ from an undisturbed run, in "
        f"{changed:.1%} of all tokens"
    )


def _compared(want: Sequence[list[int]], got: Sequence[list[int]]) -> tuple[int, float]:
    """How many differ; and the share of tokens from the first different one on."""
    differ = changed = 0
    for a, b in zip(want, got, strict=True):
        assert len(a) == len(b) == OUTPUT, f"{len(b)} tokens instead of {len(a)}"
        first = next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), OUTPUT)
        differ, changed = differ + (first < OUTPUT), changed + OUTPUT - first
    return differ, changed / (len(want) * OUTPUT)


class _Stream:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: Finished | Failed | None = None
        self.done = asyncio.Event()
        self.longest_pause_s, self._at = 0.0, time.perf_counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Delta):
            now = time.perf_counter()
            if self.tokens:
                self.longest_pause_s = max(self.longest_pause_s, now - self._at)
            self._at = now
            self.tokens += event.token_ids
        elif isinstance(event, Finished | Failed):
            assert self.end is None, "it ended twice"
            self.end = event
            self.done.set()


async def _sent(replica: Any, name: str) -> list[_Stream]:
    """8 prompts: greedy and drawn with their own seeds, in turn."""
    streams = [_Stream() for _ in range(STREAMS)]
    for number, stream in enumerate(streams):
        verdict = await replica.submit(_assignment(name, number), stream)
        assert isinstance(verdict, Admitted), verdict
    return streams


def _assignment(name: str, number: int) -> Assignment:
    drawn = Sampling(temperature=0.8, top_p=0.95, n=1, num_beams=1, seed=number)
    length = 9 + 5 * number
    return Assignment(
        request_id=f"{name}-{number}",
        lane="crash",
        prompt_ids=tuple((7 + 31 * number + 13 * at) % 500 for at in range(length)),
        sampling=replace(drawn, temperature=0.0, top_p=1.0) if number % 2 else drawn,
        limits=Limits(max_tokens=OUTPUT, ignore_eos=True),
        adapters=(),
        session="",
        tenant="",
        deadline=None,
        arrived_at=time.monotonic(),
    )


async def _tokens(streams: Sequence[_Stream]) -> list[list[int]]:
    async with asyncio.timeout(LIMIT_S):
        for stream in streams:
            await stream.done.wait()
    failed = [stream.end for stream in streams if not isinstance(stream.end, Finished)]
    assert not failed, f"{len(failed)} streams failed: {failed[0]}"
    return [stream.tokens for stream in streams]
