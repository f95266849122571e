"""workers/process.py: a restart that fails, and what close() owes when the supervisor broke."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rig import assign, begin, tiny_spec

from coterie.core.events import Failed, Finished
from coterie.workers.base import ReplicaInfo, Report, WorkerSpec
from coterie.workers.process import ProcessReplica, Restart
from coterie.workers.spawn import Child

QUICK = Restart(backoff_s=0.05, max_backoff_s=0.2, hang_s=0)
Spawned = tuple[Child, ReplicaInfo]


def kill(replica: ProcessReplica) -> None:
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)


def test_a_start_that_the_system_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = Child.spawn, [OSError("no more processes")]

    async def spawn(spec: WorkerSpec, path: Path, take: Callable[[Report], None]) -> Spawned:
        if refusals:
            raise refusals.pop()
        return await real(spec, path, take)

    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            listener = await begin(replica, assign("a", max_tokens=200))
            await listener.until(lambda seen: len(seen.tokens()) >= 5)
            monkeypatch.setattr(Child, "spawn", spawn)
            kill(replica)
            assert isinstance(await listener.ended(), Finished) and not refusals
            assert len(listener.tokens()) == 200
        finally:
            await replica.close()

    asyncio.run(test())


def test_close_ends_requests_also_when_the_supervisor_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(failures: int) -> tuple[Child, int]:
        raise RuntimeError("a bug")

    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        monkeypatch.setattr(replica, "_start_again", broken)
        listener = await begin(replica, assign("a", max_tokens=400))
        kill(replica)
        while replica.pid is not None:
            await asyncio.sleep(0.01)
        await replica.close()
        assert isinstance(listener.end, Failed) and listener.end.code == "unavailable"

    asyncio.run(test())
