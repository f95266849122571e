"""A specialist behind a second server process: another Coterie, and llama-cpp-python's server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.weights.home import home
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, own_home

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
USER = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
KEY = "key-of-the-gateway"
SETTINGS = """
[engine]
kv_bytes = "8MB"
[ensemble]
min_judged = 1
[[specialists]]
name = "far"
fallback = "near"
[specialists.remote]
url = "{url}/v1"
model = "{model}"
timeout_s = 20.0
context = {context}
{key}
[[specialists]]
name = "near"
model = "{tiny}"
checks = ["json"]
"""


@contextmanager
def folder() -> Iterator[Path]:
    path = own_home(temporary_folder("coterie-home-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def gateway(url: str, model: str, context: int, key: str = "") -> Iterator[Served]:
    with folder() as path:
        file = path / "coterie.toml"
        tiny = tiny_checkpoint("llama")
        line = f'key_env = "{key}"' if key else ""
        file.write_text(SETTINGS.format(url=url, model=model, tiny=tiny, key=line, context=context))
        server = Served("--config", str(file), COTERIE_HOME=str(path), FAR_KEY=KEY)
        try:
            yield server
        finally:
            server.stop()


def coterie(path: Path, port: str = "0") -> Served:
    keys = path / "keys"
    keys.write_text(KEY + "\n")
    return Served(
        str(tiny_checkpoint("llama")), "--port", port, "--api-key-file", str(keys),
        "--kv-bytes", "8MB", COTERIE_HOME=str(path), wait_ready=False,
    )  # fmt: skip


def chat(server: Served, **fields: Any) -> Any:
    reply = server.post("/v1/chat/completions", {"model": "far", "messages": USER} | fields)
    return reply if fields.get("stream") or reply.status != 200 else json.loads(reply.body)


def frames(body: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def ready(server: Served, name: str, wanted: bool, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if json.loads(server.get("/health").body)["specialists"][name]["ready"] is wanted:
            return
        time.sleep(0.1)
    raise AssertionError(f"{name} is not {wanted} after {seconds} s: {server.log()[-2000:]}")


def metrics(server: Served) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line and not line.startswith("#")
    }


def test_another_coterie_its_death_and_return() -> None:
    with folder() as path:
        far = coterie(path)
        port = far.url.rpartition(":")[2]
        try:
            # a server that is still loading counts as one that was lost
            far.wait_ready()
            with gateway(far.url, tiny_checkpoint("llama").name.lower(), 1024, "FAR_KEY") as near:
                ready(near, "far", True)
                answers(near)
                refusals(near)
                far = death_and_return(near, far, path, port)
                log = near.log()
                assert KEY not in log and "httpx" not in log
        finally:
            far.stop(signal.SIGKILL)


def answers(near: Served) -> None:
    given = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "seed": 3}
    whole = chat(near, **given)
    text = whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 8 and whole["usage"]["prompt_tokens"] > 1
    stream = frames(chat(near, stream=True, stream_options={"include_usage": True}, **given).body)
    pieces = [f["choices"][0]["delta"].get("content") or "" for f in stream if f["choices"]]
    assert "".join(pieces) == text and sum(bool(piece) for piece in pieces) > 2
    assert stream[-1]["usage"]["completion_tokens"] == 8
    assert stream[-1]["coterie"]["receipt"]["plan"]["replica"] == "remote-far"
    scored = chat(near, logprobs=True, top_logprobs=2, **given)
    assert len(scored["choices"][0]["logprobs"]["content"]) == 8
    assert len(chat(near, n=2, **given)["choices"]) == 2
    # tools, in both dialects, whole and streamed
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
    whole = chat(near, **forced)
    call = whole["choices"][0]["message"]["tool_calls"][0]["function"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert call["name"] == "weather" and set(json.loads(call["arguments"])) == {"city"}
    stream = frames(chat(near, stream=True, **forced).body)
    parts = [
        part["function"]
        for one in stream
        for part in one["choices"][0]["delta"].get("tool_calls") or ()
    ]
    assert parts[0]["name"] == "weather"
    assert "".join(part["arguments"] for part in parts) == call["arguments"]
    body = {
        "model": "far", "messages": USER, "max_tokens": 200, "temperature": 0,
        "tools": [{"name": "weather", "input_schema": SCHEMA}], "tool_choice": {"type": "any"},
    }  # fmt: skip
    message = json.loads(near.post("/v1/messages", body).body)
    assert message["stop_reason"] == "tool_use"
    assert message["content"][0]["input"] == json.loads(call["arguments"])
    # a schema is enforced over there and checked here
    schema = {"type": "integer", "minimum": 1, "maximum": 9}
    answer_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    whole = chat(near, response_format=answer_format, max_tokens=50)
    assert 1 <= int(whole["choices"][0]["message"]["content"]) <= 9
    assert whole["coterie"]["receipt"]["valid"] is True
    infer = json.loads(near.post("/v1/infer", {"model": "far", "prompt": "hello"}).body)
    assert infer["model"] == "far" and infer["tokens_generated"] > 0


def refusals(near: Served) -> None:
    for fields, code in (
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, "context_length_exceeded"),
        ({"max_tokens": 10**6}, "context_length_exceeded"),
        ({"guided_regex": "a+"}, "unsupported"),
        ({"return_token_ids": True}, "unsupported"),
        ({"logit_bias": {"99999999": 1}}, None),
    ):
        reply = chat(near, **fields)
        assert reply.status == 400, reply.body
        assert json.loads(reply.body)["error"]["code"] == code
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        reply = near.post(path, {"model": "far", "prompt": "a", "messages": USER})
        assert reply.status == 400
    reply = near.post("/v1/completions", {"model": "far", "prompt": "a", "logprobs": 1})
    assert json.loads(reply.body)["error"]["code"] == "unsupported"


def death_and_return(near: Served, far: Served, path: Path, port: str) -> Served:
    """Killed in the middle of an answer; named requests get 503, routed ones the fallback."""
    body = {"model": "far", "messages": USER, "stream": True, "max_tokens": 900, "ignore_eos": True}
    request = urllib.request.Request(
        near.url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    lines: list[bytes] = []
    with urllib.request.urlopen(request, timeout=60) as stream:
        for line in stream:
            lines.append(line)
            if len(lines) == 12:
                far.expected_deaths = 0
                far.kill_workers()
                far.process.kill()
    ended = b"".join(lines)
    assert b"[DONE]" not in ended and b'"finish_reason":"' not in ended
    error = json.loads(ended.decode().strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert error["code"] == "worker_crashed", error
    far.process.wait(20)
    reply = chat(near, max_tokens=4)
    assert reply.status == 503 and json.loads(reply.body)["error"]["code"] == (
        "specialist_unavailable"
    )
    ready(near, "far", False)
    assert near.get("/health/ready").status == 200
    # one judged answer: from then on the other one may stand in
    schema = {"type": "integer", "minimum": 1, "maximum": 9}
    answer_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert "choices" in chat(near, model="near", response_format=answer_format, max_tokens=None)
    routed = chat(near, model="auto", max_tokens=4)
    assert routed["model"] == "near"
    assert routed["coterie"]["receipt"]["plan"]["breaker"] == "ejected"
    assert metrics(near)['coterie_worker_up{replica="remote-far"}'] == 0
    far = coterie(path, port)
    ready(near, "far", True)
    assert chat(near, model="auto", max_tokens=4)["model"] == "far"
    assert metrics(near)['coterie_worker_restarts_total{replica="remote-far"}'] == 1
    return far


LLAMA = "llama-cpp-python[server]==0.3.36"


def llama_python() -> Path:
    """A Python with llama-cpp-python, made once for this checkout; it compiles for about ten
    minutes."""
    root = Path(os.environ.get("COTERIE_LLAMA_ENV", ROOT / ".cache" / "llama-cpp-server"))
    python, stamp = root / "bin" / "python", root / ".ready"
    if not stamp.exists() and not _has_llama(python):
        venv.create(root, with_pip=True)
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", LLAMA]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{LLAMA} does not install here: {done.stderr[-300:]}")
        stamp.touch()
    return python


def _has_llama(python: Path) -> bool:
    code = "import llama_cpp.server.app"
    return python.exists() and subprocess.run([str(python), "-c", code]).returncode == 0


@contextmanager
def llama_server() -> Iterator[str]:
    found = sorted((home() / "models").rglob("*.gguf"))
    if not found:
        pytest.skip("the default model is not in the cache")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(llama_python()), "-m", "llama_cpp.server", "--model", str(found[0]),
        "--port", str(port), "--n_ctx", "512", "--model_alias", "smol",
        # by default a new request ends the one that runs
        "--interrupt_requests", "false", "--verbose", "false",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(url + "/v1/models", timeout=5):
                    break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.timeout(1800)
def test_a_llama_cpp_server_streams_text_and_errors() -> None:
    with llama_server() as url, gateway(url, "smol", 512) as near:
        ready(near, "far", True)
        given = {"max_tokens": 12, "temperature": 0}
        whole = chat(near, **given)
        assert isinstance(whole, dict), (whole.body, near.log()[-3000:])
        text = whole["choices"][0]["message"]["content"]
        assert text.strip() and whole["choices"][0]["finish_reason"] in ("stop", "length")
        stream = frames(chat(near, stream=True, **given).body)
        pieces = [f["choices"][0]["delta"].get("content") or "" for f in stream if f["choices"]]
        assert "".join(pieces) == text and sum(bool(piece) for piece in pieces) > 1
        body = {"model": "far", "prompt": "One, two,", "max_tokens": 6}
        reply = near.post("/v1/completions", body)
        assert reply.status == 200 and json.loads(reply.body)["choices"][0]["text"]
        reply = chat(near, messages=[{"role": "user", "content": "long " * 2000}])
        assert reply.status == 400
        assert json.loads(reply.body)["error"]["code"] == "context_length_exceeded", reply.body
        # eight callers at once, of which the server answers one after the other
        texts: list[str] = []

        def call() -> None:
            texts.append(chat(near, **given)["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [text] * 8
    assert sys.modules.get("llama_cpp") is None
