"""/v1/infer, its log and its verdicts over HTTP, against a real server."""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any

import httpx
import pytest

from tests.helpers.serving.server_process import Served, frames

FIRST, SECOND = "key-of-the-first-tenant", "key-of-the-second-tenant"


def ask(prompt: str = "hello there", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 6, "temperature": 0} | fields


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_an_answer_has_every_field(server: Served) -> None:
    reply = server.post("/v1/infer", ask())
    assert reply.status == 200
    answer = reply.json
    assert list(answer) == [
        "job_id", "text", "tokens_generated", "experts_used", "latency_ms", "finish_reason",
        "model", "task_type", "confidence", "degraded", "seed", "validation", "metrics",
        "telemetry",
    ]  # fmt: skip
    assert str(uuid.UUID(answer["job_id"])) == answer["job_id"]
    assert (answer["tokens_generated"], answer["finish_reason"]) == (6, "length")
    assert (answer["model"], answer["experts_used"], answer["degraded"]) == ("tiny", [], [])
    assert answer["metrics"]["job_id"] == answer["job_id"]
    assert answer["metrics"]["output_tokens"] == 6
    assert reply.headers["x-coterie-specialist"] == "tiny"
    assert re.fullmatch(r"[01]\.\d{4}", reply.headers["x-coterie-confidence"])
    assert re.fullmatch(r"\d+", reply.headers["x-coterie-queue-ms"])


def test_a_stream_says_the_same_as_a_whole_answer(server: Served) -> None:
    whole = server.post("/v1/infer", ask(seed=5, temperature=1)).json
    reply = server.post("/v1/infer", ask(seed=5, temperature=1, stream=True))
    assert reply.headers["content-type"].startswith("text/event-stream")
    told = frames(reply.body)
    names = [name for name, _ in told]
    assert names[0] == "started" and names[-1] == "finished" and set(names[1:-1]) == {"delta"}
    started, finished = told[0][1], told[-1][1]
    assert started["job_id"] == finished["job_id"] != whole["job_id"]
    assert "".join(data["text"] for name, data in told if name == "delta") == whole["text"]
    assert finished["text"] == whole["text"] and list(finished) == list(whole)


def test_the_plan_is_told_when_it_is_asked_for(server: Served) -> None:
    plan = server.post("/v1/infer", ask(explain=True, top_p=0.5)).json["plan"]
    assert plan["generation_params"]["top_p"] == 0.5
    assert plan["reasoning_trace"]["language"] and plan["reasons"]
    started = frames(server.post("/v1/infer", ask(explain=True, stream=True)).body)[0][1]
    assert started["plan"]["composition_order"] == []
    assert plan["generation_params"]["max_tokens"] == 6
    assert started["plan"]["generation_params"]["max_tokens"] == 6


def test_a_length_of_ours_is_told_as_it_was_cut(server: Served) -> None:
    """The task type's own is longer than what is left of the context."""
    body = ask(explain=True, max_tokens=None, context_size=64)
    answer = server.post("/v1/infer", body).json
    room = 64 - answer["metrics"]["input_tokens"]
    assert answer["plan"]["generation_params"]["max_tokens"] == room > 0
    assert answer["tokens_generated"] <= room


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"force_experts": ["nobody"]}, 404, "force_experts"),
        ({"exclude_experts": ["nobody"]}, 404, "exclude_experts"),
        ({"model": "nobody"}, 404, "model"),
        ({"context_size": 16, "max_tokens": 15}, 400, "context_size"),
        ({"regex": "(open"}, 400, "regex"),
        ({"grammar": "start: nothing"}, 400, "grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
    ],
)
def test_refusals_keep_their_status_also_when_streamed(
    server: Served, fields: dict[str, Any], status: int, param: str | None
) -> None:
    for stream in (False, True):
        reply = server.post("/v1/infer", ask(stream=stream) | fields)
        error = reply.json["error"]
        assert reply.status == status, error
        named = error["param"] and ".".join(error["param"].split(".")[:1])
        assert named == param, error


@pytest.mark.parametrize("field", ["force_experts", "exclude_experts"])
def test_unknown_experts_are_refused_alike_on_every_road(server: Served, field: str) -> None:
    body = ask() | {field: ["nobody"]}
    told = [
        (reply.status, reply.json["error"])
        for reply in (
            server.post("/v1/infer", body),
            server.post("/v1/infer", body | {"stream": True}),
            server.post("/v1/infer", body, Prefer="respond-async"),
        )
    ]
    status, error = told[0]
    assert status == 404 and error["param"] == field
    assert error["message"].startswith("The expert `nobody`")
    assert told == [told[0]] * 3


