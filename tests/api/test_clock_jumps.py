"""A wall clock that is set two days forward and five back under a running server: nothing ends
early, nothing waits, and what was begun ends as it would have."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serving import wall_clock
from tests.helpers.serving.batch_requests import (
    batch_server,
    begin,
    chats,
    client_of,
    ended,
    jsonl,
    line,
    until,
)
from tests.helpers.serving.job_requests import Caller
from tests.helpers.serving.server_process import KEYS, Served, chat, own_home

DAY_S = 86_400.0
SMALL = """
[engine]
max_sequences = 4
max_queue = 16
[batches]
concurrency = 4
"""


class SetClock:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.ahead(0.0)

    def ahead(self, seconds: float) -> None:
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetClock:
    monkeypatch.setenv("PYTHONPATH", str(Path(wall_clock.__file__).parent))
    monkeypatch.setenv("CLOCK_OFFSET", str(tmp_path / "offset"))
    return SetClock(tmp_path / "offset")


@pytest.fixture
def server(clock: SetClock, tmp_path: Path) -> Iterator[Served]:
    served = batch_server(own_home(tmp_path / "home"), SMALL)
    yield served
    served.stop()


def test_a_clock_that_is_set_ends_nothing(server: Served, clock: SetClock) -> None:
    client, jobs = client_of(server), Caller(server, KEYS[0])
    batch = begin(client, chats(24, 60))
    until(
        lambda: client.batches.retrieve(batch.id).request_counts,
        lambda counts: counts is not None and counts.completed >= 2,
    )
    answers: list[Any] = []

    def ask() -> None:
        """With a deadline far behind its end and long before the days that pass."""
        body = {"prompt": "go", "max_tokens": 400, "timeout_ms": 50_000}
        answers.append(server.post("/v1/infer", body, x_api_key=KEYS[0]))

    asking = threading.Thread(target=ask)
    asking.start()
    accepted = jobs.submit(max_tokens=20).json["job_id"]
    for days in (2.0, -3.0, 2.0):
        clock.ahead(days * DAY_S)
        reply = server.post("/v1/chat/completions", chat(max_tokens=4), x_api_key=KEYS[0])
        assert reply.status == 200, reply.body
        assert server.get("/health/ready").status == 200
        created = reply.json["created"]
        # the server does see the clock that was set
        assert abs(created - batch.created_at - days * DAY_S) < 600
    asking.join(60)
    assert answers[0].status == 200 and answers[0].json["finish_reason"] != "timeout"
    assert jobs.ended(accepted)["status"] == "succeeded"
    done = ended(client, batch)
    assert done.request_counts is not None
    assert (done.status, done.request_counts.completed) == ("completed", 24)
    assert done.output_file_id is not None and client.files.content(done.output_file_id).text


@pytest.mark.full
def test_a_batch_that_waits_is_not_ended_early(clock: SetClock, tmp_path: Path) -> None:
    """For a model whose server does not answer, so that it runs longer than a minute."""
    server = batch_server(own_home(tmp_path / "home"), dead_model=True)
    try:
        client = client_of(server)
        batch = begin(client, jsonl(line("a", chat(model="dead"))))
        until(lambda: client.batches.retrieve(batch.id).status, lambda is_: is_ == "in_progress")
        clock.ahead(2 * DAY_S)
        waited_until = time.monotonic() + 70
        while time.monotonic() < waited_until:
            assert client.batches.retrieve(batch.id).status == "in_progress"
            time.sleep(1)
        client.batches.cancel(batch.id)
        assert ended(client, batch).status == "cancelled"
    finally:
        server.stop()
