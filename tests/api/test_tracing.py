"""Traces of real servers, received by an OTLP receiver in a process of its own."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from websockets.sync.client import connect

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, own_home
from tests.helpers.serving.trace_receiver import TraceReceiver

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = ["parse", "route", "admit", "queue", "prefill", "decode", "finish"]
ENCODER_STAGES = ["parse", "route", "admit", "queue", "encode", "finish"]
ORDER = [*STAGES[:4], "encode", *STAGES[4:]]
INTERNAL, SERVER, CLIENT = 1, 2, 3
RECEIVER_KEY, CALLER_KEY = "key-of-the-receiver", "key-of-a-caller"
SECRET = "xylophone"
SETTINGS = """
[engine]
kv_bytes = "16MB"
[server]
grpc_port = 0
api_key_file = "{folder}/keys"
[tracing]
endpoint = "{receiver}"
headers_env = "RECEIVER_HEADERS"
service_name = "near"
[[specialists]]
kind = "encoder"
model = "static"
[[specialists]]
name = "near"
model = "{tiny}"
[[specialists]]
name = "far"
[specialists.remote]
url = "{far}/v1"
model = "tiny"
context = 1024
"""


@pytest.fixture(scope="module")
def receiver() -> Iterator[TraceReceiver]:
    process = TraceReceiver()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def far(receiver: TraceReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The remote specialist: another server, which traces too and has little room for spans."""
    file = tmp_path_factory.mktemp("far") / "coterie.toml"
    file.write_text('[tracing]\nendpoint = "env"\nmax_queue = 4\ntimeout_s = 0.5\n')
    served = Served(
        str(tiny_checkpoint("llama")), "--name", "tiny", "--config", str(file),
        "--kv-bytes", "16MB", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
    )  # fmt: skip
    yield served
    served.stop()


