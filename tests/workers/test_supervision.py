"""workers/supervisor.py: a lost folder, a load that hangs, a stopped process; and the folders
that dead gateways leave."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.core.events import Finished
from coterie.weights.home import state_dir
from coterie.workers import supervisor as process
from coterie.workers.supervisor import (
    LOAD_BASE_S,
    LOAD_BYTES_PER_S,
    ProcessReplica,
    RestartPolicy,
)
from coterie.workers.worker_process import is_own_directory, remove_directory, socket_directory
from tests.helpers.serving.worker_requests import assign, own_workers, run, tiny_spec

QUICK = RestartPolicy(backoff_s=0.05, max_backoff_s=0.2, hang_s=0)


async def until(condition: Callable[[], object], timeout_s: float = 90) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def signalled(replica: ProcessReplica, number: int) -> int:
    assert replica.pid is not None
    os.kill(replica.pid, number)
    return replica.pid


@pytest.mark.full
def test_a_lost_socket_folder_is_made_again() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            assert replica._directory is not None
            lost = replica._directory
            shutil.rmtree(lost)
            # what runs needs no folder
            assert isinstance((await run(replica, assign("a"))).end, Finished)
            signalled(replica, signal.SIGKILL)
            await until(lambda: replica.stats()["restarts"] and replica.healthy())
            assert isinstance((await run(replica, assign("b"))).end, Finished)
            assert replica.stats()["socket_folders_lost"] == 1
            shutil.rmtree(replica._directory)
        finally:
            # also with a folder that is gone
            await replica.close()
        assert not own_workers()

    asyncio.run(test())


@pytest.mark.full
def test_a_worker_that_hangs_while_it_loads_is_replaced() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            size = sum(path.stat().st_size for path in Path(tiny_spec().model).iterdir())
            by_size = LOAD_BASE_S + size / LOAD_BYTES_PER_S
            assert replica._restart.load_timeout_s == pytest.approx(by_size)
            patient = replica._restart
            replica._restart = replace(patient, load_timeout_s=2.0)
            old = signalled(replica, signal.SIGKILL)
            await until(lambda: any(worker.pid != old for worker in own_workers()))
            # it imports for longer than it takes to stop it
            os.kill(next(w.pid for w in own_workers() if w.pid != old), signal.SIGSTOP)
            assert replica.state() == "starting"
            await until(lambda: replica.stats()["failed_starts"] >= 1)
            replica._restart = patient
            await until(replica.healthy)
            assert isinstance((await run(replica, assign("a"))).end, Finished)
        finally:
            await replica.close()

    asyncio.run(test())


def test_a_stopped_worker_is_noticed_and_heard_again() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            pid = signalled(replica, signal.SIGSTOP)
            await until(lambda: not replica.healthy())
            assert replica.state() == "silent" and replica.stats()["silences"] == 1
            os.kill(pid, signal.SIGCONT)
            await until(replica.healthy)
            assert replica.pid == pid and replica.stats()["restarts"] == 0
            assert isinstance((await run(replica, assign("a"))).end, Finished)
        finally:
            await replica.close()

    asyncio.run(test())


def test_a_gateway_that_was_held_up_does_not_blame_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "SILENT_S", 2.0)

    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), QUICK)
        await replica.start()
        try:
            # the loop does nothing for longer than a silence takes
            time.sleep(3.0)
            for _ in range(5):
                assert replica.healthy()
                await asyncio.sleep(0)
            assert replica.stats()["silences"] == 0
        finally:
            await replica.close()

    asyncio.run(test())


@pytest.mark.full
def test_a_worker_that_stays_stopped_is_replaced_though_it_has_no_work() -> None:
    async def test() -> None:
        replica = ProcessReplica(tiny_spec(), RestartPolicy(0.05, 0.2, hang_s=1.0))
        await replica.start()
        try:
            old = signalled(replica, signal.SIGSTOP)
            await until(lambda: replica.pid != old)
            await until(replica.healthy)
            assert replica.stats()["restarts"] >= 1
        finally:
            await replica.close()

    asyncio.run(test())


def dead_process() -> int:
    pid = 4_000_000
    while Path(f"/proc/{pid}").exists():
        pid += 1
    return pid


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # short enough for a socket's address, whatever the test is called
    short = Path("/tmp") / f"coterie-home-{os.getpid()}"
    monkeypatch.setenv("COTERIE_HOME", str(short))
    folder = state_dir() / "run"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(short)


def test_whatever_lies_in_a_dead_gateways_folder_no_start_fails_of_it(
    run_folder: Path, tmp_path: Path
) -> None:
    dead = run_folder / f"{dead_process()}-abc"
    (dead / "folder" / "deeper").mkdir(parents=True)
    (dead / "folder" / "file").write_text("x")
    (dead / "1.sock").write_text("")
    plain = run_folder / f"{dead_process()}-file"
    plain.write_text("x")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    link = run_folder / f"{dead_process()}-link"
    link.symlink_to(kept)
    inside = run_folder / f"{dead_process()}-inside"
    inside.mkdir()
    (inside / "link").symlink_to(kept)
    other = run_folder / "notes"
    other.mkdir()
    made = socket_directory()
    assert sorted(path.name for path in run_folder.iterdir()) == sorted([made.name, "notes"])
    assert (kept / "file").exists()
    remove_directory(made)


def test_killed_gateways_leave_no_folders_in_the_temporary_one_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the home's path is too long for a socket."""
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / ("long" * 30)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, strange = (tmp_path / f"{name}{dead_process()}-x" for name in ("coterie-run-", "other-"))
    living = tmp_path / f"coterie-run-{os.getpid()}-x"
    for folder in (left, strange, living):
        folder.mkdir()
    made = socket_directory()
    assert made.parent == tmp_path and made.name.startswith(f"coterie-run-{os.getpid()}-")
    assert living.exists() and strange.exists() and not left.exists()
    remove_directory(made)


def test_a_folder_of_somebody_else_is_not_taken_for_ours(tmp_path: Path) -> None:
    assert is_own_directory(tmp_path) and not is_own_directory(tmp_path / "gone")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    assert not is_own_directory(link) and not is_own_directory(tmp_path / "file")
