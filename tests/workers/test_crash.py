"""kill -9 of real worker processes: a pause for the client, never another token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from coterie.core.events import Failed, Finished
from coterie.core.plan import Admitted, Assignment
from coterie.workers.supervisor import ProcessReplica, RestartPolicy
from tests.helpers.serving.concurrent_requests import QUICK, eight, kill, said, until_died
from tests.helpers.serving.worker_requests import (
    GREEDY,
    LANE,
    SAMPLED,
    Listener,
    assign,
    begin,
    own_workers,
    run,
    tiny_spec,
)


async def until_healthy(replica: ProcessReplica, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not replica.healthy():
            await asyncio.sleep(0.01)


async def eight_midway(replica: ProcessReplica) -> list[Listener]:
    """All have begun and none has ended. On a busy machine the worker may be done with the first
    before this process has sent the last: then once more."""
    for attempt in range(5):
        listeners = await asyncio.gather(*(begin(replica, a) for a in eight(f"k{attempt}")))
        for listener in listeners:
            await listener.until(lambda seen: len(seen.tokens()) >= 20)
        if all(listener.end is None for listener in listeners):
            return listeners
        for listener in listeners:
            await listener.ended()
    raise AssertionError("eight streams never ran at once")


def test_kill_in_the_middle_of_eight_streams_changes_no_token() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            undisturbed = await asyncio.gather(*(run(replica, a) for a in eight("u")))
            listeners = await eight_midway(replica)
            pid = kill(replica)
            await until_died(replica, pid)
            assert not replica.healthy() and replica.retry_after_s() > 0
            had = [len(listener.tokens()) for listener in listeners]
            for listener in listeners:
                await listener.ended()
            assert [said(item) for item in listeners] == [said(item) for item in undisturbed]
            # something was really continued
            assert all(len(item.tokens()) > n for item, n in zip(listeners, had, strict=True))
            logprobs = [delta.logprobs for delta in listeners[4].deltas]
            assert logprobs == [delta.logprobs for delta in undisturbed[4].deltas]
            assert replica.stats()["restarts"] == 1 and replica.healthy()
            assert replica.in_flight() == 0
        finally:
            await replica.close()

    asyncio.run(test())


def more_than(count: int) -> Callable[[Listener], bool]:
    return lambda listener: len(listener.tokens()) > count


@pytest.mark.full
def test_two_crashes_then_alone_then_a_typed_failure() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            undisturbed = (await run(replica, assign("u", max_tokens=600))).tokens()
            doomed = await begin(replica, assign("a", max_tokens=600))
            other = await begin(replica, assign("b", max_tokens=600))
            for _ in range(2):
                seen = len(doomed.tokens()), len(other.tokens())
                await doomed.until(more_than(seen[0] + 5))
                await other.until(more_than(seen[1] + 5))
                await until_died(replica, kill(replica))
            # both were present twice: the first runs alone, the second waits for it
            n, m = len(doomed.tokens()), len(other.tokens())
            await doomed.until(lambda item: len(item.tokens()) > n + 5)
            assert len(other.tokens()) == m
            assert not replica.healthy()
            kill(replica)
            end = await doomed.ended()
            assert isinstance(end, Failed) and end.code == "worker_crashed"
            # who was not running then gets its own chance, and finishes
            assert isinstance(await other.ended(), Finished)
            assert other.tokens() == undisturbed
            assert replica.healthy() and replica.in_flight() == 0
        finally:
            await replica.close()

    asyncio.run(test())


@pytest.mark.full
def test_restarts_back_off() -> None:
    assert [RestartPolicy(0.5, 30).pause_s(n) for n in (1, 2, 3, 7, 40)] == [
        0.5,
        1.0,
        2.0,
        30.0,
        30.0,
    ]

    async def test() -> None:
        replica = ProcessReplica(
            tiny_spec(), RestartPolicy(backoff_s=0.3, max_backoff_s=60, hang_s=0)
        )
        await replica.start()
        gaps = []
        try:
            for _ in range(2):
                pid = kill(replica)
                await until_died(replica, pid)
                begun = time.monotonic()
                # a new process appears only after the pause
                while not own_workers():
                    await asyncio.sleep(0.005)
                gaps.append(time.monotonic() - begun)
                await until_healthy(replica)
        finally:
            await replica.close()
        assert gaps[0] >= 0.25 and gaps[1] >= 0.55

    asyncio.run(test())


@pytest.mark.full
def test_a_silent_worker_is_killed_and_replaced() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), RestartPolicy(0.05, 0.2, hang_s=1.0))
        await replica.start()
        try:
            undisturbed = (await run(replica, assign("u", max_tokens=400))).tokens()
            listener = await begin(replica, assign("a", max_tokens=400))
            await listener.until(lambda seen: len(seen.tokens()) >= 20)
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGSTOP)
            assert isinstance(await listener.ended(), Finished)
            assert listener.tokens() == undisturbed
            assert replica.stats()["restarts"] == 1
            # idle silence is not a hang
            await asyncio.sleep(1.6)
            assert replica.stats()["restarts"] == 1 and replica.healthy()
        finally:
            await replica.close()

    asyncio.run(test())


@pytest.mark.full
def test_a_silent_worker_is_replaced_though_its_requests_have_ended() -> None:
    """Deadlines end requests without the worker: that must not hide that it is hung."""

    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), RestartPolicy(0.05, 0.2, hang_s=1.2))
        await replica.start()
        try:
            hung = replica.pid
            assert hung is not None
            os.kill(hung, signal.SIGSTOP)
            for number in range(12):
                if replica.pid != hung:
                    break
                asked = replace(assign(f"a{number}"), deadline=time.monotonic() + 0.02)
                end = (await begin(replica, asked)).end
                assert isinstance(end, Finished) and end.choices == ("timeout",)
            assert replica.pid != hung
            await until_healthy(replica)
            again = await begin(replica, assign("after"))
            assert isinstance(await again.ended(), Finished) and len(again.tokens()) == 16
        finally:
            await replica.close()

    asyncio.run(test())


@pytest.mark.full
def test_drain_survives_a_crash() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        listener = await begin(replica, assign("a", max_tokens=300))
        await listener.until(lambda seen: len(seen.tokens()) >= 10)
        draining = asyncio.ensure_future(replica.drain(60))
        await asyncio.sleep(0)
        pid = kill(replica)
        await draining
        assert isinstance(listener.end, Finished) and len(listener.tokens()) == 300
        assert replica.pid != pid
        await replica.close()
        assert not own_workers()

    asyncio.run(test())


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "auto"])
def test_how_often_a_token_differs_after_a_crash(dtype: str, default_model_path: Path) -> None:
    """Prints the rate. Only fp32 promises zero; the others are zero as long as every kernel's rows
    depend neither on the batch nor on how a prompt was cut into chunks."""

    def work(prefix: str) -> list[Assignment]:
        kinds = [GREEDY if i % 2 else replace(SAMPLED, seed=i) for i in range(8)]
        return [
            assign(f"{prefix}{i}", tuple(range(500 + i, 530 + 9 * i)), sampling=kind, max_tokens=48)
            for i, kind in enumerate(kinds)
        ]

    async def test() -> tuple[int, int]:
        spec = replace(tiny_spec(), model=str(default_model_path), dtype=dtype, threads=2,
                       kv_bytes=400_000_000)  # fmt: skip
        replica = ProcessReplica(spec, QUICK)
        await replica.start()
        try:
            undisturbed = await asyncio.gather(*(run(replica, a) for a in work("u")))
            listeners = await asyncio.gather(*(begin(replica, a) for a in work("k")))
            for listener in listeners:
                await listener.until(lambda seen: len(seen.tokens()) >= 12, timeout_s=200)
            await until_died(replica, kill(replica))
            for listener in listeners:
                await listener.ended(timeout_s=200)
        finally:
            await replica.close()
        pairs = list(zip(undisturbed, listeners, strict=True))
        differing = sum(
            a != b for one, two in pairs for a, b in zip(one.tokens(), two.tokens(), strict=True)
        )
        return differing, sum(len(one.tokens()) for one, _ in pairs)

    differing, total = asyncio.run(test())
    print(f"\n{dtype}: {differing} of {total} tokens differ after a crash")
    assert total == 8 * 48
    if dtype == "fp32":
        assert differing == 0


PARENT = """
import asyncio, sys
from tests.helpers.serving.worker_requests import tiny_spec
from coterie.workers.supervisor import ProcessReplica