@pytest.fixture(scope="module")
def near(
    receiver: TraceReceiver, far: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("near")
    (folder / "keys").write_text(CALLER_KEY + "\n")
    file = folder / "coterie.toml"
    tiny = tiny_checkpoint("llama")
    file.write_text(SETTINGS.format(folder=folder, receiver=receiver.url, far=far.url, tiny=tiny))
    served = Served(
        "--config", str(file), COTERIE_HOME=str(own_home(folder / "home")),
        RECEIVER_HEADERS=f"x-receiver-key={RECEIVER_KEY}",
    )  # fmt: skip
    deadline, key = time.monotonic() + 30, f"Bearer {CALLER_KEY}"
    try:
        while not served.get("/health", authorization=key).json["specialists"]["far"]["ready"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield served
    finally:
        served.stop()


def post(served: Served, path: str, body: Any, **headers: str) -> Any:
    reply = served.post(path, body, authorization=f"Bearer {CALLER_KEY}", **headers)
    assert reply.status == 200, reply.body
    return reply


def trace_of(reply: Any) -> str:
    version, trace_id, _, _ = reply.headers["traceparent"].split("-")
    assert version == "00"
    return str(trace_id)


def taken(span: dict[str, Any]) -> float:
    return float(span["end_ns"] - span["start_ns"]) / 1e9


def server_and_stages(
    spans: list[dict[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (server,) = [span for span in spans if span["kind"] == SERVER]
    stages = [span for span in spans if span["parent_id"] == server["span_id"]]
    return server, sorted(
        (span for span in stages if span["kind"] == INTERNAL),
        key=lambda span: ORDER.index(span["name"]),
    )


def test_the_stages_of_a_routed_request_add_up_to_its_latency(
    near: Served, receiver: TraceReceiver
) -> None:
    body = chat(SECRET, model="auto", max_tokens=400, ignore_eos=True)
    shares = []
    # on a busy machine the caller itself may have to wait
    for _ in range(5):
        began = time.monotonic()
        reply = post(near, "/v1/chat/completions", body)
        latency_s = time.monotonic() - began
        server, stages = server_and_stages(receiver.spans(trace_of(reply)))
        assert [span["name"] for span in stages] == STAGES
        together_s = sum(map(taken, stages))
        assert together_s == pytest.approx(taken(server), rel=1e-6)
        # the server still writes its records when the caller has everything
        assert together_s <= 1.05 * latency_s
        shares.append(together_s / latency_s)
        if shares[-1] > 0.95:
            break
    assert shares[-1] > 0.95, shares
    told = reply.json["coterie"]["receipt"]["timings"]
    for name, key in (("prefill", "prefill_ms"), ("decode", "decode_ms")):
        stage = next(span for span in stages if span["name"] == name)
        assert taken(stage) * 1000 == pytest.approx(told[key], rel=0.02, abs=0.5)
    assert told["total_ms"] == pytest.approx(together_s * 1000, rel=0.05)
    assert server["attributes"]["coterie.request_id"] == reply.headers["x-request-id"]
    # the same trace in the log
    assert f'"trace_id":"{trace_of(reply)}"' in near.log()


def test_spans_carry_the_genai_conventions_and_no_text(
    near: Served, receiver: TraceReceiver
) -> None:
    body = chat(SECRET, model="auto", max_tokens=6, ignore_eos=True, seed=7, temperature=0.5)
    reply = post(near, "/v1/chat/completions", body)
    server, _ = server_and_stages(receiver.spans(trace_of(reply)))
    usage, attributes = reply.json["usage"], server["attributes"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "auto",
        "gen_ai.response.model": "near",
        "gen_ai.response.id": reply.json["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.seed": 7,
        "gen_ai.request.temperature": 0.5,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "coterie.admission": "admitted",
    }
    assert expected.items() <= attributes.items()
    assert server["name"] == "chat auto" and not server["is_error"]
    assert "error.type" not in attributes and server["parent_id"] == ""
    everything = receiver.received()
    assert everything["resources"][-1]["service.name"] in ("near", "coterie")
    assert any(one.get("x-receiver-key") == RECEIVER_KEY for one in everything["headers"])
    text = json.dumps(everything["spans"])
    assert SECRET not in text and RECEIVER_KEY not in text and CALLER_KEY not in text
    assert RECEIVER_KEY not in near.log() and CALLER_KEY not in near.log()


def test_every_dialect_is_traced(near: Served, receiver: TraceReceiver) -> None:
    prompt = {"model": "near", "max_tokens": 4}
    hello = chat()["messages"]
    calls = (
        ("/v1/messages", chat(model="near"), "chat"),
        ("/v1/completions", {**prompt, "prompt": ["one", "two"]}, "text_completion"),
        ("/v1/responses", {"model": "near", "input": "hello", "max_output_tokens": 16}, "chat"),
        ("/v1/infer", {**prompt, "prompt": "hello"}, "text_completion"),
        ("/v1/chat/completions", chat(model="near", stream=True), "chat"),
        ("/api/chat", {"model": "near", "stream": False, "messages": hello}, "chat"),
        ("/api/generate", {"model": "near", "prompt": "hello", "stream": False}, "chat"),
        ("/completion", {"model": "near", "prompt": "hello", "n_predict": 4}, "text_completion"),
    )
    replies = [post(near, path, body) for path, body, _ in calls]
    for (path, _, operation), reply in zip(calls, replies, strict=True):
        server, stages = server_and_stages(receiver.spans(trace_of(reply)))
        assert server["attributes"]["gen_ai.operation.name"] in (operation, "chat"), path
        assert server["attributes"]["gen_ai.usage.output_tokens"] > 0
        num_prompts = 2 if path == "/v1/completions" else 1
        assert [span["name"] for span in stages] == sorted(
            STAGES * num_prompts, key=STAGES.index
        ), path


def test_encoders_are_traced(near: Served, receiver: TraceReceiver) -> None:
    texts = {"query": SECRET, "documents": ["a fox", SECRET]}
    calls = (
        ("/v1/embeddings", {"model": "static", "input": SECRET}, "embeddings"),
        ("/v1/rerank", texts, "rerank"),
        ("/v1/score", {"model": "auto", "text_1": SECRET, "text_2": "a fox"}, "score"),
        ("/api/embed", {"model": "static:latest", "input": SECRET}, "embeddings"),
    )
    refused = near.post(
        "/v1/embeddings", {"model": "nobody", "input": "a"},
        authorization=f"Bearer {CALLER_KEY}", traceparent=f"00-{'e' * 32}-{SPAN}-01",
    )  # fmt: skip
    replies = [post(near, path, body) for path, body, _ in calls]
    for (path, _, operation), reply in zip(calls, replies, strict=True):
        server, stages = server_and_stages(receiver.spans(trace_of(reply)))
        assert [span["name"] for span in stages] == ENCODER_STAGES
        assert sum(map(taken, stages)) == pytest.approx(taken(server), rel=1e-6)
        attributes = server["attributes"]
        assert attributes["gen_ai.operation.name"] == operation
        assert attributes["gen_ai.response.model"] == "static"
        assert attributes["gen_ai.response.id"] == reply.headers["x-coterie-receipt"]
        assert attributes["gen_ai.usage.input_tokens"] > 0
        assert attributes["http.route"] == path
    assert refused.status == 404
    server, stages = server_and_stages(receiver.spans("e" * 32))
    assert server["attributes"]["error.type"] == "not_found"
    assert [span["name"] for span in stages] == ["parse", "route", "finish"]
    assert SECRET not in json.dumps(receiver.received()["spans"])


def test_other_transports_and_jobs_are_traced(near: Served, receiver: TraceReceiver) -> None:
    headers = {
        "authorization": f"Bearer {CALLER_KEY}", "traceparent": f"00-{'c' * 32}-{SPAN}-01",
    }  # fmt: skip
    url = near.url.replace("http", "ws", 1) + "/v1/infer/ws"
    with connect(url, additional_headers=headers, open_timeout=30) as socket:
        socket.send(json.dumps({"prompt": "hello", "max_tokens": 4}))
        while json.loads(socket.recv(timeout=30))["event"] != "finished":
            pass
    server, stages = server_and_stages(receiver.spans("c" * 32))
    assert server["parent_id"] == SPAN and [span["name"] for span in stages] == STAGES
    found = re.search(r"gRPC on (\S+)", near.log())
    assert found
    with grpc.insecure_channel(found[1]) as channel:
        infer = channel.unary_unary(
            "/coterie.v1.Inference/Infer",
            pb.InferRequest.SerializeToString,
            pb.InferenceResult.FromString,
        )
        metadata = list((headers | {"traceparent": f"00-{'d' * 32}-{SPAN}-01"}).items())
        assert infer(pb.InferRequest(prompt="hello", max_tokens=4), metadata=metadata).text
    server, stages = server_and_stages(receiver.spans("d" * 32))
    assert server["attributes"]["http.route"] == "/coterie.v1.Inference/Infer"
    assert [span["name"] for span in stages] == STAGES
    job = near.post(
        "/v1/infer", {"prompt": "hello", "max_tokens": 4},
        authorization=headers["authorization"], prefer="respond-async",
    )  # fmt: skip
    assert job.status == 202
    deadline = time.monotonic() + 20
    while not (roots := _of_job(receiver, job.json["job_id"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # a trace of its own: the request that submitted it has ended
    assert roots[0]["kind"] == INTERNAL and roots[0]["parent_id"] == ""
    assert roots[0]["trace_id"] != trace_of(job)
    assert roots[0]["attributes"]["gen_ai.usage.output_tokens"] == 4


def _of_job(receiver: TraceReceiver, job_id: str) -> list[dict[str, Any]]:
    return [
        span
        for span in receiver.received()["spans"]
        if span["attributes"].get("coterie.request_id") == job_id
    ]


def test_a_traceparent_is_continued_and_its_flag_honoured(
    near: Served, receiver: TraceReceiver
) -> None:
    reply = post(
        near, "/v1/chat/completions", chat(model="near"),
        traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="vendor=a,other=b",
    )  # fmt: skip
    assert trace_of(reply) == TRACE
    server, _ = server_and_stages(receiver.spans(TRACE))
    assert server["parent_id"] == SPAN and server["state"] == "vendor=a,other=b"
    assert reply.headers["traceparent"] == f"00-{TRACE}-{server['span_id']}-01"
    assert server["flags"] == 0x301
    other = "5" * 32
    reply = post(
        near, "/v1/chat/completions", chat(model="near"), traceparent=f"00-{other}-{SPAN}-00"
    )
    assert reply.headers["traceparent"].startswith(f"00-{other}-")
    assert reply.headers["traceparent"].endswith("-00")
    # spans of later requests come, its own do not
    receiver.spans(trace_of(post(near, "/v1/chat/completions", chat(model="near"))))
    assert all(span["trace_id"] != other for span in receiver.received()["spans"])
    assert other not in near.log()


@pytest.mark.parametrize("bad", ["nonsense", f"00-{'0' * 32}-{SPAN}-01"])
def test_a_malformed_traceparent_is_ignored(
    near: Served, receiver: TraceReceiver, bad: str
) -> None:
    reply = post(near, "/v1/chat/completions", chat(model="near"), traceparent=bad)
    server, stages = server_and_stages(receiver.spans(trace_of(reply)))
    assert server["parent_id"] == "" and len(stages) == 7


def test_a_remote_specialist_gets_the_same_trace(near: Served, receiver: TraceReceiver) -> None:
    trace_id = "6" * 32
    post(
        near, "/v1/chat/completions", chat(model="far"),
        traceparent=f"00-{trace_id}-{SPAN}-01", tracestate="vendor=a",
    )  # fmt: skip
    deadline = time.monotonic() + 20
    spans = receiver.spans(trace_id)
    while sum(span["kind"] == SERVER for span in spans) < 2:
        assert time.monotonic() < deadline, spans
        time.sleep(0.05)
        spans = receiver.spans(trace_id)
    (call,) = [span for span in spans if span["kind"] == CLIENT]
    ours, theirs = (
        next(s for s in spans if s["kind"] == SERVER and (s["parent_id"] == SPAN) is is_ours)
        for is_ours in (True, False)
    )
    assert call["parent_id"] == ours["span_id"] and theirs["parent_id"] == call["span_id"]
    assert theirs["state"] == "vendor=a" and theirs["attributes"]["gen_ai.response.model"] == "tiny"
    assert ours["attributes"]["gen_ai.response.model"] == "far"
    assert call["attributes"]["gen_ai.request.model"] == "tiny"
    assert call["attributes"]["server.address"] == "127.0.0.1"
    assert ours["start_ns"] <= call["start_ns"] <= call["end_ns"]
    # the call is closed a moment after its last event was passed on
    assert call["end_ns"] <= ours["end_ns"] + 10**8
    # an unsampled trace is passed on as such
    other = "7" * 32
    post(near, "/v1/chat/completions", chat(model="far"), traceparent=f"00-{other}-{SPAN}-00")
    receiver.spans(trace_of(post(near, "/v1/chat/completions", chat(model="far"))))
    assert all(span["trace_id"] != other for span in receiver.received()["spans"])


def test_refusals_and_aborts_are_traced(near: Served, receiver: TraceReceiver) -> None:
    key = {"authorization": f"Bearer {CALLER_KEY}"}
    calls: tuple[tuple[int, Any, str, list[str] | None], ...] = (
        (1, chat(model="nobody"), "not_found", ["parse", "route", "finish"]),
        (2, chat("a " * 3000, model="near"), "context_length_exceeded", None),
        (3, b"{", "invalid_request", ["parse"]),
    )
    replies = [
        near.post(
            "/v1/chat/completions", body, traceparent=f"00-{str(number) * 32}-{SPAN}-01", **key
        )
        for number, body, _, _ in calls
    ]
    for (number, _, code, stages), reply in zip(calls, replies, strict=True):
        trace_id = str(number) * 32
        assert 400 <= reply.status < 500
        server, found = server_and_stages(receiver.spans(trace_id))
        assert server["attributes"]["error.type"] == code, server
        assert server["attributes"]["http.response.status_code"] == reply.status
        assert not server["is_error"]
        if stages is not None:
            assert [span["name"] for span in found] == stages
        assert sum(map(taken, found)) == pytest.approx(taken(server), rel=1e-6)
    # without a key nothing is traced
    near.post("/v1/chat/completions", chat(model="near"), traceparent=f"00-{'8' * 32}-{SPAN}-01")
    body = chat(model="near", max_tokens=900, ignore_eos=True, stream=True)
    request = urllib.request.Request(
        near.url + "/v1/chat/completions", json.dumps(body).encode(),
        {"content-type": "application/json", "traceparent": f"00-{'9' * 32}-{SPAN}-01", **key},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as stream:
        stream.read(200)
    server, found = server_and_stages(receiver.spans("9" * 32))
    assert server["attributes"]["gen_ai.response.finish_reasons"] == ["abort"]
    assert server["attributes"]["http.response.status_code"] == 499
    assert [span["name"] for span in found] == STAGES
    assert all(span["trace_id"] != "8" * 32 for span in receiver.received()["spans"])


def logged(served: Served, event: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while f'"event":"{event}"' not in served.log():
        assert time.monotonic() < deadline, event
        time.sleep(0.05)


def test_a_slow_receiver_slows_no_request_and_drops_are_counted(
    far: Served, receiver: TraceReceiver
) -> None:
    def spans(result: str) -> float:
        return far.metric(f'coterie_trace_spans_total{{result="{result}"}}')

    def wait_for(result: str, count: float) -> None:
        deadline = time.monotonic() + 20
        while spans(result) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    assert far.post("/v1/chat/completions", chat()).status == 200
    wait_for("sent", 1)
    assert spans("dropped") == 0
    receiver.answer(wait_s=30.0)
    try:
        slowest_s = 0.0
        for _ in range(30):
            began = time.monotonic()
            assert far.post("/v1/chat/completions", chat()).status == 200
            slowest_s = max(slowest_s, time.monotonic() - began)
        assert slowest_s < 5.0
        # every request but those that wait or are being sent
        assert spans("dropped") >= 8 * (30 - 4 - 4)
        assert '"event":"request_failed"' not in far.log()
        logged(far, "trace_receiver_down")
        assert far.post("/v1/chat/completions", chat()).status == 200
    finally:
        receiver.answer()
    logged(far, "trace_receiver_back")
    receiver.answer(rejected=2)
    lost = spans("lost")
    trace_id = trace_of(far.post("/v1/chat/completions", chat()))
    receiver.spans(trace_id)
    wait_for("lost", lost + 2)
    receiver.answer()
