"""A server on a busy machine, asked from its first moment on: it never forks and never hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serving.app_with_experts import ADMIN, MODEL, Packer
from tests.helpers.serving.fork_probe import forks, watch
from tests.helpers.serving.server_process import Reply, Served, own_home

# far more than any answer takes; a gateway that hangs takes for ever
ANSWER_S = 120.0
CONFIG = """
[[validators]]
name = "fine"
command = ["/bin/true"]
experts = ["sql-writer"]

[engine]
restart_backoff_s = 0.05
"""


@pytest.fixture
def busy_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many endless loops as the test's parameter says."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(request.param)
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


class House:
    """A home with experts installed, so that every start learns an index, and a probe for forks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = own_home(folder / "home", shared=("kernels",))
        (folder / "admins.txt").write_text(f"{ADMIN}\n")
        (folder / "coterie.toml").write_text(CONFIG)
        packer = Packer(folder)
        packer.trust(self.home / "state" / "trust.json")
        self.packages = [packer.package("sql-writer", seed=1, description="Writes SQL queries")]
        self.packages += [
            packer.package(f"topic-{n}", seed=2, description=f"Writes about topic number {n}")
            for n in range(4)
        ]

    def serve(self) -> Served:
        return Served(
            str(MODEL),
            *("--name", "tiny", "--admin-key-file", str(self.folder / "admins.txt")),
            *("--config", str(self.folder / "coterie.toml")),
            wait_ready=False,
            COTERIE_HOME=str(self.home),
            **watch(self.folder),
        )


def ask(served: Served, **fields: Any) -> Reply:
    """Until it is answered: a server that still loads, or has lost its worker, says 503."""
    body = {"prompt": "Write a SQL query that lists all customers", "max_tokens": 12, **fields}
    deadline = time.monotonic() + ANSWER_S
    while True:
        reply = served.post("/v1/infer", body)
        if reply.status == 200:
            return reply
        assert reply.status in (429, 503), reply.body
        assert time.monotonic() < deadline, served.log()
        time.sleep(0.05)


def ask_all(served: Served, turn: int) -> None:
    """A worker, the process that tries out grammars, a judge, and a command of the operator's."""
    schema = {"type": "object", "properties": {f"key_{turn}": {"type": "boolean"}}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert ask(served, response_format=format, max_tokens=40).json["validation"] is not None
    judged = ask(served, force_experts=["sql-writer"], regex="[a-z]{3}").json["validation"]
    assert "fine" in judged["validator"], judged


def live(served: Served, house: House, turns: int) -> None:
    for turn in range(turns):
        ask_all(served, turn)
        served.kill_workers()
        ask(served)
    assert served.stop() == 0
    assert forks(house.folder, served.process.pid) == 0


def check_starts(folder: Path, starts: int, turns: int) -> None:
    house = House(folder)
    served = house.serve()
    try:
        ask(served)
        for package in house.packages:
            reply = served.post(
                "/v1/experts",
                package,
                authorization=f"Bearer {ADMIN}",
                content_type="application/octet-stream",
            )
            assert reply.status == 201, reply.body
        live(served, house, turns - 1)
        for _ in range(starts):
            served = house.serve()
            live(served, house, turns)
    finally:
        served.stop(signal.SIGKILL)


# the tests beside this one keep the machine busy
def test_a_busy_start_answers_and_never_forks(tmp_path: Path) -> None:
    check_starts(tmp_path, 1, turns=1)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("busy_machine", [3], indirect=True)
@pytest.mark.usefixtures("busy_machine")
def test_twenty_busy_starts_answer_and_never_fork(tmp_path: Path) -> None:
    check_starts(tmp_path, 20, turns=2)
