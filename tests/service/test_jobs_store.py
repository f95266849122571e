"""service/jobs/store.py on real files: every order of calls, servers that die, files that break."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coterie.core.errors import InvalidRequest, Unavailable
from coterie.core.job import CANCELLED, FAILED, SUCCEEDED, JobError, JobQuery
from coterie.core.plan import AdapterChoice, RoutePlan, TunedFields
from coterie.core.request import Sampling, Text
from coterie.service.jobs.codec import decode_plan, encode_plan
from coterie.service.jobs.store import JobEnd, JobOwner, JobStore, NewJob
from tests.helpers.folders import temporary_folder

TENANTS = ("t", "u")


def entry(job_id: str, tenant: str = "t", priority: int = 5, at: float = 1.0) -> NewJob:
    return NewJob(job_id, tenant, "ann", "tiny", priority, at, b'{"request": 1}')


class Server:
    """A store in the hands of one server; `die` is what SIGKILL leaves: files, and a free lock."""

    def __init__(self, path: Path, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.run, self.store = run, JobStore(path)
        run(self.store.open())

    def die(self) -> None:
        store = self.store
        # the connection belongs to the store's thread
        store._thread.submit(store._sql.close).result()  # type: ignore[union-attr]
        os.close(store._owner._handle)  # type: ignore[union-attr]
        store._thread.shutdown()


class Jobs(RuleBasedStateMachine):
    """Two servers on one file against a dictionary. The dictionary holds what was acknowledged."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.folder = temporary_folder("coterie-jobs-")
        self.runner = asyncio.Runner()
        self.servers = [self.start(), self.start()]
        self.owner: dict[str, Server] = {}
        self.tenant: dict[str, str] = {}
        self.status: dict[str, str] = {}
        self.ends: dict[str, int] = {}

    def start(self) -> Server:
        return Server(self.folder / "jobs.db", self.runner.run)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    @rule(target=ids, which=st.integers(0, 1), tenant=st.sampled_from(TENANTS))
    def add(self, which: int, tenant: str) -> str:
        job_id = f"j{len(self.ends)}"
        server = self.servers[which]
        self.do(server.store.add(entry(job_id, tenant)))
        self.owner[job_id], self.tenant[job_id] = server, tenant
        self.status[job_id], self.ends[job_id] = "queued", 0
        return job_id

    def is_open(self, job_id: str) -> bool:
        return self.status.get(job_id) in ("queued", "processing")

    @rule(job_id=ids, which=st.integers(0, 1))
    def begin(self, job_id: str, which: int) -> None:
        server = self.servers[which]
        ours = self.is_open(job_id) and self.owner[job_id] is server
        assert self.do(server.store.begin(job_id, 2.0, b"{}")) == ours
        if ours:
            self.status[job_id] = "processing"

    @rule(job_id=ids, which=st.integers(0, 1), how=st.sampled_from((SUCCEEDED, FAILED)))
    def end(self, job_id: str, which: int, how: str) -> None:
        server = self.servers[which]
        ours = self.is_open(job_id) and self.owner[job_id] is server
        error = JobError("internal_error", "x") if how == FAILED else None
        assert self.do(server.store.end(job_id, JobEnd(how, 3.0, error=error))) == ours
        if ours:
            self.status[job_id] = how
            self.ends[job_id] += 1

    @rule(job_id=ids, which=st.integers(0, 1), tenant=st.sampled_from(TENANTS))
    def cancel(self, job_id: str, which: int, tenant: str) -> None:
        can = self.is_open(job_id) and self.tenant[job_id] == tenant
        assert self.do(self.servers[which].store.cancel(job_id, tenant, 3.0, "so far")) == can
        if can:
            self.status[job_id] = CANCELLED
            self.ends[job_id] += 1

    @rule(job_id=consumes(ids), which=st.integers(0, 1))
    def remove(self, job_id: str, which: int) -> None:
        can = job_id in self.status and not self.is_open(job_id)
        assert self.do(self.servers[which].store.remove(job_id, self.tenant[job_id])) == can
        if can:
            del self.status[job_id]

    @rule(which=st.integers(0, 1), clean=st.booleans())
    def replace(self, which: int, clean: bool) -> None:
        """One server ends, well or badly, and another comes in its place."""
        old = self.servers[which]
        if clean:
            self.do(old.store.close())
        else:
            old.die()
        self.servers[which] = self.start()
        for job_id, status in self.status.items():
            if clean and self.owner[job_id] is old and status == "processing":
                self.status[job_id] = "queued"

    @rule(which=st.integers(0, 1))
    def adopt(self, which: int) -> None:
        server = self.servers[which]
        abandoned_jobs = {
            job_id
            for job_id in self.status
            if self.is_open(job_id) and self.owner[job_id] not in self.servers
        }
        taken = self.do(server.store.adopt(self.do(server.store.abandoned_jobs())))
        assert {waiting.id for waiting in taken} == abandoned_jobs
        for job_id in abandoned_jobs:
            self.owner[job_id], self.status[job_id] = server, "queued"

    @precondition(lambda self: self.status)
    @invariant()
    def nothing_is_lost_and_nothing_ends_twice(self) -> None:
        found: dict[str, str] = {}
        for tenant in TENANTS:
            page = self.do(self.servers[0].store.page(JobQuery(tenant, limit=100)))
            found |= {job.id: job.status for job in page.jobs}
        assert found == self.status
        assert all(count <= 1 for count in self.ends.values())
        for server in self.servers:
            mine = {i for i in self.status if self.is_open(i) and self.owner[i] is server}
            assert self.do(server.store.open_ids()) == mine

    def teardown(self) -> None:
        for server in self.servers:
            self.do(server.store.close())
        self.runner.close()
        shutil.rmtree(self.folder)


