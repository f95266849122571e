"""gRPC with a real channel: the calls, keys, limits, errors, deadlines, health, reflection."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving import http2_frames
from tests.helpers.serving.server_process import MAX_PROBE_S, Probe, Served, own_home

KEY, OTHER = "key-of-the-caller", "key-of-another"
SERVICE = "coterie.v1.Inference"
# ten thousand letters, which no token ends and no grammar foresees
LARK = "start: k~10\nk: h~10\nh: t~10\nt: /[a-y]/~10\n"
LONG: dict[str, Any] = {"grammar": pb.Grammar(type="lark", text=LARK), "max_tokens": 7000}
# how long the server waits for a client that does not read
WRITE_S = 4.0
_Code = grpc.StatusCode


class Stub:
    """Calls by name, with a key."""

    def __init__(self, channel: grpc.Channel, key: str = KEY) -> None:
        self.channel, self.metadata = channel, (("authorization", f"Bearer {key}"),)

    def call(self, name: str, request: Any, **options: Any) -> Any:
        method = pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name[name]
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        answers = getattr(pb, method.output_type.name)
        invoke = make(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answers.FromString,
        )
        return invoke(request, metadata=self.metadata, timeout=options.pop("timeout", 60))

    def infer(self, prompt: str = "hello", **fields: Any) -> Any:
        return self.call("Infer", pb.InferRequest(prompt=prompt, **fields))


@pytest.fixture(scope="module")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("grpc")
    (folder / "keys").write_text(f"{KEY}\n{OTHER}\n")
    (folder / "coterie.toml").write_text(f"[server]\nwrite_timeout_s = {WRITE_S}\n")
    served = Served(
        *(str(tiny_checkpoint("llama", max_position_embeddings=8192)), "--name", "tiny"),
        *("--config", str(folder / "coterie.toml")),
        *("--grpc-port", "0", "--api-key-file", str(folder / "keys"), "--user-rate", "5"),
        COTERIE_HOME=str(own_home(folder / "home")),
    )
    yield served
    assert served.stop() == 0, served.log()


@pytest.fixture(scope="module")
def channel(grpc_server: Served) -> Iterator[grpc.Channel]:
    found = re.search(r"gRPC on (\S+)", grpc_server.log())
    assert found, grpc_server.log()
    with grpc.insecure_channel(found[1]) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Stub:
    return Stub(channel)


def metric(served: Served, name: str) -> float:
    text = served.get("/metrics", authorization=f"Bearer {KEY}").body.decode()
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*?\}})? (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return sum(map(float, found))


def test_an_answer_is_the_one_that_http_gives(stub: Stub, grpc_server: Served) -> None:
    fields: dict[str, Any] = {"prompt": "Say it", "seed": 2**40, "max_tokens": 20, "explain": True}
    over_grpc = json_format.MessageToDict(
        stub.call("Infer", pb.InferRequest(**fields), timeout=None),
        preserving_proto_field_name=True,
    )
    over_http = grpc_server.post("/v1/infer", fields, authorization=f"Bearer {KEY}").json
    same = ("text", "tokens_generated", "finish_reason", "model", "task_type", "confidence")
    assert {name: over_grpc[name] for name in same} == {name: over_http[name] for name in same}
    params = over_grpc["plan"]["generation_params"]
    told = {name: value for name, value in over_http["plan"]["generation_params"].items() if value}
    assert params == pytest.approx(told)
    assert over_grpc["metrics"]["output_tokens"] == over_http["metrics"]["output_tokens"]


def test_a_schema_holds(stub: Stub) -> None:
    request = pb.InferRequest(prompt="Numbers")
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    request.response_format.update(
        {"type": "json_schema", "json_schema": {"name": "three", "schema": schema}}
    )
    answer = stub.call("Infer", request)
    assert re.fullmatch(r"\s*\[(\s*(true|false)\s*,?){3}\]\s*", answer.text), answer.text
    assert answer.validation.valid
    lark = stub.infer(grammar=pb.Grammar(type="lark", text='start: "yes"'))
    assert lark.text == "yes"


def test_a_stream_is_its_answer_in_pieces(stub: Stub) -> None:
    request = pb.InferRequest(prompt="Count", regex="[a-z]{30}")
    events = list(stub.call("InferStream", request))
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("started", "finished", {"delta"})
    assert events[0].started.model == "tiny"
    text = "".join(event.delta.text for event in events[1:-1])
    assert text == events[-1].finished.text
    assert len(text) == 30


def test_cancelling_gives_the_request_up(stub: Stub, grpc_server: Served) -> None:
    before = metric(grpc_server, "vllm:generation_tokens_total")
    call = stub.call("InferStream", pb.InferRequest(prompt="Go on", **LONG))
    assert next(event for event in call if event.delta.text)
    call.cancel()
    deadline = time.monotonic() + 60
    while metric(grpc_server, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert metric(grpc_server, "vllm:generation_tokens_total") - before < 3000


def within(stub: Stub, method: str, request: Any, deadline_s: float) -> Any:
    """The answer of a call with a deadline: a longer one where the machine is too busy to begin the
    answer or to bring it back in time, since it is slower at writing it too."""
    for _ in range(3):
        try:
            answer = stub.call(method, request, timeout=deadline_s)
            if getattr(answer, "text", "a job"):
                return answer
        except grpc.RpcError as error:
            assert error.code() == _Code.DEADLINE_EXCEEDED
        deadline_s *= 3
    return stub.call(method, request, timeout=deadline_s)


def test_a_deadline_cuts_the_answer(stub: Stub) -> None:
    answer = within(stub, "Infer", pb.InferRequest(prompt="Go on", **LONG), 1.5)
    assert answer.finish_reason == "timeout"
    assert 0 < len(answer.text) < 10_000
    sooner = stub.infer(timeout_ms=200, **LONG)
    assert sooner.finish_reason == "timeout"
    later = pb.InferRequest(prompt="Go on", timeout_ms=60_000, **LONG)
    assert within(stub, "Infer", later, 1).finish_reason == "timeout"


@pytest.mark.full
def test_a_job_outlives_the_call_that_brought_it(stub: Stub) -> None:
    request = pb.InferRequest(prompt="Later", regex="[a-z]{900}", max_tokens=2000)
    job = within(stub, "SubmitJob", request, 0.3)
    events = list(stub.call("WatchJob", pb.JobRequest(job_id=job.job_id)))
    assert len(events[-1].finished.text) == 900


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": "  "}, _Code.INVALID_ARGUMENT, "prompt"),
        ({"temperature": 3.0}, _Code.INVALID_ARGUMENT, "temperature"),
        ({"max_tokens": 0}, _Code.INVALID_ARGUMENT, "max_tokens"),
        ({"force_experts": ["nobody"]}, _Code.NOT_FOUND, "force_experts"),
        ({"regex": "("}, _Code.INVALID_ARGUMENT, "regex"),
    ],
)
def test_refusals_name_the_field_and_have_a_receipt(
    stub: Stub, grpc_server: Served, fields: Any, status: Any, param: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.call("Infer", pb.InferRequest(**{"prompt": "hello"} | fields))
    details = dict(refused.value.trailing_metadata())
    assert (refused.value.code(), details["coterie-param"]) == (status, param)
    assert details["x-request-id"].startswith("req_")
    path = f"/v1/receipts/{details['x-coterie-receipt']}"
    receipt = grpc_server.get(path, authorization=f"Bearer {KEY}")
    assert receipt.status == 200 and receipt.json["admission"] == "refused"
    with pytest.raises(grpc.RpcError) as streamed:
        list(stub.call("InferStream", pb.InferRequest(**{"prompt": "hello"} | fields)))
    assert streamed.value.code() == status


def test_keys_are_asked_for(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError, match="not known") as refused:
        Stub(channel, "wrong").infer()
    assert refused.value.code() == _Code.UNAUTHENTICATED
    assert dict(refused.value.trailing_metadata())["coterie-code"] == "unauthenticated"


def test_a_large_message_is_refused(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.infer(body="x" * 5_000_000)
    assert refused.value.code() == _Code.RESOURCE_EXHAUSTED


def test_rates_count_over_both_doors(stub: Stub, grpc_server: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 1, "user_id": "eager"}
    for _ in range(45):
        grpc_server.post("/v1/infer", body, authorization=f"Bearer {KEY}")
    # at once: one after the other a busy machine answers fewer than five a second
    with ThreadPoolExecutor(15) as pool:
        asked = [pool.submit(stub.infer, max_tokens=1, user_id="eager") for _ in range(45)]
    with pytest.raises(grpc.RpcError, match="times a second") as refused:
        for one in asked:
            one.result()
    assert refused.value.code() == _Code.RESOURCE_EXHAUSTED
    details = dict(refused.value.trailing_metadata())
    assert details["coterie-code"] == "overloaded"
    assert 0 < int(details["retry-after-ms"]) <= 200


def test_a_job_from_end_to_end(stub: Stub, channel: grpc.Channel) -> None:
    request = pb.InferRequest(prompt="Later", regex="x{6}", user_id="ada")
    job = pb.JobRequest(job_id=stub.call("SubmitJob", request).job_id)
    events = list(stub.call("WatchJob", job))
    assert "".join(event.delta.text for event in events) == "xxxxxx"
    assert events[-1].finished.text == "xxxxxx"
    found = stub.call("GetJob", job)
    assert (found.status, found.result.text, found.user_id) == ("succeeded", "xxxxxx", "ada")
    page = stub.call("ListJobs", pb.ListJobsRequest(user_id="ada", limit=1))
    assert [row.job_id for row in page.data] == [job.job_id]
    verdict = pb.FeedbackRequest(job_id=job.job_id, verdict="good")
    assert stub.call("Feedback", verdict).verdict == "good"
    refusals = [
        ("Feedback", verdict, _Code.ALREADY_EXISTS),
        ("Feedback", pb.FeedbackRequest(job_id=job.job_id, verdict="so"), _Code.INVALID_ARGUMENT),
        ("ListJobs", pb.ListJobsRequest(limit=1000), _Code.INVALID_ARGUMENT),
    ]
    for name, wrong, status in refusals:
        with pytest.raises(grpc.RpcError) as refused:
            stub.call(name, wrong)
        assert refused.value.code() == status, name
    for name in ("GetJob", "CancelJob", "WatchJob"):
        with pytest.raises(grpc.RpcError) as hidden:
            answer = Stub(channel, OTHER).call(name, job)
            next(iter(answer))
        assert hidden.value.code() == _Code.NOT_FOUND, name


def test_a_job_is_cancelled_then_removed(stub: Stub) -> None:
    job = pb.JobRequest(job_id=stub.call("SubmitJob", pb.InferRequest(prompt="x", **LONG)).job_id)
    assert not stub.call("CancelJob", job).deleted
    with pytest.raises(grpc.RpcError, match="cancelled"):
        list(stub.call("WatchJob", job))
    assert stub.call("CancelJob", job).deleted
    with pytest.raises(grpc.RpcError) as gone:
        stub.call("GetJob", job)
    assert gone.value.code() == _Code.NOT_FOUND


def test_health_asks_for_no_key(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watched = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()
    with pytest.raises(grpc.RpcError) as unknown:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert unknown.value.code() == _Code.NOT_FOUND


def test_reflection_tells_the_service(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = stub.ServerReflectionInfo(iter(asked))
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(raw)
        for raw in described.file_descriptor_response.file_descriptor_proto
    ]
    methods = {method.name for file in files for row in file.service for method in row.method}
    assert {"Infer", "InferStream", "WatchJob"} <= methods


def test_calls_are_logged_without_what_they_say(stub: Stub, grpc_server: Served) -> None:
    stub.infer("a very private question", max_tokens=2)
    deadline = time.monotonic() + 60
    while '"route":"/coterie.v1.Inference/Infer"' not in grpc_server.log():
        assert time.monotonic() < deadline, grpc_server.log()
        time.sleep(0.02)
    assert "private" not in grpc_server.log()
    assert KEY not in grpc_server.log()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none(stub: Stub, number: float) -> None:
    """JSON could not carry it; a Struct and a double can."""
    bounded = pb.InferRequest(prompt="hello")
    bounded.response_format.update({"type": "json_schema", "schema": {"maximum": number}})
    listed = pb.InferRequest(prompt="hello")
    listed.response_format.update({"type": "json_schema", "schema": {"enum": [1, [number]]}})
    for request in (bounded, listed, pb.InferRequest(prompt="hello", temperature=number)):
        with pytest.raises(grpc.RpcError) as caught:
            stub.call("Infer", request)
        assert caught.value.code() is _Code.INVALID_ARGUMENT, caught.value.details()


def test_hostile_messages(stub: Stub, grpc_server: Served) -> None:
    """Megabytes of small values are refused by their number, and health is answered meanwhile."""
    wide = pb.InferRequest(prompt="hello")
    wide.response_format.update({"type": "json_schema", "schema": {"enum": [1] * 350_000}})
    named = pb.InferRequest(prompt="hello", force_experts=[""] * 1_500_000)
    long = pb.InferRequest(prompt="fox " * 900_000)
    with Probe(grpc_server) as probe:
        for request in (wide, named, long):
            with pytest.raises(grpc.RpcError) as caught:
                stub.call("Infer", request)
            assert caught.value.code() is _Code.INVALID_ARGUMENT, caught.value.details()
    assert probe.worst_s < MAX_PROBE_S


def raw_call(channel: grpc.Channel, path: str, raw: bytes, key: str = KEY) -> grpc.StatusCode:
    """The status of a call whose message is these bytes."""
    metadata = (("authorization", f"Bearer {key}"),)
    call = channel.stream_stream(path)(iter([raw]), metadata=metadata, timeout=60)
    with suppress(grpc.RpcError):
        list(call)
    code: grpc.StatusCode = call.code()
    return code


def field(number: int, content: bytes) -> bytes:
    """A field of a message that has a length."""
    size, left = b"", len(content)
    while left > 0x7F:
        size, left = size + bytes((left & 0x7F | 0x80,)), left >> 7
    tag = number << 3 | 2
    head = bytes((tag,)) if tag < 0x80 else bytes((tag & 0x7F | 0x80, tag >> 7))
    return head + size + bytes((left,)) + content


@pytest.mark.parametrize("depth", [12, 40, 400, 4000])
def test_a_deep_message_is_refused(channel: grpc.Channel, grpc_server: Served, depth: int) -> None:
    """Objects in objects, beyond what protobuf's own writer takes, and grammars."""
    numbers = pb.InferRequest.DESCRIPTOR.fields_by_name
    content = b""
    for _ in range(depth):
        # Struct.fields, of which a value is a Struct again
        content = field(1, field(1, b"a") + field(2, field(5, content)))
    bracketed = b"(" * depth + b"a" + b")" * depth
    grammar = pb.Grammar(type="lark", text="start: " + "(" * depth + '"a"' + ")" * depth)
    for name, value in (
        ("response_format", content),
        ("regex", bracketed),
        ("grammar", grammar.SerializeToString()),
    ):
        raw = field(numbers["prompt"].number, b"x") + field(numbers[name].number, value)
        code = raw_call(channel, f"/{SERVICE}/Infer", raw)
        shallow = depth <= 40 and name != "response_format"
        assert code is _Code.INVALID_ARGUMENT or (shallow and code is _Code.OK), (name, code)
    assert not errors(grpc_server)


