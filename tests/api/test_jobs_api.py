"""Jobs over a real server: accepted, shown, listed, followed, cancelled, removed; and killed."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.serving.job_requests import KEYS, Caller, Crash, crash
from tests.helpers.serving.server_process import Served, frames, own_home

JOBS, TOKENS = 10, 50


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_home(tmp_path_factory.mktemp("jobs") / "home")


@pytest.fixture(scope="module")
def crashed(home: Path) -> Iterator[Crash]:
    """The server of this module has been killed with jobs in it, and started again."""
    found = crash(home, JOBS, TOKENS, worker_too=False)
    yield found
    found.server.stop()


@pytest.fixture(scope="module")
def jobs_server(crashed: Crash) -> Served:
    return crashed.server


@pytest.fixture()
def one(jobs_server: Served) -> Caller:
    return Caller(jobs_server)


def test_jobs_outlive_their_gateway_and_end_once(crashed: Crash, home: Path) -> None:
    left = [row for row in crashed.at_death.values() if row.finished_at is None]
    assert left, "the server died too late to show anything"
    crashed.check(home)


def test_a_job_is_accepted_and_ends_with_the_answer_of_a_plain_request(one: Caller) -> None:
    accepted = one.submit(seed=3, temperature=1.0, user_id="ann")
    assert accepted.status == 202, accepted.body
    submission = accepted.json
    assert set(submission) == {"job_id", "status", "submitted_at", "estimated_wait_ms"}
    assert submission["status"] == "queued" and submission["estimated_wait_ms"] >= 0
    assert str(uuid.UUID(submission["job_id"])) == submission["job_id"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", submission["submitted_at"])
    assert accepted.headers["location"] == f"/v1/jobs/{submission['job_id']}"
    assert accepted.headers["preference-applied"] == "respond-async"
    job = one.ended(submission["job_id"])
    assert job["status"] == "succeeded" and job["error"] is None and job["user_id"] == "ann"
    assert job["submitted_at"] <= job["started_at"] <= job["finished_at"]
    body = {"prompt": "The quick brown fox", "max_tokens": 8, "model": "tiny"}
    plain = one.server.post("/v1/infer", body | {"seed": 3, "temperature": 1.0}, **one.key).json
    assert job["text"] == job["result"]["text"] == plain["text"]
    assert job["result"]["job_id"] == submission["job_id"]
    assert set(job["result"]) == set(plain)


def test_what_is_wrong_with_a_request_is_said_before_it_is_a_job(one: Caller) -> None:
    def known() -> set[str]:
        return {job["job_id"] for job in one.get("/v1/jobs?limit=100").json["data"]}

    before = known()
    assert one.submit("").status == 400
    assert one.submit(temperature=3).status == 400
    assert one.submit(model="nobody").status == 404
    assert one.submit(force_experts=["nobody"]).status == 404
    for field, unusable in (("regex", "(open"), ("grammar", "root ::= nobody")):
        refused = one.submit(**{field: unusable})
        assert (refused.status, refused.json["error"]["param"]) == (400, field), refused.body
    assert known() == before


def test_a_job_that_cannot_be_answered_fails_with_what_it_would_have_been_told(
    one: Caller,
) -> None:
    job = one.ended(one.submit("fox " * 9000).json["job_id"])
    assert job["status"] == "failed" and job["result"] is None
    assert job["error"]["code"] == "context_length_exceeded"
    assert job["error"]["type"] == "invalid_request_error"
    assert "maximum context length" in job["error"]["message"]
    got = frames(one.get(f"/v1/jobs/{job['job_id']}/events").body)
    assert [name for name, _ in got] == ["error"]
    assert got[0][1]["error"]["code"] == "context_length_exceeded"


def test_events_begin_with_the_text_so_far_and_end_with_the_answer(one: Caller) -> None:
    # long enough to be followed before its end, on a busy machine too
    job_id = one.submit(max_tokens=2000).json["job_id"]
    live = frames(one.get(f"/v1/jobs/{job_id}/events").body)
    job = one.ended(job_id)
    assert live[0][0] == "started" and live[0][1]["model"] == "tiny"
    assert {name for name, _ in live[1:-1]} == {"delta"}
    assert "".join(data["text"] for name, data in live if name == "delta") == job["text"]
    assert live[-1] == ("finished", job["result"])
    late = frames(one.get(f"/v1/jobs/{job_id}/events").body)
    assert late == [("delta", {"text": job["text"]}), ("finished", job["result"])]


def test_an_active_job_is_cancelled_and_an_ended_one_removed(one: Caller) -> None:
    job_id = one.submit(max_tokens=4000).json["job_id"]
    stopped = one.delete(job_id)
    assert stopped.status == 200 and stopped.json["status"] == "cancelled"
    assert stopped.json["deleted"] is False
    time.sleep(0.2)
    job = one.get(f"/v1/jobs/{job_id}").json
    assert job["status"] == "cancelled" and job["result"] is None and job["finished_at"]
    gone = one.delete(job_id).json
    assert gone["deleted"] is True
    for path in (f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/events"):
        assert one.get(path).status == 404
    assert one.delete(job_id).status == 404


def test_jobs_are_listed_newest_first_by_pages_and_filters(one: Caller) -> None:
    mark = uuid.uuid4().hex
    ids = [one.submit(user_id=mark).json["job_id"] for _ in range(5)]
    for job_id in ids:
        one.ended(job_id)
    found, after = [], ""
    for _ in range(3):
        page = one.get(f"/v1/jobs?user_id={mark}&limit=2{after}").json
        found += [job["job_id"] for job in page["data"]]
        after = f"&after={page['next']}"
    assert page["object"] == "list" and not page["has_more"] and page["next"] is None
    assert found == ids[::-1]
    assert one.get(f"/v1/jobs?user_id={mark}&status=failed").json["data"] == []
    assert len(one.get(f"/v1/jobs?user_id={mark}&status=succeeded").json["data"]) == 5
    for wrong in ("limit=0", "limit=101", "limit=x", "status=done", "after=x", "colour=red"):
        reply = one.get(f"/v1/jobs?{wrong}")
        assert reply.status == 400, wrong
        assert reply.json["error"]["param"] == wrong.partition("=")[0]


def test_jobs_of_another_tenant_do_not_exist(one: Caller, jobs_server: Served) -> None:
    other = Caller(jobs_server, KEYS[1])
    job_id = one.submit(max_tokens=300).json["job_id"]
    for path in (f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/events"):
        assert other.get(path).status == 404
    assert other.delete(job_id).status == 404
    assert job_id not in [job["job_id"] for job in other.get("/v1/jobs").json["data"]]
    assert one.ended(job_id)["status"] == "succeeded"
    assert one.server.get(f"/v1/jobs/{job_id}").status == 401


def test_the_database_is_the_owners_alone(home: Path, one: Caller) -> None:
    assert one.submit().status == 202
    for path in (home / "state").glob("jobs.db*"):
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0, path
