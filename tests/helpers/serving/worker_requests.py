"""Real engines on tiny random models, for the tests of workers and service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from coterie.core.events import Delta, Event, Failed, Finished, Started
from coterie.core.lane import LaneConfig
from coterie.core.plan import Admitted, Assignment, Rejected
from coterie.core.request import Limits, Sampling
from coterie.workers.contract import Replica, WorkerSpec
from tests.helpers.models.tiny import tiny_checkpoint

LANE = "tiny"
GREEDY = Sampling(temperature=0.0, top_p=1.0, n=1, num_beams=1, seed=7)
SAMPLED = Sampling(temperature=1.0, top_p=0.95, n=1, num_beams=1, seed=11)


def tiny_spec(name: str = "r0", **lane: Any) -> WorkerSpec:
    """A model so small that a step is mostly Python; enough KV for a few dozen sequences."""
    return WorkerSpec(
        name=name,
        model=str(tiny_checkpoint("llama")),
        lanes=(LaneConfig(LANE, **lane),),
        dtype="fp32",
        device="cpu",
        threads=1,
        kv_bytes=16_000_000,
    )


def assign(
    request_id: str,
    prompt: tuple[int, ...] = (0, 40, 41, 42),
    *,
    max_tokens: int = 16,
    sampling: Sampling = GREEDY,
    lane: str = LANE,
    **limits: Any,
) -> Assignment:
    return Assignment(
        request_id=request_id,
        lane=lane,
        prompt_ids=prompt,
        sampling=sampling,
        limits=Limits(max_tokens=max_tokens, ignore_eos=True, **limits),
        adapters=(),
        session="",
        tenant="t",
        deadline=None,
        arrived_at=time.monotonic(),
    )


@dataclass
class Listener:
    """A sink that remembers, and can be waited on."""

    events: list[Event] = field(default_factory=list)
    verdict: Admitted | Rejected | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    @property
    def end(self) -> Finished | Failed | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, (Finished, Failed)) else None

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    def tokens(self, choice: int = 0) -> list[int]:
        return [t for delta in self.deltas if delta.choice == choice for t in delta.token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.choice == choice)

    async def until(self, condition: Callable[[Listener], bool], timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def ended(self, timeout_s: float = 60) -> Finished | Failed:
        await self.until(lambda self: self.end is not None, timeout_s)
        assert self.end is not None
        self.check()
        return self.end

    def check(self) -> None:
        """What every request's events must look like."""
        assert sum(isinstance(event, Started) for event in self.events) <= 1
        assert sum(isinstance(event, (Finished, Failed)) for event in self.events) == 1
        if isinstance(self.end, Finished):
            assert isinstance(self.events[0], Started)
            tokens = sum(len(delta.token_ids) for delta in self.deltas)
            assert self.end.usage.completion_tokens == tokens


async def run(replica: Replica, assignment: Assignment) -> Listener:
    """Submit and wait for the end."""
    listener = await begin(replica, assignment)
    if isinstance(listener.verdict, Admitted):
        await listener.ended()
    return listener


async def begin(replica: Replica, assignment: Assignment) -> Listener:
    listener = Listener()
    listener.verdict = await replica.submit(assignment, listener)
    return listener


def own_workers() -> list[psutil.Process]:
    """Worker processes of this very process; servers that other tests keep running do not count."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "coterie.workers.child" in child.cmdline():
                found.append(child)
    return found
