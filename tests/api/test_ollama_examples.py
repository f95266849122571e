"""Every example of Ollama's API page, sent by curl as written there: most without a content type,
so that curl declares a form.

The page is docs/api.md of github.com/ollama/ollama as of its commit
948f69330acf96a2310f1b53fdfc211731a386d8 (11 August 2026).
The names of models are those of this server. What needs images, another server or a model that is
made or fetched is at the end.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models.filling import filling_checkpoint
from tests.helpers.serving.server_process import Served

# of "tiny" and of "tools": in the tokens of a tiny model, a prompt with tools is long
CONTEXT, TOOLS_CONTEXT = 192, 700
GENERATE, CHAT = "/api/generate", "/api/chat"
ASKED = {"model": "tiny", "prompt": "Why is the sky blue?"}
SKY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "why is the sky blue?"}],
}
# -X and a content type, as two of the examples have them
AS_JSON = ("-X", "POST", "-H", "Content-Type: application/json")
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a given city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city to get the weather for"}
            },
            "required": ["city"],
        },
    },
}
CURRENT_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The location to get the weather for, e.g. San Francisco, CA",
                },
                "format": {
                    "type": "string",
                    "description": "The format to return the weather in, e.g. 'celsius' or "
                    "'fahrenheit'",
                    "enum": ["celsius", "fahrenheit"],
                },
            },
            "required": ["location", "format"],
        },
    },
}
# "sets every available option"
OPTIONS = {
    "num_keep": 5, "seed": 42, "num_predict": 100, "draft_num_predict": 4, "top_k": 20,
    "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7, "repeat_last_n": 33, "temperature": 0.8,
    "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
    "penalize_newline": True, "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024,
    "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True, "num_thread": 8,
}  # fmt: skip
# the fields of the last object of an answer, as the page shows them
COUNTS = (
    "model", "created_at", "done", "total_duration", "load_duration", "prompt_eval_count",
    "prompt_eval_duration", "eval_count", "eval_duration",
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model that fills gaps too, under two names, and word vectors."""
    folder = tmp_path_factory.mktemp("ollama")
    path, config = filling_checkpoint(folder / "model"), folder / "coterie.toml"
    # what an example does not give is not left to chance
    (path / "generation_config.json").write_text('{"temperature": 0.0}')
    config.write_text(
        f"""
[[specialists]]
name = "tiny"
model = "{path}"
context = {CONTEXT}
[[specialists]]
name = "tools"
model = "{path}"
context = {TOOLS_CONTEXT}
[[specialists]]
kind = "encoder"
model = "static"
"""
    )
    made = Served("--config", str(config))
    yield made
    made.stop()


@dataclass(frozen=True)
class CurlAnswer:
    status: int
    media_type: str
    body: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Of a stream one object on each line."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def last(self) -> dict[str, Any]:
        return self.objects[-1]

    def text(self) -> str:
        parts = (part.get("message") or {"content": part.get("response")} for part in self.objects)
        return "".join(part["content"] or "" for part in parts)


