"""Fifty jobs through the death of gateway and worker, and two servers that share a home."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.serving.job_requests import (
    Caller,
    crash,
    job_server,
    rows,
    same_text,
    submit_all,
    wait_for,
)
from tests.helpers.serving.server_process import own_home

pytestmark = pytest.mark.full


def test_fifty_jobs_outlive_the_gateway_and_the_worker_and_end_once(tmp_path: Path) -> None:
    home = own_home(tmp_path / "home")
    found = crash(home, 50, 50)
    try:
        assert sum(row.finished_at is None for row in found.at_death.values()) >= 10
        found.check(home)
    finally:
        found.server.stop()


def test_two_servers_of_one_home_share_its_jobs_and_one_takes_over(tmp_path: Path) -> None:
    home = own_home(tmp_path / "home")
    first, second = job_server(home), job_server(home)
    try:
        requests = submit_all([first, second], home, 40, 40)
        wait_for(8, home, "succeeded")
        first.stop(signal.SIGKILL)
        at_death = rows(home)
        caller = Caller(second)
        for job_id, request in requests.items():
            job = caller.ended(job_id)
            assert job["status"] == "succeeded" and same_text(job, request, caller), job
        after = rows(home)
        assert all(after[i] == row for i, row in at_death.items() if row.finished_at is not None)
        assert len(after) == 40
    finally:
        first.stop(signal.SIGKILL)
        second.stop()


def test_a_drained_server_leaves_its_jobs_to_the_next_start(tmp_path: Path) -> None:
    home = own_home(tmp_path / "home")
    settings = tmp_path / "coterie.toml"
    settings.write_text("[server]\ndrain_s = 0.2\n")
    server = job_server(home, "--config", str(settings))
    requests = submit_all([server], home, 12, 100)
    assert server.stop() == 0
    left = [row.status for row in rows(home).values() if row.finished_at is None]
    assert left and set(left) == {"queued"}
    server = job_server(home)
    try:
        caller = Caller(server)
        for job_id, request in requests.items():
            job = caller.ended(job_id)
            assert job["status"] == "succeeded" and same_text(job, request, caller), job
    finally:
        server.stop()
