"""The first answers of the default model, asked as a newcomer asks: no sampling values are given.

`benchmarks/serving/easy_questions.toml` has the questions; docs/models.md has the figures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import coterie_client
import grpc
import ollama
import openai
import pytest
from websockets.sync.client import connect

from benchmarks.serving.first_answer import MAX_TOKENS, SEEDS, EasyQuestion, read_questions
from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from tests.helpers.serving.sdk_clients import node, run
from tests.helpers.serving.server_process import Served, frames

QUESTIONS = read_questions()
PARIS = QUESTIONS[0]
# at no temperature and top-p from 0 to 1 does the model answer these right in 80% of the seeds; the
# best that any gives is 12 of 20 for both
BEYOND_THE_MODEL = {
    "What is the capital of Italy?",
    "What is the largest planet in our solar system?",
}
NAME = "smollm2-135m-instruct"
TYPESCRIPT = """
import { ExpertClient } from "@coterie/client";
const client = new ExpertClient();
const result = await client.infer({ prompt: process.argv[2] });
console.log(result.text);
"""


@pytest.fixture(scope="module")
def default_server() -> Iterator[Served]:
    """`coterie serve` without a model."""
    served = Served("--grpc-port", "0")
    yield served
    assert served.stop() == 0, served.log()


def by_chat(served: Served, question: str) -> str:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        turns: Any = [{"role": "user", "content": question}]
        done = client.chat.completions.create(model=NAME, messages=turns, max_tokens=MAX_TOKENS)
    return done.choices[0].message.content or ""


def by_responses(served: Served, question: str) -> str:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        done = client.responses.create(model=NAME, input=question, max_output_tokens=MAX_TOKENS)
    return done.output_text


def by_messages(served: Served, question: str) -> str:
    with anthropic.Anthropic(base_url=served.url, api_key="none") as client:
        turns: Any = [{"role": "user", "content": question}]
        done = client.messages.create(model=NAME, messages=turns, max_tokens=MAX_TOKENS)
    return "".join(block.text for block in done.content if block.type == "text")


def by_ollama(served: Served, question: str) -> str:
    turns = [{"role": "user", "content": question}]
    with ollama.Client(served.url) as client:
        done = client.chat(NAME, turns, options={"num_predict": MAX_TOKENS})
    return done.message.content or ""


def by_infer(served: Served, question: str) -> str:
    body = {"prompt": question, "max_tokens": MAX_TOKENS}
    return str(served.post("/v1/infer", body).json["text"])


def by_websocket(served: Served, question: str) -> str:
    url = served.url.replace("http", "ws", 1) + "/v1/infer/ws"
    with connect(url, open_timeout=30) as socket:
        socket.send(json.dumps({"prompt": question, "max_tokens": MAX_TOKENS}))
        while True:
            event = json.loads(socket.recv(timeout=60))
            assert event["event"] != "error", event
            if event["event"] == "finished":
                return str(event["text"])


def by_grpc(served: Served, question: str) -> str:
    found = re.search(r"gRPC on (\S+)", served.log())
    assert found, served.log()
    with grpc.insecure_channel(found[1]) as channel:
        infer = channel.unary_unary(
            "/coterie.v1.Inference/Infer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.InferenceResult.FromString,
        )
        done = infer(pb.InferRequest(prompt=question, max_tokens=MAX_TOKENS), timeout=60)
    return str(done.text)


def by_python_sdk(served: Served, question: str) -> str:
    with coterie_client.ExpertClient(base_url=served.url) as client:
        return client.infer(question, max_tokens=MAX_TOKENS).text


def by_panel(served: Served, question: str) -> str:
    """What the dashboard's chat panel sends; tests/browser asks in the panel itself."""
    turns = [{"role": "user", "content": question}]
    body = {"model": "auto", "stream": True, "messages": turns}
    raw = served.post("/v1/chat/completions", body).body
    chunks = [data for _, data in frames(raw) if data != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


ROADS: dict[str, Callable[[Served, str], str]] = {
    "chat": by_chat,
    "responses": by_responses,
    "messages": by_messages,
    "ollama": by_ollama,
    "infer": by_infer,
    "websocket": by_websocket,
    "grpc": by_grpc,
    "python-sdk": by_python_sdk,
    "panel": by_panel,
}


def num_right(texts: list[str], question: EasyQuestion) -> int:
    return sum(map(question.is_right, texts))


@pytest.mark.parametrize("road", ROADS)
def test_paris_is_named(road: str, default_server: Served) -> None:
    texts = [ROADS[road](default_server, PARIS.text) for _ in range(2)]
    assert num_right(texts, PARIS) == 2, texts


@pytest.mark.full
@pytest.mark.parametrize("road", ROADS)
def test_paris_is_named_in_18_of_20(road: str, default_server: Served) -> None:
    texts = [ROADS[road](default_server, PARIS.text) for _ in range(SEEDS)]
    assert num_right(texts, PARIS) >= 18, texts


def test_paris_is_named_by_typescript(
    default_server: Served, package: Path, tmp_path: Path
) -> None:
    script = package / "first_answer.mjs"
    script.write_text(TYPESCRIPT)
    environment = {**os.environ, "COTERIE_BASE_URL": default_server.url, "COTERIE_API_KEY": "none"}
    told = run([node(), script, PARIS.text], environment)
    assert PARIS.is_right(told), told


@pytest.mark.parametrize("command", [("run", "--prompt", PARIS.text), ("chat",)])
def test_paris_is_named_in_the_terminal(command: tuple[str, ...]) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "coterie", *command],
        input=f"{PARIS.text}\n", capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert PARIS.is_right(told.stdout), told.stdout


