"""Tokenizer, health, metrics, version and the OpenAPI document of the real server."""

from __future__ import annotations

import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from coterie import __version__
from tests.helpers.serving.server_process import KEYS, Served, chat

ROOT = Path(__file__).resolve().parent.parent.parent


def test_tokenize_and_back(server: Served) -> None:
    text = "Numbers such as 0, 1 and Straße 你好"
    there = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
    assert there["max_model_len"] == 1024
    plain = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert [0, *plain["tokens"]] == there["tokens"]
    assert plain["token_strs"] is None
    back = server.post("/detokenize", {"model": "tiny", "tokens": plain["tokens"]}).json
    assert back == {"prompt": text, "content": text}


def test_tokenize_a_chat(server: Served) -> None:
    body = chat("hello")
    opened = server.post("/tokenize", {"messages": body["messages"]}).json["tokens"]
    closed = server.post(
        "/tokenize", {"messages": body["messages"], "add_generation_prompt": False}
    ).json["tokens"]
    assert opened[: len(closed)] == closed and len(opened) > len(closed)
    usage = server.post("/v1/chat/completions", body).json["usage"]
    assert usage["prompt_tokens"] == len(opened)


def test_models_tell_what_their_weights_take(server: Served) -> None:
    card = server.get("/v1/models").json["data"][0]
    assert (
        card["weight_bytes"]
        == server.get("/health").json["specialists"][card["id"]]["weight_bytes"]
    )


def test_health(server: Served) -> None:
    health = server.get("/health")
    assert (health.status, health.json["ready"]) == (200, True)
    assert health.json["specialists"]["tiny"]["ready"] is True
    assert server.get("/health/live").json == {"live": True}
    assert server.get("/health/ready").json == {"ready": True}
    for method in ("GET", "POST", "HEAD"):
        assert server.send(method, "/ping", None).status == 200
    assert server.send("HEAD", "/health", None).status == 200


def test_details_of_health_need_a_key(server: Served, strict_server: Served) -> None:
    """The status does not: it is what a container's probe asks for."""
    status = {"live": True, "ready": True}
    for headers in ({}, {"x_api_key": "another"}, {"authorization": "Bearer another"}):
        reply = strict_server.get("/health", **headers)
        assert (reply.status, reply.json) == (200, status)
    known = strict_server.get("/health", x_api_key=KEYS[0])
    assert known.json["specialists"]["tiny"]["ready"] is True
    # without keys a page of another origin, or of a name that points here, knows as little
    for foreign in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        reply = server.get("/health", **foreign)
        assert (reply.status, reply.json) == (200, status)


def test_version(server: Served) -> None:
    assert server.get("/version").json == {"version": __version__}


def test_metrics_parse(server: Served) -> None:
    server.post("/v1/chat/completions", chat())
    reply = server.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {f.name: f for f in text_string_to_metric_families(reply.body.decode())}
    for name in ("vllm:num_requests_running", "vllm:e2e_request_latency_seconds"):
        assert families[name].samples
    made = families["vllm:generation_tokens"].samples[0]
    assert made.labels == {"model_name": "tiny"} and made.value >= 8


def test_torch_never_enters_the_gateway(server: Served) -> None:
    server.post("/v1/chat/completions", chat())
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_no_cors_and_no_pages(server: Served) -> None:
    reply = server.get("/v1/models", origin="https://example.com")
    assert not any(name.startswith("access-control") for name in reply.headers)
    for path in ("/docs", "/redoc"):
        assert server.get(path).status == 404


def test_openapi_is_what_the_docs_hold(server: Served) -> None:
    served = server.get("/openapi.json").json
    written = json.loads((ROOT / "docs" / "api" / "openapi.json").read_text())
    assert served == written
    assert {"/v1/chat/completions", "/v1/messages", "/tokenize"} <= served["paths"].keys()
    schema = served["components"]["schemas"]["ChatBody"]
    assert {"model", "messages", "top_k", "chat_template_kwargs"} <= schema["properties"].keys()
