"""An answer that was drawn without a seed can be drawn again: the seed is told, on every API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.serving.server_process import Served, chat, frames

SEED = "x-coterie-seed"
MESSAGES = [{"role": "user", "content": "hello there"}]


def native(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello there", "max_tokens": 12, "temperature": 1, "top_p": 1} | fields


BODIES = {
    "/v1/infer": native(),
    "/v1/chat/completions": chat(temperature=1, max_tokens=12),
    "/v1/completions": {"model": "tiny", "prompt": "hello there", "max_tokens": 12},
    "/v1/messages": {"model": "tiny", "max_tokens": 12, "messages": MESSAGES},
}


def said(answer: Any) -> str:
    """The text of a whole answer, whatever its dialect."""
    if "content" in answer:
        return str(answer["content"][0]["text"])
    if "choices" not in answer:
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed(body: bytes) -> str:
    """The text of a stream, whatever its dialect."""
    texts = []
    for name, data in frames(body):
        if name == "delta":
            texts.append(data["text"])
        elif name == "content_block_delta":
            texts.append(data["delta"]["text"])
        elif name is None and isinstance(data, dict):
            for choice in data["choices"]:
                texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(texts)


@pytest.mark.parametrize("path", BODIES)
def test_an_unseeded_answer_is_drawn_again_by_its_seed(server: Served, path: str) -> None:
    first, other = server.post(path, BODIES[path]), server.post(path, BODIES[path])
    assert first.headers[SEED] != other.headers[SEED] and said(first.json) != said(other.json)
    seed = int(first.headers[SEED])
    again = server.post(path, BODIES[path] | {"seed": seed})
    assert said(again.json) == said(first.json) and int(again.headers[SEED]) == seed
    # a stream has the seed in front of its first byte
    stream = server.post(path, BODIES[path] | {"stream": True})
    whole = server.post(path, BODIES[path] | {"seed": int(stream.headers[SEED])})
    assert said(whole.json) == streamed(stream.body)


def test_the_native_answer_and_its_log_hold_the_seed(server: Served) -> None:
    reply = server.post("/v1/infer", native())
    answer = reply.json
    assert answer["seed"] == answer["metrics"]["seed"] == int(reply.headers[SEED])
    # numbers in JavaScript end there
    assert 0 <= answer["seed"] < 2**53
    logged = server.get("/v1/inferences?limit=50").json["data"]
    assert (
        next(row for row in logged if row["job_id"] == answer["job_id"])["seed"] == answer["seed"]
    )
    given = server.post("/v1/infer", native(seed=-3)).json
    assert server.post("/v1/infer", native(seed=given["seed"])).json["text"] == given["text"]


def test_each_prompt_of_a_request_has_its_own_seed(server: Served) -> None:
    """Equal prompts without a seed are drawn apart, and each can be drawn again."""
    body = BODIES["/v1/completions"]
    reply = server.post("/v1/completions", body | {"prompt": ["hello there", "hello there"]})
    texts = [choice["text"] for choice in reply.json["choices"]]
    seeds = [int(seed) for seed in reply.headers[SEED].split(",")]
    assert len(set(seeds)) == 2 and texts[0] != texts[1]
    again = [server.post("/v1/completions", body | {"seed": seed}).json for seed in seeds]
    assert [said(answer) for answer in again] == texts


def test_a_job_is_drawn_again_by_its_seed(server: Served) -> None:
    job = server.post("/v1/infer", native(), prefer="respond-async").json["job_id"]
    result = frames(server.get(f"/v1/jobs/{job}/events").body)[-1][1]
    again = server.post("/v1/infer", native(seed=result["seed"])).json
    assert again["text"] == result["text"]


def test_typical_and_beams_are_on_the_native_api(server: Served) -> None:
    plain = server.post("/v1/infer", native(seed=7)).json["text"]
    typical = server.post("/v1/infer", native(seed=7, typical_p=0.05)).json["text"]
    vendor = chat(seed=7, typical_p=0.05, temperature=1, max_tokens=12, top_p=1, top_k=0, min_p=0)
    narrow = native(seed=7, typical_p=0.05, top_k=0, min_p=0, repetition_penalty=1)
    assert typical != plain
    assert server.post("/v1/infer", narrow).json["text"] == said(
        server.post("/v1/chat/completions", vendor).json
    )
    beams = native(num_beams=3, repetition_penalty=1)
    vendor = chat(use_beam_search=True, n=3, max_tokens=12)
    found = server.post("/v1/infer", beams).json
    assert found["text"] == said(server.post("/v1/chat/completions", vendor).json)
    assert server.post("/v1/infer", beams | {"stream": True}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": 0}, "typical_p"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 65}, "num_beams"),
        ({"length_penalty": 1}, "length_penalty"),
    ],
)
def test_what_no_search_or_filter_can_do(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    reply = server.post("/v1/infer", native() | fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
