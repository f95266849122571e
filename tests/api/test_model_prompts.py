"""What a model reads beside the caller's words: nothing where it has no chat template, the system
prompt of its card where the template has none."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from websockets.sync.client import connect

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from tests.helpers.models.tiny import CHAT_TEMPLATE, named_checkpoint
from tests.helpers.serving.server_process import Served, frames

SETTINGS = """
[engine]
kv_bytes = "16MB"
[[specialists]]
name = "plain"
model = "{folder}/plain"
[[specialists]]
name = "known"
model = "{folder}/known"
"""
TURNS = [{"role": "user", "content": "The quick brown fox"}]
GREEDY = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("prompts")
    named_checkpoint(folder / "plain", "", None)
    named_checkpoint(folder / "known", "tiiuae/Falcon3-1B-Instruct", CHAT_TEMPLATE)
    settings = folder / "coterie.toml"
    settings.write_text(SETTINGS.format(folder=folder))
    served = Served("--config", str(settings), "--grpc-port", "0")
    yield served
    assert served.stop() == 0, served.log()


def inferred(served: Served, **fields: Any) -> Any:
    body = {"model": "plain", "prompt": "The quick brown fox", **GREEDY, **fields}
    reply = served.post("/v1/infer", body)
    assert reply.status == 200, reply.json
    return reply.json


def test_infer_reads_plain_text_where_there_is_no_template(two_models: Served) -> None:
    body = {"model": "plain", "prompt": "The quick brown fox", **GREEDY}
    completed = two_models.post("/v1/completions", body).json
    found = inferred(two_models)
    assert found["text"] == completed["choices"][0]["text"]
    assert found["metrics"]["input_tokens"] == completed["usage"]["prompt_tokens"]
    # the default specialist is plain too
    assert inferred(two_models, model="auto")["text"] == found["text"]
    with_document = inferred(two_models, prompt="The quick", body="brown fox")
    body |= {"prompt": "The quick\n\nbrown fox"}
    assert (
        with_document["text"] == two_models.post("/v1/completions", body).json["choices"][0]["text"]
    )
    streamed = two_models.post(
        "/v1/infer", {"prompt": "The quick brown fox", **GREEDY, "stream": True}
    )
    assert frames(streamed.body)[-1][1]["text"] == found["text"]


def test_sockets_and_grpc_read_plain_text_too(two_models: Served) -> None:
    wanted = inferred(two_models)["text"]
    with connect(
        two_models.url.replace("http", "ws", 1) + "/v1/infer/ws", open_timeout=30
    ) as socket:
        socket.send(json.dumps({"model": "plain", "prompt": "The quick brown fox", **GREEDY}))
        while (event := json.loads(socket.recv(timeout=30)))["event"] not in ("finished", "error"):
            pass
    assert event["text"] == wanted
    found = re.search(r"gRPC on (\S+)", two_models.log())
    assert found
    with grpc.insecure_channel(found[1]) as channel:
        ask = channel.unary_unary(
            "/coterie.v1.Inference/Infer",
            request_serializer=pb.InferRequest.SerializeToString,
            response_deserializer=pb.InferenceResult.FromString,
        )
        asked = pb.InferRequest(
            model="plain", prompt="The quick brown fox", temperature=0, max_tokens=6
        )
        answer = ask(asked)
    assert answer.text == wanted


def test_a_job_reads_plain_text_too(two_models: Served) -> None:
    body = {"model": "plain", "prompt": "The quick brown fox", **GREEDY}
    accepted = two_models.post("/v1/infer", body, prefer="respond-async")
    assert accepted.status == 202, accepted.json
    path = f"/v1/jobs/{accepted.json['job_id']}"
    while (job := two_models.get(path).json)["result"] is None:
        assert job["status"] in ("queued", "processing"), job
        time.sleep(0.05)
    assert job["result"]["text"] == inferred(two_models)["text"]


def test_a_chat_still_needs_a_template(two_models: Served) -> None:
    reply = two_models.post("/v1/chat/completions", {"model": "plain", "messages": TURNS})
    assert reply.status == 400 and "no chat template" in reply.json["error"]["message"]


def test_the_cards_system_prompt_is_counted_everywhere(two_models: Served) -> None:
    card = two_models.get("/v1/models/known").json
    system = {"role": "system", "content": card["system_prompt"]}
    assert system["content"].startswith("You are")

    def asked(*turns: dict[str, str]) -> Any:
        body = {"model": "known", "messages": turns, **GREEDY}
        reply = two_models.post("/v1/chat/completions", body)
        receipt = two_models.get(f"/v1/receipts/{reply.headers['x-coterie-receipt']}").json
        return reply.json, receipt["plan"]["adds_system"]

    (added, tells), (written, tells_not) = asked(*TURNS), asked(system, *TURNS)
    assert added["choices"][0]["message"] == written["choices"][0]["message"]
    count = added["usage"]["prompt_tokens"]
    assert written["usage"]["prompt_tokens"] == count and (tells, tells_not) == (True, False)
    body: dict[str, Any] = {"model": "known", "messages": TURNS}
    assert two_models.post("/tokenize", body).json["count"] == count
    counted = two_models.post("/v1/messages/count_tokens", body)
    assert counted.json["input_tokens"] == count
    counted = two_models.post("/v1/responses/input_tokens", {"model": "known", "input": TURNS})
    assert counted.json["input_tokens"] == count
    assert system["content"] in two_models.post("/apply-template", body).json["prompt"]
    found = inferred(two_models, model="known")
    assert found["metrics"]["input_tokens"] == count
    # raw text is read as it is
    text = {"model": "known", "prompt": TURNS[0]["content"], **GREEDY}
    completed = two_models.post("/v1/completions", text).json
    assert completed["usage"]["prompt_tokens"] < count - len(system["content"].split())