def curl(served: Served, path: str, *arguments: str, body: Any = None) -> CurlAnswer:
    """`curl URL -d BODY`, with the page's line breaks in the body."""
    data = [] if body is None else ["-d", json.dumps(body, indent=2)]
    command = ["curl", "-sS", *arguments, served.url + path, *data]
    command += ["-w", "\n%{http_code} %{content_type}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    body_text, _, facts = done.stdout.rpartition("\n")
    status, _, media_type = facts.partition(" ")
    return CurlAnswer(int(status), media_type, body_text)


def check_end(answer: CurlAnswer, *fields: str) -> None:
    """The last object has the fields of the page, and what it counts is there."""
    last = answer.last
    assert {*COUNTS, *fields} <= last.keys(), last
    assert last["model"] in ("tiny", "tools") and last["done"] is True
    assert last["done_reason"] in ("stop", "length")
    assert datetime.fromisoformat(last["created_at"]).tzinfo is not None
    assert last["prompt_eval_count"] > 0 and last["eval_count"] > 0
    room = CONTEXT if last["model"] == "tiny" else TOOLS_CONTEXT
    assert last["prompt_eval_count"] + last["eval_count"] <= room
    assert last["total_duration"] >= last["eval_duration"] > 0


def check_stream(answer: CurlAnswer, field: str) -> None:
    assert (answer.status, answer.media_type) == (200, "application/x-ndjson")
    *parts, last = answer.objects
    assert parts and last["done"] and not any(part["done"] for part in parts)
    assert all({"model", "created_at", field} <= part.keys() for part in parts)
    assert answer.text()


def check_whole(answer: CurlAnswer, field: str) -> None:
    assert answer.status == 200 and answer.media_type == "application/json"
    assert len(answer.objects) == 1 and field in answer.last


def begins_as_json(text: str, names: tuple[str, ...]) -> None:
    """The object of the schema, or what there was room for: a tiny model may never end a number."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        assert "".join(text.split()).startswith(f'{{"{names[0]}":'), text
        return
    assert tuple(value)[: len(names)] == names and isinstance(value["available"], bool)


def test_generate_request_streaming(served: Served) -> None:
    answer = curl(served, GENERATE, body=ASKED)
    check_stream(answer, "response")
    check_end(answer, "response", "context")
    assert answer.last["response"] == ""


def test_request_no_streaming(served: Served) -> None:
    answer = curl(served, GENERATE, body=ASKED | {"stream": False})
    check_whole(answer, "response")
    check_end(answer, "context")
    # the deprecated memory of a conversation
    context = answer.last["context"]
    again = curl(served, GENERATE, body=ASKED | {"context": context[:40], "stream": False})
    check_end(again)
    assert again.last["context"][:40] == context[:40]


def test_request_with_suffix(served: Served) -> None:
    body = {
        "model": "tiny",
        "prompt": "def compute_gcd(a, b):",
        "suffix": "    return result",
        "options": {"temperature": 0},
        "stream": False,
    }
    answer = curl(served, GENERATE, body=body)
    check_whole(answer, "response")
    check_end(answer, "context")
    without = curl(served, GENERATE, body={**body, "suffix": "    return other"})
    assert without.last["prompt_eval_count"] > 0 and without.text() != answer.text()


def test_request_structured_outputs(served: Served) -> None:
    body = {
        "model": "tiny",
        "prompt": "Ollama is 22 years old and is busy saving the world. Respond using JSON",
        "stream": False,
        "format": PERSON,
    }
    answer = curl(served, GENERATE, *AS_JSON, body=body)
    check_whole(answer, "response")
    check_end(answer, "context")
    begins_as_json(answer.text(), ("age", "available"))


def test_request_json_mode(served: Served) -> None:
    body = {
        "model": "tiny",
        "prompt": "What color is the sky at different times of the day? Respond using JSON",
        "format": "json",
        "stream": False,
    }
    answer = curl(served, GENERATE, body=body)
    check_whole(answer, "response")
    check_end(answer, "context")
    assert answer.text().lstrip().startswith("{")
    assert answer.last["done_reason"] == "length" or isinstance(json.loads(answer.text()), dict)


def test_request_raw_mode(served: Served) -> None:
    body = {
        "model": "tiny",
        "prompt": "[INST] why is the sky blue? [/INST]",
        "raw": True,
        "stream": False,
    }
    answer = curl(served, GENERATE, body=body)
    check_whole(answer, "response")
    check_end(answer)
    # "raw mode will not return a context", and the template is left out
    assert "context" not in answer.last
    with_template = curl(served, GENERATE, body={**body, "raw": False})
    assert answer.last["prompt_eval_count"] < with_template.last["prompt_eval_count"]


def test_request_reproducible_outputs(served: Served) -> None:
    body = {**ASKED, "options": {"seed": 123}}
    first, second = (curl(served, GENERATE, body=body) for _ in range(2))
    check_stream(first, "response")
    check_end(first)
    assert first.text() == second.text()
    drawn = {"num_predict": 16, "temperature": 1.0}
    texts = [
        curl(served, GENERATE, body={**ASKED, "options": drawn | {"seed": seed}}).text()
        for seed in (123, 123, 124)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_generate_request_with_options(served: Served) -> None:
    body = {**ASKED, "stream": False, "options": OPTIONS}
    answer = curl(served, GENERATE, body=body)
    check_whole(answer, "response")
    check_end(answer, "context")
    assert answer.last["eval_count"] <= 100 and "\n" not in answer.text()
    assert curl(served, GENERATE, body=body).text() == answer.text()


def test_load_and_unload_a_model(served: Served) -> None:
    loaded = curl(served, GENERATE, body={"model": "tiny"})
    check_whole(loaded, "response")
    assert loaded.last.keys() == {"model", "created_at", "response", "done", "done_reason"}
    assert (loaded.last["response"], loaded.last["done_reason"]) == ("", "load")
    unloaded = curl(served, GENERATE, body={"model": "tiny", "keep_alive": 0})
    assert unloaded.last.keys() == loaded.last.keys()
    assert unloaded.last["done"] is True and unloaded.last["done_reason"] == "unload"
    # other callers still use it
    assert curl(served, GENERATE, body={**ASKED, "options": {"num_predict": 4}}).status == 200


def test_chat_request_streaming(served: Served) -> None:
    answer = curl(served, CHAT, body=SKY)
    check_stream(answer, "message")
    check_end(answer, "message")
    assert answer.last["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("stream", [True, False])
def test_chat_request_with_weather_tools(served: Served, stream: bool) -> None:
    turn = {"role": "user", "content": "what is the weather in tokyo?"}
    body = {"model": "tools", "messages": [turn], "tools": [WEATHER], "stream": stream}
    answer = curl(served, CHAT, body=body)
    assert answer.status == 200, answer.body
    check_end(answer, "message")
    # the tool is in the prompt
    bare = curl(served, CHAT, body={"model": "tiny", "messages": [turn], "stream": False})
    assert answer.last["prompt_eval_count"] > bare.last["prompt_eval_count"]
    for call in answer.last["message"].get("tool_calls", ()):
        assert call["function"]["name"] == "get_weather"


def test_chat_request_no_streaming(served: Served) -> None:
    answer = curl(served, CHAT, body=SKY | {"stream": False})
    check_whole(answer, "message")
    check_end(answer)
    assert answer.last["message"]["role"] == "assistant" and answer.text()


def test_chat_request_structured_outputs(served: Served) -> None:
    asked = (
        "Ollama is 22 years old and busy saving the world. Return a JSON object with the age and "
        "availability."
    )
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": asked}],
        "stream": False,
        "format": PERSON,
        "options": {"temperature": 0},
    }
    answer = curl(served, CHAT, *AS_JSON, body=body)
    check_whole(answer, "message")
    check_end(answer)
    begins_as_json(answer.text(), ("age", "available"))


def test_chat_request_with_history(served: Served) -> None:
    turns = [
        *SKY["messages"],
        {"role": "assistant", "content": "due to rayleigh scattering."},
        {"role": "user", "content": "how is that different than mie scattering?"},
    ]
    answer = curl(served, CHAT, body={"model": "tiny", "messages": turns})
    check_stream(answer, "message")
    check_end(answer)
    short = curl(served, CHAT, body=SKY | {"stream": False})
    assert answer.last["prompt_eval_count"] > short.last["prompt_eval_count"]


def test_chat_request_with_history_with_tools(served: Served) -> None:
    """The page has comments inside of its JSON; they are left out."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Toronto"}}}
    turns = [
        {"role": "user", "content": "what is the weather in Toronto?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "11 degrees celsius", "tool_name": "get_weather"},
    ]
    body = {"model": "tools", "messages": turns, "stream": False, "tools": [WEATHER]}
    answer = curl(served, CHAT, body=body)
    check_whole(answer, "message")
    check_end(answer)


def test_chat_request_reproducible_outputs(served: Served) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello!"}],
        "options": {"seed": 101, "temperature": 0},
    }
    first, second = (curl(served, CHAT, body=body) for _ in range(2))
    check_stream(first, "message")
    check_end(first)
    assert first.text() == second.text()