def asked(served: Served, question: EasyQuestion, seed: int) -> str:
    turns = [{"role": "user", "content": question.text}]
    body = {"model": NAME, "messages": turns, "seed": seed, "max_tokens": MAX_TOKENS}
    return str(served.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"])


def counted(served: Served, num_seeds: int) -> dict[str, int]:
    """By question: how many answers are right."""
    pairs = [(question, seed) for question in QUESTIONS for seed in range(num_seeds)]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        texts = list(pool.map(lambda pair: asked(served, *pair), pairs))
    counts = dict.fromkeys((question.text for question in QUESTIONS), 0)
    for (question, _), text in zip(pairs, texts, strict=True):
        counts[question.text] += question.is_right(text)
    return counts


@pytest.mark.parametrize("num_seeds", [1, pytest.param(SEEDS, marks=pytest.mark.full)])
def test_easy_questions_are_answered(num_seeds: int, default_server: Served) -> None:
    counts = counted(default_server, num_seeds)
    print(counts)
    assert counts[PARIS.text] >= 0.9 * num_seeds, counts
    wrong = {text for text, count in counts.items() if count < 0.8 * num_seeds}
    assert wrong <= BEYOND_THE_MODEL, counts


@pytest.mark.parametrize("name", ["smollm2", "smollm2:135m", "smollm2:latest", f"{NAME}:latest"])
def test_the_model_is_found_by_its_short_name(name: str, default_server: Served) -> None:
    """As Ollama's users write it; a server's own names have no tags."""
    reply = default_server.post("/api/show", {"model": name})
    assert reply.status == 200 and reply.json["details"]["format"] == "gguf"
    assert default_server.post("/api/show", {"model": "qwen3:4b"}).status == 404


def test_values_and_their_sources_are_told(default_server: Served) -> None:
    card = default_server.get(f"/v1/models/{NAME}").json
    advised = {"value": 0.0, "source": "recommended"}
    assert card["sampling"]["temperature"] == advised
    # the template writes it itself
    assert card["system_prompt"] is None
    shown = default_server.post("/api/show", {"model": NAME}).json["parameters"]
    assert re.search(r"^temperature +0\.0$", shown, re.MULTILINE), shown
    props = default_server.get("/props").json["default_generation_settings"]["params"]
    assert (props["temperature"], props["top_p"]) == (0.0, 0.9)
    turns = [{"role": "user", "content": PARIS.text}]
    body = {"model": NAME, "messages": turns, "temperature": 0.5, "max_tokens": 2}
    reply = default_server.post("/v1/chat/completions", body)
    plan = default_server.get(f"/v1/receipts/{reply.headers['x-coterie-receipt']}").json["plan"]
    # a caller's own value is exact
    assert plan["sampling"]["temperature"] == {"value": 0.5, "source": "request"}
    assert plan["sampling"]["top_p"] == {"value": 0.9, "source": "recommended"}
    assert plan["adds_system"] is False
    reply = default_server.post("/v1/infer", {"prompt": PARIS.text, "max_tokens": 2})
    plan = default_server.get(f"/v1/receipts/{reply.json['job_id']}").json["plan"]
    # a task type lowers a temperature and does not raise it
    assert plan["sampling"]["temperature"] == advised
    assert plan["sampling"]["top_p"] == {"value": 0.95, "source": "tuned"}
    assert "repetition_penalty" not in plan["sampling"]
