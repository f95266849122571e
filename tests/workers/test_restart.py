"""workers/supervisor.py: a restart that fails, and what close() owes when the supervisor broke."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.core.events import Failed, Finished
from coterie.workers.contract import ReplicaInfo, WorkerReport, WorkerSpec
from coterie.workers.supervisor import ProcessReplica, RestartPolicy
from coterie.workers.worker_process import WorkerProcess
from tests.helpers.serving.worker_requests import assign, begin, own_workers, tiny_spec

QUICK = RestartPolicy(backoff_s=0.05, max_backoff_s=0.2, hang_s=0)
Spawned = tuple[WorkerProcess, ReplicaInfo]


def kill(replica: ProcessReplica) -> None:
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)


def test_a_start_that_the_system_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusals = WorkerProcess.spawn, [OSError("no more processes")]

    async def spawn(spec: WorkerSpec, path: Path, take: Callable[[WorkerReport], None]) -> Spawned:
        if refusals:
            raise refusals.pop()
        return await real(spec, path, take)

    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            # longer than this process may be away from a core while the worker runs on
            listener = await begin(replica, assign("a", max_tokens=450))
            await listener.until(lambda seen: len(seen.tokens()) >= 5)
            monkeypatch.setattr(WorkerProcess, "spawn", spawn)
            kill(replica)
            assert isinstance(await listener.ended(), Finished) and not refusals
            assert len(listener.tokens()) == 450
        finally:
            await replica.close()

    asyncio.run(test())


@pytest.mark.full
def test_a_changed_model_ends_what_ran_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WorkerProcess.spawn
    specs: list[WorkerSpec] = []

    async def spawn(spec: WorkerSpec, path: Path, take: Callable[[WorkerReport], None]) -> Spawned:
        specs.append(spec)
        child, info = await real(spec, path, take)
        return child, replace(info, fingerprint="other") if len(specs) == 1 else info

    async def test() -> None:
        asked = replace(tiny_spec(), kv_bytes=0, lanes=tiny_spec(max_sequences=2).lanes)
        replica = ProcessReplica(asked, QUICK)
        info = await replica.start()
        try:
            listener = await begin(replica, assign("a", max_tokens=200))
            monkeypatch.setattr(WorkerProcess, "spawn", spawn)
            kill(replica)
            end = await listener.ended()
            assert isinstance(end, Failed) and end.code == "unavailable"
            assert "file changed" in end.message and not replica.healthy()
            assert not own_workers()
            # the file was put back: the next start is the same engine, with the same KV
            while not replica.healthy():
                await asyncio.sleep(0.01)
            assert specs[-1].kv_bytes == info.kv_budget > 0
        finally:
            await replica.close()

    asyncio.run(test())


def test_close_ends_requests_also_when_the_supervisor_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken() -> WorkerProcess:
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