def test_chat_request_with_tools(served: Served) -> None:
    turn = {"role": "user", "content": "What is the weather today in Paris?"}
    body = {"model": "tools", "messages": [turn], "stream": False, "tools": [CURRENT_WEATHER]}
    answer = curl(served, CHAT, body=body)
    check_whole(answer, "message")
    check_end(answer)


def test_load_and_unload_by_chat(served: Served) -> None:
    loaded = curl(served, CHAT, body={"model": "tiny", "messages": []})
    check_whole(loaded, "message")
    assert loaded.last.keys() == {"model", "created_at", "message", "done_reason", "done"}
    assert loaded.last["message"] == {"role": "assistant", "content": ""}
    unloaded = curl(served, CHAT, body={"model": "tiny", "messages": [], "keep_alive": 0})
    assert unloaded.last.keys() == loaded.last.keys()
    assert (loaded.last["done_reason"], unloaded.last["done_reason"]) == ("load", "unload")


def test_list_local_and_running_models(served: Served) -> None:
    details = {
        "parent_model", "format", "family", "families", "parameter_size", "quantization_level",
    }  # fmt: skip
    listed = curl(served, "/api/tags")
    assert listed.status == 200
    names = {model["name"]: model for model in listed.last["models"]}
    assert {"tiny:latest", "tools:latest", "static:latest"} <= names.keys()
    for model in names.values():
        assert {"model", "modified_at", "size", "digest", "details"} <= model.keys()
        assert details <= model["details"].keys()
    running = curl(served, "/api/ps").last["models"]
    served_here = {"tiny:latest", "tools:latest", "static:latest"}
    assert {model["name"] for model in running} == served_here
    for model in running:
        shown = {"model", "size", "digest", "details", "expires_at", "size_vram"}
        assert shown <= model.keys() and details <= model["details"].keys()


