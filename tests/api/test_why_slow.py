"""Where the time of a request went, on every API, for a model without routed experts too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.serving.server_process import Served, chat, frames

PARTS = {"queue_s", "grammar_s", "adapters_s", "prefill_s", "prefill_tok_s", "ttft_s", "decode_s",
         "decode_tok_s", "total_s", "preemptions", "cached_tokens", "spent"}  # fmt: skip
WAITS = ("device_s", "link_s", "disk_s", "cpu_s", "host_s", "others_s")
MESSAGES = [{"role": "user", "content": "hello there"}]
ANTHROPIC = {"model": "tiny", "max_tokens": 8, "messages": MESSAGES}
INFER = {"prompt": "hello there", "max_tokens": 8, "model": "tiny"}


def check(told: dict[str, Any]) -> None:
    assert "experts" not in told and "adapters" not in told
    timings = told["timings"]
    assert timings.keys() == PARTS
    assert 0 < timings["ttft_s"] <= timings["total_s"]
    spent = timings["queue_s"] + timings["prefill_s"] + timings["decode_s"]
    # one clock's: nothing but rounding lies between them
    assert 0 < spent <= timings["total_s"] + 5e-6
    assert timings["grammar_s"] + timings["adapters_s"] <= timings["queue_s"] + 0.001
    assert timings["spent"].keys() == {*WAITS, "unknown_s"}
    told_s = timings["queue_s"] + sum(timings["spent"].values())
    assert timings["spent"]["device_s"] > 0
    assert abs(told_s - timings["total_s"]) < 0.1 * timings["total_s"] + 0.001


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", chat(), "coterie"),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 8}, "coterie"),
        ("/v1/messages", ANTHROPIC, "coterie"),
        ("/v1/infer", INFER, "telemetry"),
    ],
)
def test_whole_answers(server: Served, path: str, body: dict[str, Any], field: str) -> None:
    reply = server.post(path, body, anthropic_version="2023-06-01")
    assert reply.status == 200, reply.body
    check(reply.json[field])


def test_streams(server: Served) -> None:
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    sent = frames(server.post("/v1/chat/completions", chat(**usage)).body)
    check(next(data["coterie"] for _, data in sent if "coterie" in data))
    sent = frames(server.post("/v1/infer", INFER | {"stream": True}).body)
    [last] = [data for name, data in sent if name == "finished"]
    check(last["telemetry"])


def test_a_grammar_that_was_waited_for_is_told(server: Served) -> None:
    before = server.metric("coterie_request_seconds_total")
    reply = server.post("/v1/infer", INFER | {"regex": "(a|b){3}c[0-9]{2}", "max_tokens": 30})
    assert reply.status == 200, reply.body
    check(reply.json["telemetry"])
    assert reply.json["telemetry"]["timings"]["grammar_s"] > 0
    assert server.metric("coterie_request_seconds_total") > before