async def main():
    replica = ProcessReplica(tiny_spec())
    await replica.start()
    print(replica.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_child_dies_with_its_parent(
    private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an empty home has no compiled kernels, and they do not matter here
    monkeypatch.setenv("COTERIE_NATIVE", "0")
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[2]))
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running() and "coterie.workers.child" in " ".join(child.cmdline())
        # the socket's folder is for this user only
        (folder,) = (private_home / "state" / "run").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=60)
    assert not alive


@pytest.mark.parametrize("long", [pytest.param(False, marks=pytest.mark.full), True])
def test_sockets_are_private_and_removed(
    long: bool, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where COTERIE_HOME is too long for a socket's address."""
    monkeypatch.setenv("COTERIE_NATIVE", "0")
    if long:
        monkeypatch.setenv("COTERIE_HOME", str(private_home / ("x" * 90)))

    async def test() -> None:
        replica = ProcessReplica(tiny_spec())
        await replica.start()
        directory = replica._directory
        assert directory is not None and directory.stat().st_mode & 0o777 == 0o700
        assert long != str(directory).startswith(str(private_home))
        assert len((await run(replica, assign("a"))).tokens()) == 16
        await replica.close()
        assert not directory.exists()

    asyncio.run(test())


@pytest.mark.full
def test_a_suspect_is_not_moved() -> None:
    """Two replicas that die one after the other with the same requests: those run alone, where they
    are, and the other replica stays free for the rest."""

    async def test() -> None:
        first, second = (ProcessReplica(tiny_spec(name), QUICK) for name in ("r0", "r1"))
        await asyncio.gather(first.start(), second.start())
        try:
            undisturbed = (await run(first, assign("u", max_tokens=600))).tokens()
            moves: list[bool] = []

            def from_first() -> None:
                moves.append(first.move("a", second))

            def from_second() -> None:
                moves.append(second.move("a", first))

            listener = Listener()
            work = assign("a", max_tokens=600)
            assert isinstance(await first.submit(work, listener, from_first), Admitted)
            await listener.until(more_than(5))
            assert not first.move("a", second), "a request that runs stays"
            await until_died(first, kill(first))
            await listener.until(more_than(len(listener.tokens()) + 5))
            assert moves == [True] and first.in_flight() == 0 and second.in_flight() == 1
            # the other one dies with it: now it is a suspect
            await until_died(second, kill(second))
            await until_healthy(first)
            assert not second.move("a", first) and not second.healthy()
            assert isinstance(await listener.ended(), Finished)
            assert listener.tokens() == undisturbed
            assert second.stats()["requests_alone"] == 1 and first.in_flight() == 0
            # ids are unique at a replica: one that runs there already is not replaced
            other, again = Listener(), Listener()
            await first.submit(assign("same", max_tokens=600), other, from_second)
            await second.submit(assign("same", max_tokens=600), again)
            await until_died(first, kill(first))
            assert not first.move("same", second)
            for one in (other, again):
                assert isinstance(await one.ended(), Finished)
        finally:
            await asyncio.gather(first.close(), second.close())

    asyncio.run(test())


@pytest.mark.full
def test_requests_leave_a_silent_worker_and_do_not_go_on_there() -> None:
    async def test() -> None:
        policy = replace(QUICK, hang_s=300.0)
        first, second = (ProcessReplica(tiny_spec(name), policy) for name in ("r0", "r1"))
        await asyncio.gather(first.start(), second.start())
        pid = first.pid
        assert pid is not None
        try:
            undisturbed = (await run(first, assign("u", max_tokens=600))).tokens()
            listener = Listener()

            def on_outage() -> None:
                first.move("a", second)

            await first.submit(assign("a", max_tokens=600), listener, on_outage)
            await listener.until(more_than(5))
            os.kill(pid, signal.SIGSTOP)
            assert isinstance(await listener.ended(), Finished)
            assert listener.tokens() == undisturbed and first.state() == "silent"
            os.kill(pid, signal.SIGCONT)
            await until_healthy(first)
            # it was told to stop that request, and has its memory back
            lane = first.lane_states()[LANE]
            async with asyncio.timeout(30):
                while (lane := first.lane_states()[LANE]).free_tokens < lane.total_tokens:
                    await run(first, assign("b", max_tokens=2))
            assert first.pid == pid and first.stats()["restarts"] == 0
        finally:
            os.kill(pid, signal.SIGCONT)
            await asyncio.gather(first.close(), second.close())

    asyncio.run(test())
