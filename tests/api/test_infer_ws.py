"""/v1/infer/ws against a real server: overlap, cancellation, refusals, doors, limits."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from coterie.api.transport.ws import MAX_REFUSALS
from tests.helpers.serving.server_process import Served

BUSY = ("coterie_gateway_open_streams", "vllm:num_requests_running", "vllm:num_requests_waiting")
KEY = "key-of-the-first-tenant"


def dial(server: Served, **options: Any) -> ClientConnection:
    url = server.url.replace("http", "ws", 1) + "/v1/infer/ws"
    return connect(url, open_timeout=30, close_timeout=5, **options)


def say(socket: ClientConnection, **fields: Any) -> None:
    socket.send(json.dumps(fields))


def hear(socket: ClientConnection) -> Any:
    return json.loads(socket.recv(timeout=30))


def until_ended(socket: ClientConnection, count: int = 1) -> dict[str, list[Any]]:
    """Events by request_id, until so many requests have ended."""
    heard: dict[str, list[Any]] = defaultdict(list)
    while count:
        event = hear(socket)
        heard[event.get("request_id", "")].append(event)
        count -= event["event"] in ("finished", "error")
    return heard


def test_requests_overlap_and_are_told_apart(server: Served) -> None:
    with dial(server) as socket:
        for tag in ("a", "b", "c"):
            say(socket, prompt=f"hello {tag}", max_tokens=12, temperature=0, request_id=tag)
        heard = until_ended(socket, 3)
    assert sorted(heard) == ["a", "b", "c"]
    for tag, events in heard.items():
        assert events[0]["event"] == "started"
        assert len({event["job_id"] for event in events}) == 1
        last = events[-1]
        assert last["event"] == "finished" and last["tokens_generated"] == 12
        assert last["text"] == "".join(e["text"] for e in events if e["event"] == "delta")
        alone = server.post(
            "/v1/infer", {"prompt": f"hello {tag}", "max_tokens": 12, "temperature": 0}
        )
        assert last["text"] == alone.json["text"]


def test_one_request_is_cancelled_and_another_goes_on(server: Served) -> None:
    with dial(server) as socket:
        say(socket, prompt="tell a long story", max_tokens=400, request_id="long")
        job_id = hear(socket)["job_id"]
        say(socket, prompt="short", max_tokens=4, request_id="short")
        say(socket, cancel=job_id)
        heard = until_ended(socket, 2)
    assert heard["long"][-1]["finish_reason"] == "abort"
    assert heard["long"][-1]["tokens_generated"] < 400
    metrics = heard["long"][-1]["metrics"]
    assert (metrics["finish_reason"], metrics["success"]) == ("abort", False)
    assert metrics["job_id"] == job_id and metrics["total_latency_ms"] > 0
    assert heard["short"][-1]["finish_reason"] == "length"


def test_a_second_cancellation_finds_nothing_to_cancel(server: Served) -> None:
    with dial(server) as socket:
        say(socket, prompt="tell a long story", max_tokens=400, request_id="long")
        job_id = hear(socket)["job_id"]
        for _ in range(3):
            say(socket, cancel=job_id)
        heard = until_ended(socket, 3)
        say(socket, prompt="short", max_tokens=2, request_id="short")
        heard |= until_ended(socket)
    ends = [event for event in heard["long"] if event["event"] == "finished"]
    assert [event["finish_reason"] for event in ends] == ["abort"]
    assert [event["error"]["code"] for event in heard[""]] == ["job_not_found"] * 2
    assert [event["event"] for event in heard["short"]][-1] == "finished"


def test_refusals_are_events_and_leave_the_connection_open(server: Served) -> None:
    with dial(server) as socket:
        for fields, param in (
            ({"prompt": " "}, "prompt"),
            ({"prompt": "x", "temprature": 1}, "temprature"),
            ({"prompt": "x", "force_experts": ["nobody"]}, "force_experts"),
            ({"cancel": "nothing"}, "job_id"),
            ({"cancel": "nothing", "prompt": "x"}, "cancel"),
            ({"prompt": "x", "request_id": 5}, "request_id"),
        ):
            say(socket, **fields)
            event = hear(socket)
            assert (event["event"], event["error"]["param"]) == ("error", param)
            # a cancellation asks for no answer
            assert ("receipt_id" in event) == ("cancel" not in fields)
            if "receipt_id" in event:
                receipt = server.get(f"/v1/receipts/{event['receipt_id']}")
                assert receipt.status == 200 and receipt.json["admission"] == "refused"
        socket.send("[1, 2]")
        assert "JSON object" in hear(socket)["error"]["message"]
        socket.send("{nothing")
        event = hear(socket)
        assert "not valid JSON" in event["error"]["message"]
        assert server.get(f"/v1/receipts/{event['receipt_id']}").json["outcome"] == (
            "invalid_request"
        )
        socket.send(" ")
        assert "is empty" in hear(socket)["error"]["message"]
        say(socket, prompt="still here", max_tokens=2)
        assert until_ended(socket)[""][-1]["event"] == "finished"


def test_more_than_sixteen_at_once_are_refused(server: Served) -> None:
    with dial(server) as socket:
        # so long that none has ended when the last one is read, however late that is
        for index in range(17):
            say(socket, prompt="go", max_tokens=900, regex="[a-z ]{9000}", request_id=str(index))
        while (event := hear(socket))["event"] != "error":
            assert event["event"] != "finished"
    assert event["request_id"] == "16" and event["retry_after_ms"] == 1000
    assert event["error"]["code"] == "rate_limit_exceeded"


def test_leaving_aborts_what_runs(server: Served) -> None:
    with dial(server) as socket:
        for _ in range(3):
            say(socket, prompt="a story without an end", max_tokens=400)
        assert hear(socket)["event"] == "started"
    deadline = time.monotonic() + 60
    while any(server.metric(name) for name in BUSY):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_message_over_the_limit_closes_the_connection(server: Served) -> None:
    with dial(server, max_size=None) as socket, pytest.raises(ConnectionClosedError) as closed:
        socket.send("x" * 4_100_000)
        socket.recv(timeout=30)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_keys_by_header_and_by_subprotocol(strict_server: Served) -> None:
    for options in (
        {"additional_headers": {"Authorization": f"Bearer {KEY}"}},
        {"subprotocols": ["coterie", f"coterie-key.{KEY}"]},
    ):
        with dial(strict_server, **options) as socket:
            say(socket, prompt="hello", max_tokens=2)
            assert until_ended(socket)[""][-1]["event"] == "finished"
            # the key is never sent back
            assert socket.subprotocol in (None, "coterie")
    for wrong in ({}, {"subprotocols": ["coterie", "coterie-key.wrong"]}):
        with pytest.raises(InvalidStatus) as refused:
            dial(strict_server, **wrong)
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
    assert KEY not in strict_server.log()


def test_pages_of_other_origins_cannot_connect(server: Served) -> None:
    for origin in ("https://elsewhere.example", "http://[", "null"):
        with pytest.raises(InvalidStatus) as refused:
            dial(server, origin=origin)
        assert refused.value.response.status_code == 403
    with dial(server, origin=server.url) as socket:
        say(socket, prompt="hello", max_tokens=1)
        assert until_ended(socket)[""][-1]["event"] == "finished"


@pytest.mark.parametrize(
    "text", ["not json", '{"cancel": "job_of_nobody"}', '{"prompt": "x", "model": "nobody"}']
)
def test_a_connection_has_few_refusals(server: Served, text: str) -> None:
    """Each has a line in the log, so a client that sends nothing else may not go on."""
    before = server.log().count('"method":"WEBSOCKET"')
    num_errors = 0
    with dial(server) as socket, pytest.raises(ConnectionClosedError) as ended:
        for _ in range(20 * MAX_REFUSALS):
            socket.send(text)
            num_errors += hear(socket)["event"] == "error"
    assert ended.value.rcvd is not None and ended.value.rcvd.code == 1008
    assert "were refused" in ended.value.rcvd.reason
    # a slow machine begins a new time meanwhile
    assert MAX_REFUSALS <= num_errors < 20 * MAX_REFUSALS
    assert server.log().count('"method":"WEBSOCKET"') - before <= num_errors + 1
    with dial(server) as socket:
        say(socket, prompt="hello", max_tokens=2)
        assert until_ended(socket)[""][-1]["event"] == "finished"