RARE = settings(
    max_examples=8, stateful_step_count=20, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_any_order_of_calls_and_deaths_loses_nothing_and_ends_nothing_twice() -> None:
    run_state_machine_as_test(Jobs, settings=RARE)  # type: ignore[no-untyped-call]


@pytest.mark.full
def test_many_orders_of_calls_and_deaths() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Jobs, settings=settings(RARE, max_examples=400, stateful_step_count=60)
    )


# Every job is added, begun and ended; each step is told only after its call has returned.
VICTIM = """
import asyncio, sys
from pathlib import Path
from coterie.service.jobs.store import JobEnd, JobStore, NewJob

async def main():
    store = JobStore(Path(sys.argv[1]))
    await store.open()
    index = 0
    while True:
        name = f"j{index}"
        await store.add(NewJob(name, "t", "", "tiny", 5, float(index), b"x" * 3000))
        print("added", name, flush=True)
        if index % 3:
            assert await store.begin(name, 2.0, b"{}")
            print("begun", name, flush=True)
        if index % 3 == 2:
            assert await store.end(name, JobEnd("cancelled", 3.0, "y" * 5000))
            print("ended", name, flush=True)
        index += 1

asyncio.run(main())
"""
STATUS = {"added": "queued", "begun": "processing", "ended": "cancelled"}


def killed_in_the_middle(path: Path, after_lines: int) -> list[tuple[str, str]]:
    """What a server was told is on disk, up to the SIGKILL that ends it at any point."""
    with subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdout is not None
        lines = [victim.stdout.readline() for _ in range(after_lines)]
        victim.send_signal(signal.SIGKILL)
        lines += victim.stdout.readlines()
    return [(word, name) for word, name in (line.split() for line in lines if line[-1:] == "\n")]


def check_acknowledged(path: Path, told: list[tuple[str, str]]) -> None:
    with asyncio.Runner() as runner:
        store = JobStore(path)
        runner.run(store.open())
        last = {name: STATUS[word] for word, name in told}
        # one step may be on disk that nobody was told of
        nexts = {"queued": ("queued", "processing"), "processing": ("processing", "cancelled")}
        for name, status in last.items():
            job = runner.run(store.find(name, "t"))
            assert job is not None, f"{name} was accepted and is lost"
            assert job.status in nexts.get(status, (status,)), (name, status)
            assert job.active or job.text == "y" * 5000
        taken = runner.run(store.adopt(runner.run(store.abandoned_jobs())))
        active = {name for name, status in last.items() if status != "cancelled"}
        assert {w.id for w in taken} <= active | {f"j{len(last)}"}
        runner.run(store.close())


def test_what_was_acknowledged_is_there_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(5)
    path = tmp_path / "jobs.db"
    told = killed_in_the_middle(path, rng.randrange(20, 120))
    check_acknowledged(path, told)


@pytest.mark.full
def test_what_was_acknowledged_is_there_after_many_kills(tmp_path: Path) -> None:
    rng = random.Random(6)
    for index in range(25):
        path = tmp_path / str(index) / "jobs.db"
        told = killed_in_the_middle(path, rng.randrange(1, 400))
        check_acknowledged(path, told)


def test_a_commit_that_was_cut_off_is_as_if_it_had_not_begun(tmp_path: Path) -> None:
    """The log's tail beyond the last commit may hold anything: half a frame, or junk."""
    path = tmp_path / "jobs.db"
    told = killed_in_the_middle(path, 30)
    wal = path.with_name("jobs.db-wal")
    whole, rng = wal.read_bytes(), random.Random(7)
    for junk in (whole[32 : 32 + 2000], rng.randbytes(4120), b"\0" * 9000):
        copy = tmp_path / f"copy{len(junk)}" / "jobs.db"
        copy.parent.mkdir()
        shutil.copy(path, copy)
        copy.with_name("jobs.db-wal").write_bytes(whole + junk)
        check_acknowledged(copy, told)