def test_show_model_information(served: Served) -> None:
    answer = curl(served, "/api/show", body={"model": "tiny"})
    check_whole(answer, "modelfile")
    fields = {"parameters", "template", "details", "model_info", "capabilities"}
    assert fields <= answer.last.keys()
    assert answer.last["capabilities"] == ["completion", "tools", "insert"]
    assert answer.last["model_info"]["llama.context_length"] == CONTEXT


def test_generate_embeddings(served: Served) -> None:
    one = curl(served, "/api/embed", body={"model": "static", "input": "Why is the sky blue?"})
    check_whole(one, "embeddings")
    shown = {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert shown <= one.last.keys() and one.last["model"] == "static"
    asked = ["Why is the sky blue?", "Why is the grass green?"]
    several = curl(served, "/api/embed", body={"model": "static", "input": asked})
    assert len(several.last["embeddings"]) == 2
    assert several.last["embeddings"][0] == one.last["embeddings"][0]
    body = {"model": "static", "prompt": "Here is an article about llamas..."}
    old = curl(served, "/api/embeddings", body=body)
    assert old.last.keys() == {"embedding"}
    assert len(old.last["embedding"]) == len(one.last["embeddings"][0])


def test_version(served: Served) -> None:
    answer = curl(served, "/api/version")
    check_whole(answer, "version")
    assert all(part.isdigit() for part in answer.last["version"].split("."))


# a picture of one point
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
DIGEST = "sha256:" + "29fdb92e57cf0827ded04ae6461b5931d01fa595843f55d36f5b275a52087dd2"
# (path, arguments, body, status, words): the examples that are refused, in the order of the page
NOT_OFFERED: list[tuple[str, tuple[str, ...], Any, int, str]] = [
    (GENERATE, (), {**ASKED, "stream": False, "images": [PICTURE]}, 400, "images"),
    (
        CHAT,
        (),
        {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": "what is in this image?", "images": [PICTURE]}
            ],
        },
        400,
        "images",
    ),
    ("/api/create", (), {"model": "mario", "from": "tiny", "system": "Mario"}, 400, "over HTTP"),
    ("/api/create", (), {"model": "q", "from": "tiny", "quantize": "q4_K_M"}, 400, "stored bits"),
    ("/api/create", (), {"model": "mine", "files": {"test.gguf": DIGEST}}, 400, "over HTTP"),
    (f"/api/blobs/{DIGEST}", ("-X", "POST"), {}, 404, "no route"),
    ("/api/copy", (), {"source": "tiny", "destination": "tiny-backup"}, 404, "no route"),
    ("/api/delete", ("-X", "DELETE"), {"model": "tiny"}, 404, "no route"),
    ("/api/pull", (), {"model": "tiny"}, 404, "no route"),
    ("/api/push", (), {"model": "mattw/pygmalion:latest"}, 400, "publish"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "arguments", "body", "status", "words"), NOT_OFFERED)
def test_what_is_not_offered(
    served: Served, path: str, arguments: tuple[str, ...], body: Any, status: int, words: str
) -> None:
    answer = curl(served, path, *arguments, body=body)
    assert (answer.status, answer.media_type) == (status, "application/json")
    assert list(answer.last) == ["error"] and words in answer.last["error"], answer.body


def test_a_file_for_the_body(served: Served, tmp_path: Path) -> None:
    """`curl -d @FILE` and `-T FILE`, with and without a length."""
    file = tmp_path / "body.json"
    file.write_text(json.dumps({**ASKED, "stream": False, "options": {"num_predict": 4}}))
    chunked = ("--data-binary", f"@{file}", "-H", "Transfer-Encoding: chunked")
    for arguments in (("-d", f"@{file}"), ("-T", str(file), "-X", "POST"), chunked):
        check_end(curl(served, GENERATE, *arguments))
