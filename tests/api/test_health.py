"""What /health says when a worker is stopped, and when none can come any more."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, own_home

WAIT_S = 90.0
CONFIG = "[engine]\nrestart_backoff_s = 0.02\nmax_restart_backoff_s = 0.05\n"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Its path is short: sockets lie below it."""
    path = temporary_folder("coterie-home-")
    yield own_home(path)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    config = home / "coterie.toml"
    config.write_text(CONFIG)
    model = str(tiny_checkpoint("llama"))
    served = Served(model, "--name", "tiny", "--config", str(config), COTERIE_HOME=str(home))
    yield served
    served.stop()


def worker(served: Served) -> int:
    for child in psutil.Process(served.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "coterie.workers.child" in child.cmdline():
                return child.pid
    raise AssertionError("no worker")


def until(condition: Callable[[], bool], served: Served) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, served.log()
        time.sleep(0.05)


def states(served: Served) -> list[str]:
    return list(served.get("/health").json["specialists"]["tiny"]["states"].values())


@pytest.mark.full
def test_a_stopped_worker_is_not_ready_until_it_goes_on(served: Served) -> None:
    assert states(served) == ["up"]
    pid = worker(served)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: served.get("/health/ready").status == 503, served)
        assert states(served) == ["silent"]
        assert served.get("/health/live").status == 200
        assert served.metric("coterie_worker_up") == 0
        refused = served.post("/v1/chat/completions", chat())
        assert refused.status == 503 and "retry-after" in refused.headers
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: served.get("/health/ready").status == 200, served)
    assert served.post("/v1/chat/completions", chat()).status == 200
    assert worker(served) == pid


def test_a_lost_socket_folder_is_no_outage(served: Served, home: Path) -> None:
    shutil.rmtree(home / "state" / "run")
    assert served.post("/v1/chat/completions", chat()).status == 200
    served.kill_workers()
    until(lambda: served.metric("coterie_worker_restarts_total") == 1, served)
    until(lambda: served.get("/health/ready").status == 200, served)
    assert served.post("/v1/chat/completions", chat()).status == 200


def test_when_no_worker_can_come_the_server_is_not_live(served: Served, home: Path) -> None:
    folder = home / "state" / "run"
    shutil.rmtree(folder)
    folder.write_text("in the way")
    served.kill_workers()
    until(lambda: served.get("/health/live").status == 503, served)
    assert states(served) == ["failing"]
    refused = served.post("/v1/chat/completions", chat())
    assert refused.status == 503 and str(home) not in refused.body.decode()
    folder.unlink()
    until(lambda: served.get("/health/ready").status == 200, served)
    assert served.get("/health/live").status == 200
    assert served.post("/v1/chat/completions", chat()).status == 200
