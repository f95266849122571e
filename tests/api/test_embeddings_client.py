"""Embeddings, rerank and score through the real server process: the official openai client,
limits, tenants, hostile bodies, and an encoder that is killed."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import psutil
import pytest

from tests.helpers.models.tiny import CORPUS, tiny_checkpoint
from tests.helpers.models.tiny_encoder import TransformersEncoder, tiny_encoder
from tests.helpers.serving.server_process import Served, chat

TOLERANCE = 1e-4
PATH = "/v1/embeddings"
FULL, FEW, ENCODERS_ONLY = "key-of-full", "key-of-few", "key-of-encoders"
UNICODE = [
    "Straße über Brücken",
    "你好，世界",
    "e\u0301 \u202e \U0001f600",
    "\u0000\ufffd",
    "  \n\t ",
]


@dataclass(frozen=True, slots=True)
class Encoders:
    served: Served
    oracle: TransformersEncoder
    cross: TransformersEncoder

    def post(self, path: str, body: Any, key: str = FULL, **headers: str) -> Any:
        return self.served.post(path, body, authorization=f"Bearer {key}", **headers)

    def metric(self, name: str) -> float:
        return self.served.metric(name, FULL)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoders]:
    folder = tmp_path_factory.mktemp("encoders")
    bert = tiny_encoder(folder / "tiny-bert")
    cross = tiny_encoder(folder / "cross", cross=True)
    keys, config = folder / "keys.txt", folder / "coterie.toml"
    keys.write_text(f"{FULL}\n{FEW} tenant=few\n{ENCODERS_ONLY} tenant=encoders-only\n")
    keys.chmod(0o600)
    config.write_text(
        f"""
