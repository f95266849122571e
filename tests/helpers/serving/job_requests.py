"""Jobs over HTTP for tests: one tenant's calls, batches of jobs, and servers that are killed."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Reply, Served

ASYNC = {"Prefer": "respond-async"}
KEYS = ("key-of-one-tenant", "key-of-the-other")
END_S = 120.0
Requests = dict[str, dict[str, Any]]
PROMPTS = ("The quick brown fox", "She sells sea shells", "Numbers such as 0, 1, 2")


def job_server(home: Path, *arguments: str) -> Served:
    keys = home.parent / "keys.txt"
    keys.write_text("\n".join(KEYS) + "\n")
    return Served(
        str(tiny_checkpoint("llama", max_position_embeddings=8192)),
        *("--name", "tiny", "--api-key-file", str(keys), *arguments),
        COTERIE_HOME=str(home),
    )


class Caller:
    """One tenant's calls."""

    def __init__(self, server: Served, key: str = KEYS[0]) -> None:
        self.server, self.key = server, {"Authorization": f"Bearer {key}"}

    def submit(self, prompt: str = PROMPTS[0], **fields: Any) -> Reply:
        return self.server.post("/v1/infer", body(prompt, **fields), **ASYNC, **self.key)

    def infer(self, asked: dict[str, Any]) -> str:
        reply = self.server.post("/v1/infer", asked, **self.key)
        assert reply.status == 200, reply.body
        return str(reply.json["text"])

    def get(self, path: str) -> Reply:
        return self.server.get(path, **self.key)

    def delete(self, job_id: str) -> Reply:
        return self.server.send("DELETE", f"/v1/jobs/{job_id}", None, **self.key)

    def ended(self, job_id: str) -> Any:
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            job = self.get(f"/v1/jobs/{job_id}").json
            if job["status"] not in ("queued", "processing"):
                return job
            time.sleep(0.02)
        raise AssertionError(f"not ended after {END_S} s: {job}")


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "model": "tiny"} | fields


def asked(index: int, tokens: int) -> dict[str, Any]:
    """Greedy, sampled with a seed of the caller's, and sampled with none, in turn."""
    sampling: dict[str, Any] = [{}, {"temperature": 1.0, "seed": index}, {"temperature": 1.0}][
        index % 3
    ]
    # of several lengths, so that they do not all end in one step
    length = tokens * (1 + index % 5)
    return body(PROMPTS[index % 2] + str(index), max_tokens=length, **sampling)


def submit_all(servers: Sequence[Served], home: Path, count: int, tokens: int) -> Requests:
    """Each job by its id, with the seed that it will be drawn with."""
    requests: Requests = {}
    for index in range(count):
        server = servers[index % len(servers)]
        request = asked(index, tokens)
        reply = server.post("/v1/infer", request, **ASYNC, **Caller(server).key)
        assert reply.status == 202, reply.body
        # what was left open is fixed from acceptance on
        job_id = reply.json["job_id"]
        requests[job_id] = seeds(home).get(job_id, {}) | request
    return requests


def same_text(job: Any, request: dict[str, Any], caller: Caller) -> bool:
    """As it would have been without a crash. A job that ended before its seed could be read was in
    none."""
    known = request["temperature"] == 0 or "seed" in request
    return not known or job["text"] == caller.infer(request)


@dataclass(frozen=True)
class Row:
    """A job as it lies in the database."""

    status: str
    finished_at: float | None
    result: bytes | None


def rows(home: Path) -> dict[str, Row]:
    with closing(sqlite3.connect(home / "state" / "jobs.db")) as sql:
        found = sql.execute("SELECT id, status, finished_at, result FROM jobs").fetchall()
    return {row[0]: Row(*row[1:]) for row in found}


def seeds(home: Path) -> dict[str, dict[str, int]]:
    """Of the jobs that have not ended: what each will be, or is being, drawn with."""
    with closing(sqlite3.connect(home / "state" / "jobs.db")) as sql:
        found = sql.execute("SELECT id, request FROM jobs WHERE request IS NOT NULL").fetchall()
    return {job_id: {"seed": json.loads(raw)["sampling"]["seed"]} for job_id, raw in found}


def wait_for(count: int, home: Path, *statuses: str) -> None:
    """Until so many jobs have one of these statuses."""
    deadline = time.monotonic() + END_S
    while sum(row.status in statuses for row in rows(home).values()) < count:
        assert time.monotonic() < deadline, f"never {count} jobs {statuses}: {rows(home)}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Crash:
    """A batch of jobs that a server died in the middle of, and the server that came after."""

    requests: Requests
    at_death: dict[str, Row]
    server: Served

    def check(self, home: Path) -> None:
        """Each job ends once, with the text that it would have had."""
        caller = Caller(self.server)
        for job_id, request in self.requests.items():
            job = caller.ended(job_id)
            assert job["status"] == "succeeded", job
            assert job["text"] == job["result"]["text"] and same_text(job, request, caller), job
        after = rows(home)
        assert after.keys() == self.at_death.keys()
        for job_id, row in self.at_death.items():
            if row.finished_at is not None:
                assert after[job_id] == row, "a job that had ended ended again"


def crash(home: Path, count: int, tokens: int, *, worker_too: bool = True) -> Crash:
    """`count` jobs; in their middle a worker is killed, then the gateway; then a new start."""
    server = job_server(home)
    try:
        requests = submit_all([server], home, count, tokens)
        wait_for(count // 6, home, "succeeded")
        if worker_too:
            server.kill_workers()
        wait_for(count // 3, home, "succeeded")
        wait_for(1, home, "processing")
    finally:
        server.stop(signal.SIGKILL)
    at_death = rows(home)
    return Crash(requests, at_death, job_server(home))