METHODS = [
    *(f"/{SERVICE}/{row.name}" for row in pb.DESCRIPTOR.services_by_name["Inference"].methods),
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


def errors(served: Served) -> list[str]:
    """In the log, without a loop that a busy machine held up for a moment."""
    found = [json.loads(line) for line in served.log().splitlines() if '"level":"error"' in line]
    return [
        entry["event"]
        for entry in found
        if entry["event"] != "event_loop_blocked" or entry["wait_s"] > MAX_PROBE_S
    ]


def test_random_messages_are_invalid_arguments(channel: grpc.Channel, grpc_server: Served) -> None:
    """What is no message is the caller's fault, at every method."""
    draw, seen = random.Random(7), Counter[grpc.StatusCode]()
    for i in range(330):
        raw = b"\x0f" + draw.randbytes(draw.choice((0, 1, 7, 80, 3000)))
        seen[raw_call(channel, METHODS[i % len(METHODS)], raw)] += 1
    assert set(seen) == {_Code.INVALID_ARGUMENT}, seen
    # what may be a message is refused for what it says, or answered
    allowed = {_Code.INVALID_ARGUMENT, _Code.NOT_FOUND, _Code.OK, _Code.RESOURCE_EXHAUSTED}
    for i in range(220):
        path = METHODS[i % len(METHODS)]
        if path.endswith("Watch"):
            continue
        raw = draw.randbytes(draw.randrange(1, 40))
        if i % 2:
            text = bytes(draw.randrange(32, 127) for _ in range(draw.randrange(20)))
            raw = bytes((draw.choice((0x0A, 0x12, 0x1A, 0x22)), len(text))) + text
        seen[raw_call(channel, path, raw)] += 1
    assert set(seen) <= allowed, seen
    assert not errors(grpc_server)


def test_a_call_without_a_key_is_refused_before_its_message(channel: grpc.Channel) -> None:
    """Otherwise anybody could make the server hold thousands of half messages."""
    sent = threading.Event()

    def never() -> Iterator[bytes]:
        sent.wait(60)
        yield b""

    try:
        call = channel.stream_stream(f"/{SERVICE}/Infer")(never(), timeout=30)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    finally:
        sent.set()
    assert refused.value.code() is _Code.UNAUTHENTICATED


def test_calls_without_a_key_keep_no_probe_out(stub: Stub, grpc_server: Served) -> None:
    """Anybody may open them: watched statuses, messages that never come, answers that are never
    read. The oldest ones of their address end."""
    found = re.search(r"gRPC on (\S+):(\d+)", grpc_server.log())
    assert found
    address = (found[1], int(found[2]))
    health = "/grpc.health.v1.Health/"
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        for sock in sockets:
            # so that no reset of a call closes the connection of one that reads
            sock.sendall(http2_frames.PREFACE + http2_frames.window(0))
            calls = b""
            for i in range(900):
                stream, name = 1 + 2 * i, ("Watch", "Check")[i % 2]
                calls += http2_frames.call(stream, health + name)
                if name == "Watch":
                    calls += http2_frames.message(stream, b"")
            sock.sendall(calls)
        with grpc.insecure_channel(f"{found[1]}:{found[2]}") as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            deadline = time.monotonic() + 60
            # of so many new calls at once gRPC itself cancels some, and a busy machine is late
            while not is_serving(probe):
                assert time.monotonic() < deadline
            for _ in range(5):
                assert is_serving(probe) and stub.infer(max_tokens=1).tokens_generated == 1
    assert not errors(grpc_server)


def is_serving(probe: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = probe.Check(health_pb2.HealthCheckRequest(), timeout=5)
    except grpc.RpcError as error:
        assert error.code() in (_Code.CANCELLED, _Code.DEADLINE_EXCEEDED), error
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_answers_that_are_never_read_are_given_up(stub: Stub, grpc_server: Served) -> None:
    """A client that takes no byte, and answers the server's pings or not, holds no call for ever;
    others are served meanwhile."""
    found = re.search(r"gRPC on (\S+):(\d+)", grpc_server.log())
    assert found
    raw = pb.InferRequest(prompt="x", max_tokens=4).SerializeToString()
    before, count = grpc_server.log().count('"reason":"write_timeout"'), 12
    with socket.create_connection((found[1], int(found[2]))) as sock:
        sock.sendall(http2_frames.PREFACE + http2_frames.window(0))
        for i in range(count):
            path = f"/{SERVICE}/{('Infer', 'InferStream')[i % 2]}"
            stream = 1 + 2 * i
            sock.sendall(http2_frames.call(stream, path, KEY) + http2_frames.message(stream, raw))
        deadline = time.monotonic() + 60
        while grpc_server.log().count('"reason":"write_timeout"') < before + count:
            assert time.monotonic() < deadline, grpc_server.log()
            assert stub.infer(max_tokens=1).tokens_generated == 1
            time.sleep(0.2)
        # a job of another test may still run
        while metric(grpc_server, "coterie_gateway_open_streams"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert not errors(grpc_server)


def test_a_client_that_goes_while_it_is_written_to_is_no_error(grpc_server: Served) -> None:
    found = re.search(r"gRPC on (\S+):(\d+)", grpc_server.log())
    assert found
    raw = pb.InferRequest(prompt="x", max_tokens=400).SerializeToString()
    before = grpc_server.log().count('"status":499')
    with socket.create_connection((found[1], int(found[2]))) as sock:
        sock.sendall(http2_frames.PREFACE + http2_frames.window(0))
        path = f"/{SERVICE}/InferStream"
        for stream in (1, 3, 5):
            sock.sendall(http2_frames.call(stream, path, KEY) + http2_frames.message(stream, raw))
        # none of their events can be written
        time.sleep(1.0)
    deadline = time.monotonic() + 30
    while grpc_server.log().count('"status":499') < before + 3:
        assert time.monotonic() < deadline, grpc_server.log()
        time.sleep(0.05)
    assert not errors(grpc_server)


def test_a_call_without_a_message(channel: grpc.Channel) -> None:
    metadata = (("authorization", f"Bearer {KEY}"),)
    call = channel.stream_stream(f"/{SERVICE}/Infer")(iter(()), metadata=metadata, timeout=30)
    with pytest.raises(grpc.RpcError, match="no message"):
        list(call)
    assert call.code() is _Code.INVALID_ARGUMENT


def test_a_server_that_stops_lets_calls_end(stub: Stub, grpc_server: Served) -> None:
    call = stub.call("InferStream", pb.InferRequest(prompt="Go on", regex="[a-z]{300}"))
    assert next(call).started.model == "tiny"
    grpc_server.process.terminate()
    assert len(list(call)[-1].finished.text) == 300