[server]
api_key_file = "{keys}"
[engine]
restart_backoff_s = 0.05
[[specialists]]
kind = "encoder"
model = "{bert}"
[specialists.encoder]
max_inputs = 100
max_request_tokens = 3000
max_waiting_tokens = 12000
batch_tokens = 512
[[specialists]]
kind = "encoder"
name = "ranker"
model = "{cross}"
[[specialists]]
kind = "encoder"
model = "static"
[[specialists]]
name = "tiny"
model = "{tiny_checkpoint("llama")}"
[[tenants]]
name = "few"
specialists = ["tiny", "static"]
requests_per_minute = 6
tokens_per_minute = 20
[[tenants]]
name = "encoders-only"
specialists = ["tiny-bert"]
[aliases]
"text-embedding-3-small" = "tiny-bert"
"voyage-*" = "auto"
"""
    )
    served = Served("--config", str(config))
    yield Encoders(served, TransformersEncoder(bert), TransformersEncoder(cross, cross=True))
    served.stop()


@pytest.fixture(scope="module")
def client(encoders: Encoders) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{encoders.served.url}/v1", api_key=FULL, max_retries=0) as made:
        yield made


def fresh_texts(count: int) -> list[str]:
    """New words each time, up to the longest that fits."""
    words = " ".join(CORPUS).split()
    return [" ".join(random.choices(words, k=random.randint(1, 18))) for _ in range(count)]


def fitting(encoders: Encoders, texts: list[str]) -> list[str]:
    return [text for text in texts if len(encoders.oracle.ids([text])[0]) <= 64]


def test_ollamas_package(encoders: Encoders) -> None:
    headers = {"authorization": f"Bearer {FULL}"}
    with ollama.Client(host=encoders.served.url, headers=headers) as theirs:
        _ollama_embeds(encoders, theirs)
        _ollama_lists(theirs)
    refused: list[dict[str, Any]] = [
        {"input": "the " * 500, "truncate": False}, {"input": [1]}, {"input": {}},
        {"input": "a", "model": "tiny:latest"}, {"input": "a", "dimensions": 49},
    ]  # fmt: skip
    for fields in refused:
        reply = encoders.served.post("/api/embed", {"model": "tiny-bert", **fields}, **headers)
        assert reply.status == 400 and isinstance(reply.json["error"], str), reply.body
    # without a text a model is only loaded; an empty text in a list is one
    nothing: list[dict[str, Any]] = [{}, {"input": ""}, {"input": []}, {"keep_alive": 0}]
    for empty in nothing:
        reply = encoders.served.post("/api/embed", {"model": "tiny-bert", **empty}, **headers)
        assert reply.status == 200, reply.body
        assert (reply.json["model"], reply.json["embeddings"]) == ("tiny-bert", [])
    reply = encoders.served.post("/api/embed", {"model": "tiny-bert", "input": [""]}, **headers)
    assert len(reply.json["embeddings"]) == 1
    wanted = {"model": "static", "keep_alive": "5m"}
    assert encoders.served.post("/api/embeddings", wanted, **headers).json == {"embedding": []}
    running = encoders.served.get("/api/ps", **headers).json["models"]
    until = {item["name"]: item["expires_at"] for item in running}
    assert until["static:latest"] < "2300" < until["tiny-bert:latest"]
    nobody = encoders.served.post("/api/embed", {"model": "nobody"}, **headers)
    assert nobody.status == 404
    many = {"model": "static", "input": fresh_texts(200)}
    reply = encoders.served.post("/api/embed", many, **headers)
    assert np.asarray(reply.json["embeddings"]).shape == (200, 64)
    assert reply.json["model"] == "static" and reply.json["total_duration"] > 0


def _ollama_lists(theirs: ollama.Client) -> None:
    listed = {str(item.model).removesuffix(":latest"): item for item in theirs.list().models}
    names = ["tiny", "tiny-bert", "ranker", "static", "text-embedding-3-small"]
    assert list(listed) == names
    assert [str(item.model) for item in theirs.ps().models] == [f"{it}:latest" for it in names[:4]]
    shown = theirs.show("tiny-bert:latest")
    assert shown.capabilities == ["embedding"] and shown.details is not None
    assert shown.details.family == "bert" and (shown.modelinfo or {})["bert.embedding_length"] == 48
    assert theirs.show("static").capabilities == ["embedding"]
    assert theirs.show("text-embedding-3-small").capabilities == ["embedding"]
    assert theirs.show("ranker").capabilities == []


def _ollama_embeds(encoders: Encoders, theirs: ollama.Client) -> None:
    texts = fitting(encoders, fresh_texts(6))
    answer = theirs.embed(model="tiny-bert:latest", input=texts)
    found = np.asarray(answer.embeddings)
    assert np.abs(found - encoders.oracle.embed(texts)).max() < TOLERANCE
    assert answer.prompt_eval_count == sum(map(len, encoders.oracle.ids(texts)))
    assert len(theirs.embed(model="tiny-bert", input="one", dimensions=8).embeddings[0]) == 8
    (old,) = encoders.oracle.embed([texts[0]])
    one = theirs.embeddings(model="tiny-bert", prompt=texts[0]).embedding
    assert np.abs(np.asarray(one) - old).max() < TOLERANCE
    # cut, as Ollama does, unless the caller forbids it
    theirs.embed(model="tiny-bert", input="the " * 500)


def test_fresh_texts_are_exact(encoders: Encoders, client: openai.OpenAI) -> None:
    texts = fitting(encoders, ["", *UNICODE, "the " * 62, *fresh_texts(60)])
    answer = client.embeddings.create(model="tiny-bert", input=texts, encoding_format="float")
    found = np.asarray([item.embedding for item in answer.data])
    assert [item.index for item in answer.data] == list(range(len(texts)))
    assert np.abs(found - encoders.oracle.embed(texts)).max() < TOLERANCE
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5
    total = sum(map(len, encoders.oracle.ids(texts)))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    assert answer.model == "tiny-bert" and answer.object == "list"


def test_base64_is_the_same_numbers(encoders: Encoders, client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="tiny-bert", input="a fox", encoding_format="float")
    raw = encoders.post(
        PATH, {"model": "tiny-bert", "input": "a fox", "encoding_format": "base64"}
    ).json
    decoded = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert decoded.tolist() == plain.data[0].embedding
    # the client asks for base64 by itself and gives numbers
    assert client.embeddings.create(model="tiny-bert", input="a fox").data == plain.data


def test_dimensions_cut_and_normalise(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="tiny-bert", input="a fox").data[0].embedding
    cut = client.embeddings.create(model="tiny-bert", input="a fox", dimensions=16).data[0]
    expected = np.asarray(whole[:16]) / np.linalg.norm(whole[:16])
    assert np.allclose(cut.embedding, expected, atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="have 48") as refused:
        client.embeddings.create(model="tiny-bert", input="a fox", dimensions=49)
    assert refused.value.param == "dimensions"


def test_token_ids_are_read_as_they_are(encoders: Encoders, client: openai.OpenAI) -> None:
    lists = encoders.oracle.ids(["the quick fox", "a model answers"])
    for given in (lists, lists[0]):
        answer = client.embeddings.create(model="tiny-bert", input=given)
        expected = encoders.oracle.mean(lists if given is lists else lists[:1])
        found = np.asarray([item.embedding for item in answer.data])
        assert np.abs(found - expected).max() < TOLERANCE
    with pytest.raises(openai.BadRequestError, match=r"has 320 tokens.*check_embedding_ctx_length"):
        client.embeddings.create(model="tiny-bert", input=[[3, 9000]])


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (["the fox", None], "input.1"),
        (["the fox", "a model", 3], "input.2"),
        ([[3, 4], "the fox"], "input.1"),
        ([[3], [4, None]], "input.1.1"),
        ([3, "the fox"], "input.1"),
    ],
)
def test_the_wrong_item_of_a_list_is_named(
    client: openai.OpenAI, given: list[Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="tiny-bert", input=given)
    assert refused.value.param == param


def test_what_is_too_long_is_refused_and_cut_only_when_asked(
    encoders: Encoders, client: openai.OpenAI
) -> None:
    long = "the fox " * 40
    for given in ([long], long, [[3] * 65]):
        with pytest.raises(openai.BadRequestError, match="limit of 64") as refused:
            client.embeddings.create(model="tiny-bert", input=given)
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == ("input" if given is long else "input.0")
    for field in ({"truncate_prompt_tokens": -1}, {"truncate": True}, {"truncate": "END"}):
        answer = client.embeddings.create(model="tiny-bert", input=long, extra_body=field)
        assert answer.usage.prompt_tokens == 64
        ids = encoders.oracle.ids([long])[0]
        expected = encoders.oracle.mean([[*ids[:63], ids[-1]]])
        assert np.abs(np.asarray(answer.data[0].embedding) - expected[0]).max() < TOLERANCE
    with pytest.raises(openai.BadRequestError, match="101 inputs are more than the limit of 100"):
        client.embeddings.create(model="tiny-bert", input=["a"] * 101)
    with pytest.raises(openai.BadRequestError, match="more than 3000 tokens together"):
        client.embeddings.create(model="tiny-bert", input=["the " * 60] * 60)


def test_the_shipped_table(client: openai.OpenAI) -> None:
    texts = ["a dog barks", "the puppy was barking", "stock prices fell", ""]
    answer = client.embeddings.create(model="static", input=texts)
    vectors = np.asarray([item.embedding for item in answer.data])
    assert vectors.shape == (4, 64) and not vectors[3].any()
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    # the end of a long text counts too
    long = client.embeddings.create(model="static", input=["cat " * 3000, "cat " * 3000 + "fish"])
    assert long.data[0].embedding != long.data[1].embedding
    with pytest.raises(openai.BadRequestError, match="limit of 8192"):
        client.embeddings.create(model="static", input="cat " * 9000)


def test_rerank_in_the_shapes_of_its_clients(encoders: Encoders) -> None:
    documents = ["jumps over the dog", {"text": "what is the capital", "id": 7}, "shells"]
    texts = ["jumps over the dog", "what is the capital", "shells"]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        body: dict[str, Any] = {
            "model": "tiny-bert",
            "query": "the quick fox",
            "documents": documents,
        }
        answer = encoders.post(path, body).json
        vectors = encoders.oracle.embed(["the quick fox", *texts])
        expected = vectors[1:] @ vectors[0]
        scores = {it["index"]: it["relevance_score"] for it in answer["results"]}
        assert np.abs([scores[i] - expected[i] for i in range(3)]).max() < TOLERANCE
        order = [it["relevance_score"] for it in answer["results"]]
        assert order == sorted(order, reverse=True)
        shown = {it["index"]: it["document"] for it in answer["results"]}
        assert shown == {
            0: {"text": texts[0]},
            1: {"text": texts[1], "id": 7},
            2: {"text": "shells"},
        }
        assert answer["usage"]["total_tokens"] > 0 and answer["id"].startswith("rerank-")
    body |= {"top_n": 1, "return_documents": False}
    [best] = encoders.post("/v1/rerank", body).json["results"]
    assert best["index"] == int(np.argmax(expected)) and "document" not in best


def test_a_cross_encoder_ranks_by_default_and_embeds_nothing(
    encoders: Encoders, client: openai.OpenAI
) -> None:
    texts = ["jumps over", "what is the capital of France", ""]
    answer = encoders.post("/v1/rerank", {"query": "the fox", "documents": texts}).json
    assert answer["model"] == "ranker"
    for item in answer["results"]:
        logit = encoders.cross.logit("the fox", texts[item["index"]])
        assert abs(item["relevance_score"] - 1 / (1 + np.exp(-logit))) < TOLERANCE
    with pytest.raises(openai.BadRequestError, match="scores pairs of texts"):
        client.embeddings.create(model="ranker", input="a")
    too_long = {"query": "the fox", "documents": ["a", "the " * 140]}
    refused = encoders.post("/v1/rerank", too_long)
    assert (refused.status, refused.json["error"]["param"]) == (400, "documents.1")
    assert encoders.post("/v1/rerank", too_long | {"truncate": True}).status == 200


def test_scores_in_vllm_s_shapes(encoders: Encoders) -> None:
    def scores(**body: Any) -> list[float]:
        answer = encoders.post("/v1/score", {"model": "tiny-bert", **body})
        assert answer.status == 200, answer.body
        assert [item["index"] for item in answer.json["data"]] == list(
            range(len(answer.json["data"]))
        )
        return [item["score"] for item in answer.json["data"]]

    one, two = encoders.oracle.embed(["the fox", "a model"])
    assert abs(scores(text_1="the fox", text_2="a model")[0] - one @ two) < TOLERANCE
    many = scores(queries="the fox", documents=["the fox", "a model"])
    assert abs(many[0] - 1) < TOLERANCE and abs(many[1] - one @ two) < TOLERANCE
    both = scores(text_1=["the fox", "a model"], text_2=["a model", "a model"])
    assert abs(both[0] - one @ two) < TOLERANCE and abs(both[1] - 1) < TOLERANCE
    for body in (
        {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
        {"text_1": "a"},
        {"text_1": "a", "queries": "a", "text_2": "b"},
    ):
        assert encoders.post("/v1/score", {"model": "tiny-bert", **body}).status == 400


def test_kinds_of_models_are_told_apart(encoders: Encoders, client: openai.OpenAI) -> None:
    alias = "text-embedding-3-small"
    listed = [item.id for item in client.models.list()]
    assert listed == ["tiny", "tiny-bert", "ranker", "static", alias]
    assert client.models.retrieve(alias).model_dump()["root"] == "tiny-bert"
    for name in (alias, "voyage-3"):
        assert client.embeddings.create(model=name, input="a").model == "tiny-bert"
    assert client.models.retrieve("tiny-bert").model_dump()["max_model_len"] == 64
    kinds = [item.model_dump()["kind"] for item in client.models.list()]
    assert kinds == ["text", "encoder", "encoder", "encoder", "encoder"]
    with pytest.raises(openai.BadRequestError, match="is no encoder; there is: `tiny-bert`"):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist") as unknown:
        client.embeddings.create(model="nobody", input="a")
    assert unknown.value.code == "model_not_found"
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="it answers /v1/embeddings"):
        client.chat.completions.create(model="tiny-bert", messages=messages)
    with pytest.raises(openai.BadRequestError, match="it answers /v1/embeddings"):
        client.responses.create(model="static", input="hi")
    with pytest.raises(openai.BadRequestError, match="it answers /v1/embeddings"):
        client.chat.completions.create(model=alias, messages=messages)
    for path, body in (
        ("/v1/messages", {"model": "static", "max_tokens": 4, "messages": messages}),
        ("/tokenize", {"model": "static", "prompt": "hi"}),
        ("/apply-template", {"model": "static", "messages": messages}),
        ("/v1/completions", {"model": "static", "prompt": "hi"}),
    ):
        reply = encoders.post(path, body, anthropic_version="2023-06-01")
        assert reply.status == 400, (path, reply.body)
    assert encoders.post("/v1/chat/completions", chat()).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{", b'{"model":"tiny-bert"}', b'{"input":"a"}',
        b'{"model":"tiny-bert","input":[]}', b'{"model":"tiny-bert","input":[[]]}',
        b'{"model":"tiny-bert","input":["a",1]}', b'{"model":"tiny-bert","input":[1,"a"]}',
        b'{"model":"tiny-bert","input":[-1]}', b'{"model":"tiny-bert","input":[true]}',
        b'{"model":"tiny-bert","input":[[1.5]]}', b'{"model":"tiny-bert","input":{"a":1}}',
        b'{"model":"tiny-bert","input":null}', b'{"model":7,"input":"a"}',
        b'{"model":"tiny-bert","input":"\\ud800"}', b'{"model":"tiny-bert","input":"\xff"}',
        b'{"model":"tiny-bert","input":"a","dimensions":0}',
        b'{"model":"tiny-bert","input":"a","dimensions":"8"}',
        b'{"model":"tiny-bert","input":"a","encoding_format":"int8"}',
        b'{"model":"tiny-bert","input":"a","truncate_prompt_tokens":0}',
        b'{"model":"tiny-bert","input":"a","truncate_prompt_tokens":-2}',
        b'{"model":"tiny-bert","input":"a","truncate_prompt_tokens":1}',
        b'{"model":"tiny-bert","input":"","add_special_tokens":false}',
        b'{"model":"tiny-bert","input":"a","task":"retrieval.query"}',
        b'{"model":"tiny-bert","input":"a","normalize":false}',
        b'{"model":"tiny-bert","input":"a","messages":[{"role":"user","content":"a"}]}',
    ],
)  # fmt: skip
def test_wrong_bodies_change_nothing(body: bytes, encoders: Encoders) -> None:
    reply = encoders.post(PATH, body)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error["type"] == "invalid_request_error" and error["message"]


def test_large_bodies_are_bounded(encoders: Encoders) -> None:
    for body, status in (
        (b'{"model":"tiny-bert","input":["' + b'a","' * 70_000 + b'a"]}', 413),
        (b'{"model":"tiny-bert","input":[' + b"[" * 40_000 + b"]" * 40_000 + b"]}", 413),
        (b'{"model":"tiny-bert","input":"' + b"a" * 5_000_000 + b'"}', 413),
        (b'{"model":"tiny-bert","input":"' + b"a " * 1_900_000 + b'"}', 400),
    ):
        assert encoders.post(PATH, body).status == status
    assert encoders.post("/v1/rerank", {"query": "a", "documents": []}).status == 400
    assert encoders.post("/v1/rerank", {"query": "a", "documents": [{"id": 1}]}).status == 400


def receipt_of(encoders: Encoders, reply: Any, key: str = FULL) -> dict[str, Any]:
    path = f"/v1/receipts/{reply.headers['x-coterie-receipt']}"
    found = encoders.served.get(path, authorization=f"Bearer {key}")
    assert found.status == 200, found.body
    receipt: dict[str, Any] = found.json
    return receipt


def test_every_answer_and_refusal_has_a_receipt(encoders: Encoders) -> None:
    secret, long = "quick secret fox", "secret " * 100
    answered: list[tuple[str, Any, str, str]] = [
        (PATH, {"model": "tiny-bert", "input": [secret, "a"]}, "tiny-bert", "embd-"),
        (PATH, {"model": "auto", "input": secret}, "tiny-bert", "embd-"),
        ("/v1/rerank", {"query": "a", "documents": [secret]}, "ranker", "rerank-"),
        ("/v1/score", {"model": "static", "text_1": "a", "text_2": secret}, "static", "score-"),
        ("/api/embed", {"model": "static:latest", "input": secret}, "static", "embd-"),
    ]
    for path, body, specialist, prefix in answered:
        reply = encoders.post(path, body, x_coterie_debug="true")
        receipt = receipt_of(encoders, reply)
        plan, timings = receipt["plan"], receipt["timings"]
        assert (plan["specialist"], receipt["outcome"]) == (specialist, "stop")
        assert receipt["request_id"].startswith(prefix) and receipt["prompt_tokens"] > 0
        assert receipt["request_id"] == reply.json.get("id", receipt["request_id"])
        assert 0 < timings["queue_ms"] + timings["prefill_ms"] <= timings["total_ms"] + 0.01
        assert receipt["slowest"].endswith(" ms") and plan["config_digest"]
        assert bool(plan["replica"]) == (specialist != "static")
        is_named = body.get("model", "auto") != "auto"
        assert plan["reasons"] == [
            "named by the caller" if is_named else "the first encoder that fits"
        ]
        assert reply.headers["x-coterie-admission"] == "admitted"
        assert reply.headers["x-coterie-model"] == plan["model"] and "secret" not in str(receipt)
        other = {"authorization": f"Bearer {FEW}"}
        assert encoders.served.get(f"/v1/receipts/{receipt['request_id']}", **other).status == 404
    refused: list[tuple[str, Any, str, str]] = [
        (PATH, {"model": "tiny-bert", "input": long}, "context_length_exceeded", "tiny-bert"),
        (PATH, {"model": "tiny-bert", "input": ["a"] * 101}, "invalid_request", "tiny-bert"),
        (PATH, {"model": "nobody", "input": secret}, "not_found", ""),
        (PATH, {"model": "tiny-bert", "input": {"secret": 1}}, "invalid_request", ""),
        ("/api/embed", {"model": ":latest", "input": secret}, "not_found", ""),
        ("/rerank", {"query": "a", "documents": [long]}, "context_length_exceeded", "ranker"),
    ]
    for path, body, code, specialist in refused:
        receipt = receipt_of(encoders, encoders.post(path, body, x_request_id="mine"))
        assert (receipt["admission"], receipt["outcome"]) == ("refused", code), receipt
        assert receipt["plan"]["specialist"] == specialist and "secret" not in str(receipt)
        assert receipt["plan"]["reasons"][-1].startswith(code + ": ")
    many = {"model": "tiny-bert", "query": "a", "documents": ["a"] * 101}
    assert encoders.post("/v1/rerank", many).json["error"]["param"] == "documents"


def test_keys_tenants_and_quotas(encoders: Encoders) -> None:
    body = {"model": "static", "input": "the fox"}
    assert encoders.served.post(PATH, body).status == 401
    first = encoders.post(PATH, body, FEW)
    assert first.status == 200 and first.headers["x-ratelimit-remaining-tokens"] == "18"
    assert first.headers["x-coterie-specialist"] == "static"
    assert first.headers["x-request-id"].startswith("req_")
    named = encoders.post(PATH, {**body, "model": "tiny-bert"}, FEW)
    assert (named.status, named.json["error"]["code"]) == (403, "permission_denied")
    # a refused request costs nothing
    assert encoders.post(PATH, {**body, "input": 3}, FEW).status == 400
    over = encoders.post(PATH, {**body, "input": "fox " * 19}, FEW)
    assert over.status == 429 and over.json["error"]["param"] == "tokens_per_minute"
    assert float(over.headers["retry-after-ms"]) > 0
    alone = encoders.post("/v1/chat/completions", chat(), ENCODERS_ONLY)
    assert alone.status == 403
    assert (
        encoders.post(PATH, {**body, "model": "auto"}, ENCODERS_ONLY).json["model"] == "tiny-bert"
    )
    listed = encoders.served.get("/v1/models", authorization=f"Bearer {ENCODERS_ONLY}").json
    assert [item["id"] for item in listed["data"]] == ["tiny-bert", "text-embedding-3-small"]
    few = encoders.served.get("/v1/models", authorization=f"Bearer {FEW}").json
    assert "text-embedding-3-small" not in [item["id"] for item in few["data"]]
    alias = encoders.post(PATH, {**body, "model": "text-embedding-3-small"}, FEW)
    assert alias.status == 403
    late = encoders.post(PATH, {**body, "model": "tiny-bert"}, x_deadline_ms="0.5")
    assert late.status == 400  # at least 1 ms


def test_eight_callers_get_their_own_vectors(encoders: Encoders) -> None:
    async def caller(client: openai.AsyncOpenAI) -> float:
        worst = 0.0
        for _ in range(6):
            texts = fitting(encoders, fresh_texts(random.randint(1, 12)))
            answer = await client.embeddings.create(model="tiny-bert", input=texts)
            found = np.asarray([item.embedding for item in answer.data])
            worst = max(worst, float(np.abs(found - encoders.oracle.embed(texts)).max()))
        return worst

    async def test() -> list[float]:
        url = f"{encoders.served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=FULL, max_retries=0) as client:
            return await asyncio.gather(*(caller(client) for _ in range(8)))

    assert max(asyncio.run(test())) < TOLERANCE
    assert encoders.metric("coterie_encoder_inputs_total") > 48


def encoder_process(encoders: Encoders) -> psutil.Process:
    """The process of the encoder `tiny-bert`, by the log of the last one that was ready."""
    reply = encoders.served.get("/health", authorization=f"Bearer {FULL}")
    health = reply.json["specialists"]
    assert list(health["tiny-bert"]["replicas"]) == ["n0r0"]
    log = encoders.served.log()
    pids = [
        int(line.partition('"pid":')[2].partition(",")[0].rstrip("}"))
        for line in log.splitlines()
        if '"n0r0"' in line and '"pid":' in line
    ]
    return psutil.Process(pids[-1])


def test_a_killed_encoder_restarts_and_answers(encoders: Encoders) -> None:
    served, texts = encoders.served, fitting(encoders, fresh_texts(20))
    body = {"model": "tiny-bert", "input": texts}
    before = encoders.metric("coterie_worker_restarts_total")
    process = encoder_process(encoders)
    process.suspend()
    replies: list[Any] = []
    callers = [
        threading.Thread(target=lambda: replies.append(encoders.post(PATH, body))) for _ in range(3)
    ]
    for one in callers:
        one.start()
    deadline = time.monotonic() + 20
    while encoders.metric("coterie_encoder_waiting_tokens") <= 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    served.expected_deaths += 1
    process.kill()
    for one in callers:
        one.join(60)
    expected = encoders.oracle.embed(texts)
    assert [reply.status for reply in replies] == [200] * 3
    for reply in replies:
        found = np.asarray([item["embedding"] for item in reply.json["data"]])
        assert np.abs(found - expected).max() < TOLERANCE
    assert encoders.metric("coterie_worker_restarts_total") == before + 1
    continued = 'coterie_recoveries_total{where="n0r0",kind="request_continued"}'
    assert encoders.metric(continued) >= 1
    assert encoder_process(encoders).pid != process.pid


def assert_in_flight(encoders: Encoders) -> None:
    """The dashboard shows what is computed, to each tenant its own."""
    rows = in_flight(encoders, FULL)
    assert [row["stage"] for row in rows] == ["encoding"] * 3
    assert all(row["specialist"] == "tiny-bert" and row["replica"] == "n0r0" for row in rows)
    assert all((row["inputs"], row["prompt_tokens"]) == (50, 3000) for row in rows)
    [row] = in_flight(encoders, ENCODERS_ONLY)
    assert (row["intent"], row["inputs"]) == ("embeddings", 1)
    assert row["why"] == "9,000 tokens of others wait or run", row


def in_flight(encoders: Encoders, key: str) -> list[dict[str, Any]]:
    with (
        httpx.Client(base_url=encoders.served.url, timeout=20) as client,
        client.stream(
            "GET", "/v1/dashboard/events", headers={"authorization": f"Bearer {key}"}
        ) as reply,
    ):
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data:") and '"requests"' in line:
                found: list[dict[str, Any]] = json.loads(line[5:])["requests"]["data"]
                return found
    raise AssertionError("no snapshot came")


def test_one_tenant_leaves_room_for_another(encoders: Encoders) -> None:
    process, replies = encoder_process(encoders), dict[str, list[Any]]()
    many = {"model": "tiny-bert", "input": [[7] * 60] * 50}

    def ask(key: str, body: Any) -> threading.Thread:
        kept = replies.setdefault(key, [])
        thread = threading.Thread(target=lambda: kept.append(encoders.post(PATH, body, key)))
        thread.start()
        return thread

    process.suspend()
    try:
        # 3,000 tokens each, of 12,000: the fourth is too many for one tenant
        callers = [ask(FULL, many) for _ in range(4)]
        deadline = time.monotonic() + 20
        while not replies[FULL] or encoders.metric("coterie_encoder_waiting_tokens") < 9000:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        [refused] = replies[FULL]
        assert refused.status == 429 and "9000 tokens of yours wait" in refused.body.decode()
        assert int(refused.headers["retry-after"]) > 0
        callers.append(ask(ENCODERS_ONLY, {"model": "tiny-bert", "input": "a fox"}))
        while encoders.metric("coterie_encoder_waiting_tokens") <= 9000:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert_in_flight(encoders)
    finally:
        process.resume()
    for one in callers:
        one.join(60)
    assert [reply.status for reply in replies[ENCODERS_ONLY]] == [200]
    assert sorted(reply.status for reply in replies[FULL]) == [200, 200, 200, 429]


def test_a_deadline_and_a_lost_client_leave_nothing_behind(encoders: Encoders) -> None:
    served, process = encoders.served, encoder_process(encoders)
    process.suspend()
    try:
        late = encoders.post(PATH, {"model": "tiny-bert", "input": "a fox"}, x_deadline_ms="300")
        assert (late.status, late.json["error"]["code"]) == (504, "deadline_exceeded")
        assert receipt_of(encoders, late)["outcome"] == "deadline_exceeded"
        with (
            openai.OpenAI(
                base_url=f"{served.url}/v1", api_key=FULL, max_retries=0, timeout=0.5
            ) as gone,
            pytest.raises(openai.APITimeoutError),
        ):
            gone.embeddings.create(model="tiny-bert", input="a fox")
        deadline = time.monotonic() + 10
        while encoders.metric("coterie_encoder_waiting_tokens"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.resume()
    assert encoders.post(PATH, {"model": "tiny-bert", "input": "a fox"}).status == 200


def test_a_server_without_encoders_says_how_to_get_one(server: Served) -> None:
    reply = server.post(PATH, {"model": "tiny", "input": "a"})
    assert reply.status == 400 and "--encoder" in reply.json["error"]["message"]


def test_the_gateway_has_no_torch(encoders: Encoders) -> None:
    maps = Path(f"/proc/{encoders.served.process.pid}/maps")
    if maps.exists():
        assert "libtorch" not in maps.read_text()