def test_a_damaged_file_is_said_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "jobs.db"
    path.write_bytes(b"this was never a database" * 100)
    before = path.read_bytes()

    async def main() -> None:
        store = JobStore(path)
        for _ in range(2):
            with pytest.raises(Unavailable, match="damaged") as caught:
                await store.open()
            assert caught.value.retry_after_s is None
        with pytest.raises(Unavailable, match="not a database"):
            await store.find("j", "t")
        await store.close()

    asyncio.run(main())
    assert path.read_bytes() == before
    lines = [
        record.__dict__["reason"]
        for record in caplog.records
        if record.message == "jobs_unreadable"
    ]
    assert len(lines) == 1 and str(path) in lines[0] and "move the file away" in lines[0]


def test_a_file_that_breaks_while_it_is_open_is_said(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    async def main() -> None:
        store = JobStore(path)
        await store.open()
        for index in range(40):
            await store.add(entry(f"j{index}"))
        await store.close()
        raw = bytearray(path.read_bytes())
        raw[4096:] = b"\xff" * (len(raw) - 4096)
        path.write_bytes(raw)
        store = JobStore(path)
        with pytest.raises(Unavailable, match="damaged"):
            await store.open()
            await store.page(JobQuery("t"))
        with pytest.raises(Unavailable, match="damaged"):
            await store.close()

    asyncio.run(main())


def test_a_file_of_a_newer_coterie_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    sql = sqlite3.connect(path)
    sql.execute("PRAGMA user_version = 99")
    sql.close()
    with pytest.raises(Unavailable, match="newer Coterie"):
        asyncio.run(JobStore(path).open())


def test_of_a_plan_only_what_a_second_run_goes_by_is_kept() -> None:
    sampling = Sampling(temperature=0.5, seed=7)
    adapters = (AdapterChoice("sql@1.0.0", "d" * 64, 0.5),)
    plan = RoutePlan("r", "base", adapters, sampling, 0.5, ("why",), TunedFields(Text("secret")))
    raw = encode_plan(plan)
    assert b"secret" not in raw
    kept = decode_plan(raw)
    assert (kept.specialist, kept.adapters, kept.sampling) == ("base", adapters, sampling)
    # servers before this one kept all of it
    older = json.loads(raw) | {"request_id": "r", "confidence": 0.5, "prompt": {"text": {}}}
    assert decode_plan(json.dumps(older).encode()) == kept


def test_a_start_that_failed_holds_nothing_and_is_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        store = JobStore(tmp_path / "jobs.db")
        in_the_way = tmp_path / "jobs.owners"
        in_the_way.write_text("")
        with pytest.raises(Unavailable):
            await store.open()
        assert store._sql is None
        in_the_way.unlink()
        await store.open()
        await store.add(entry("a"))
        assert await store.find("a", "t") is not None
        await store.close()

    asyncio.run(test())


def test_ended_jobs_go_by_age_number_and_size(tmp_path: Path) -> None:
    async def main() -> None:
        store = JobStore(tmp_path / "jobs.db")
        await store.open()
        for index in range(10):
            await store.add(entry(f"j{index}", at=float(index)))
            await store.end(f"j{index}", JobEnd(CANCELLED, 100.0 + index, "x" * 1000))
        await store.add(entry("open", at=0.0))

        async def left() -> list[str]:
            return [job.id for job in (await store.page(JobQuery("t", limit=50))).jobs]

        assert await store.expire(103.0, 100, 10**9) == 3
        assert await left() == [*(f"j{i}" for i in range(9, 2, -1)), "open"]
        assert await store.expire(0.0, 5, 10**9) == 2
        assert await left() == [*(f"j{i}" for i in range(9, 4, -1)), "open"]
        assert await store.expire(0.0, 100, 3000) == 2
        assert await left() == ["j9", "j8", "j7", "open"]
        with pytest.raises(InvalidRequest):
            await store.page(JobQuery("t", after="nonsense"))
        await store.close()

    asyncio.run(main())


def test_a_folder_among_the_locks_does_not_stop_a_start(tmp_path: Path) -> None:
    owners = tmp_path / "jobs.owners"
    (owners / "somebody.lock").mkdir(parents=True)
    owner = JobOwner(owners)
    try:
        owner.clean()
    finally:
        owner.close()
    assert (owners / "somebody.lock").is_dir()