def test_context_size_caps_prompt_and_output(server: Served) -> None:
    used = server.post("/v1/infer", ask()).json["metrics"]["input_tokens"]
    answer = server.post("/v1/infer", {"prompt": "hello there", "context_size": used + 9}).json
    assert answer["metrics"]["input_tokens"] + answer["tokens_generated"] <= used + 9


def idle(server: Served) -> bool:
    running = server.metric("vllm:num_requests_running")
    return running == 0 == server.metric("coterie_gateway_open_streams")


def test_a_client_that_leaves_aborts_its_request(server: Served) -> None:
    url, body = server.url + "/v1/infer", ask(max_tokens=400)
    before = server.metric("vllm:generation_tokens_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=httpx.Timeout(10, read=0.05))
    with httpx.stream("POST", url, json=body | {"stream": True}) as stream:
        assert next(stream.iter_lines()) == "event: started"
    deadline = time.monotonic() + 60
    while not idle(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # neither ran to its end
    assert server.metric("vllm:generation_tokens_total") - before < 700


def test_a_job_is_accepted_and_answered_later(server: Served) -> None:
    reply = server.post("/v1/infer", ask(), prefer="wait=5, respond-async")
    assert reply.status == 202
    job = reply.json
    assert reply.headers["location"] == f"/v1/jobs/{job['job_id']}"
    assert reply.headers["preference-applied"] == "respond-async"
    assert job["status"] in ("queued", "processing") and job["estimated_wait_ms"] >= 0
    deadline = time.monotonic() + 60
    while (view := server.get(reply.headers["location"]).json)["status"] != "succeeded":
        assert time.monotonic() < deadline, view
        time.sleep(0.02)
    assert view["result"]["text"] == server.post("/v1/infer", ask()).json["text"]


def test_reception_is_measured(server: Served) -> None:
    before = server.metric("coterie_reception_seconds_count")
    server.post("/v1/infer", ask())
    assert server.metric("coterie_reception_seconds_count") == before + 1


def test_users_have_a_rate_and_tenants_their_own_log(strict_server: Served) -> None:
    mine, theirs = bearer(FIRST), bearer(SECOND)
    ann, ids = str(uuid.uuid4()), []
    for _ in range(2):
        reply = strict_server.post("/v1/infer", ask(user_id=ann), **mine)
        assert reply.status == 200, reply.body
        ids.append(reply.json["job_id"])
    reply = strict_server.post("/v1/infer", ask(user_id=ann), **mine)
    assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(reply.headers["retry-after"]) <= 5
    # another user, and the same name of another tenant
    assert strict_server.post("/v1/infer", ask(user_id="bob" + ann), **mine).status == 200
    assert strict_server.post("/v1/infer", ask(user_id=ann), **theirs).status == 200
    page = strict_server.get("/v1/inferences?limit=2", **mine).json
    assert page["has_more"] and [row["job_id"] for row in page["data"]][1] == ids[1]
    assert [row["user_id"] for row in page["data"]] == ["bob" + ann, ann]
    rest = strict_server.get(f"/v1/inferences?after={page['next']}", **mine).json
    assert rest["data"][0]["job_id"] == ids[0]
    others = strict_server.get("/v1/inferences?limit=100", **theirs).json["data"]
    assert others and not {row["job_id"] for row in others} & set(ids)
    assert strict_server.get("/v1/inferences?limt=1", **mine).json["error"]["param"] == "limt"


def test_one_verdict_per_job_and_on_own_jobs_alone(strict_server: Served) -> None:
    mine, theirs = bearer(FIRST), bearer(SECOND)
    job_id = strict_server.post("/v1/infer", ask(user_id=str(uuid.uuid4())), **mine).json["job_id"]
    verdict = {"job_id": job_id, "verdict": "good", "comment": "as I wished"}

    def judge(key: dict[str, str], **fields: Any) -> tuple[int, Any]:
        reply = strict_server.post("/v1/feedback", verdict | fields, **key)
        return reply.status, json.loads(reply.body)

    assert judge(theirs)[0] == 404
    assert judge(mine, verdict="so-so")[1]["error"]["param"] == "verdict"
    assert judge(mine, comment="x" * 2001)[1]["error"]["param"] == "comment"
    assert judge(mine, verdict=True) == (200, {"job_id": job_id, "verdict": "good"})
    status, refusal = judge(mine, verdict="bad")
    assert (status, refusal["error"]["code"]) == (409, "conflict")
    assert "as I wished" not in strict_server.log()
