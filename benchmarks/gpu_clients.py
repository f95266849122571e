"""Latency that clients see: a random model on disk behind an HTTP server, or in `coterie.LLM`.

The server runs in processes of its own, as `coterie serve` starts it. Where its packages are
missing, the same requests go through `coterie.LLM` in this process, and the figures say so.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from benchmarks.gpu_runs import STEP_TOKENS, WARM, Sizes, percentiles
from benchmarks.random_models import RandomCheckpoint, make_prompts, write_tokenizer
from coterie.core.adapters import AdapterSettings
from coterie.models.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from coterie.models.base import CausalLM
    from coterie.weights.checkpoint import Checkpoint
    from coterie.workers.contract import WorkerSpec

SERVER_PACKAGES = ("fastapi", "pydantic", "uvicorn", "msgspec", "zmq", "jsonschema")
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
START_S = 120.0
ROOT = Path(__file__).resolve().parents[1]


# when a request was sent, and when its tokens came
Answered = tuple[float, list[float]]


class Front(Protocol):
    """What clients talk to."""

    # how requests reach the model, in a few words
    way: str
    vocab: int

    def ask_all(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], streams: int
    ) -> list[Answered]:
        """All requests, by `streams` clients that send one after the other."""

    def close(self) -> None: ...


def open_front(config: dict[str, Any], device: str, streams: int) -> Front:
    """The server if it can start here, else `coterie.LLM`; with a random model of that shape."""
    folder = tempfile.TemporaryDirectory(prefix="coterie-bench-")
    write_model(Path(folder.name), config, device)
    missing = [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    front: Front = (
        LlmFront(folder, device, streams, missing)
        if missing
        else HttpFront(folder, device, streams)
    )
    front.vocab = config["vocab_size"]
    return front


def write_model(path: Path, config: dict[str, Any], device: str) -> None:
    from safetensors.torch import save_file

    source = RandomCheckpoint(config, device)
    tensors = {name: source.read(name).tensor.cpu() for name in source.names()}  # type: ignore[union-attr]
    save_file(tensors, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path, config["vocab_size"])


def ask_in_threads(ask: Callable[[int], list[float]], count: int, streams: int) -> list[Answered]:
    """Requests 0 to `count` by so many threads; `ask` returns when the tokens of one came."""
    found: list[Answered] = []
    problems: list[Exception] = []

    def client(number: int) -> None:
        try:
            for at in range(number, count, streams):
                sent = time.perf_counter()
                found.append((sent, ask(at)))
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return found


class LlmFront:
    vocab = 0

    @classmethod
    def of(cls, model: CausalLM, streams: int, context: int) -> LlmFront:
        """A model that is in memory already, and stays there."""
        from coterie import LLM
        from coterie.workers import host

        folder = tempfile.TemporaryDirectory(prefix="coterie-bench-")
        write_tokenizer(Path(folder.name), model.spec.vocab)
        named = SimpleNamespace(generation={}, fingerprint=lambda: "random")
        checkpoint = cast("Checkpoint", named)
        kv_bytes = (streams + 1) * context * model.kv_bytes_per_token()
        graphs = None if model.graphs is None else model.limit_graphs(8 << 30)

        def build(spec: WorkerSpec) -> host.EngineHost:
            parts = host.EngineResources(1, None, None, graphs)
            tokenizer = load_tokenizer(Path(spec.model))
            return host._host(spec, checkpoint, model, kv_bytes, tokenizer, parts)

        usual = host.build_engine
        host.build_engine = build  # type: ignore[assignment]
        try:
            front = cls.__new__(cls)
            front.way, front._folder, front.vocab = (
                "coterie.LLM, not HTTP",
                folder,
                model.spec.vocab,
            )
            front._llm = LLM(
                folder.name,
                context=context,
                max_sequences=streams,
                max_step_tokens=STEP_TOKENS,
                adapters=AdapterSettings(device_bytes=0),
                capture_graphs="start",
            )
            return front
        finally:
            host.build_engine = usual

    def __init__(
        self,
        folder: tempfile.TemporaryDirectory[str],
        device: str,
        streams: int,
        missing: list[str],
    ) -> None:
        from coterie import LLM

        self.way = f"coterie.LLM, not HTTP ({', '.join(missing)} missing)"
        self._folder = folder
        self._llm = LLM(
            folder.name,
            device=device,
            max_sequences=streams,
            max_step_tokens=STEP_TOKENS if device == "cuda" else 512,
            adapters=AdapterSettings(device_bytes=0),
            capture_graphs="start",
        )

    def ask_all(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], streams: int
    ) -> list[Answered]:
        """A thread for each client."""

        def ask(at: int) -> list[float]:
            limits = {"max_tokens": outputs[at], "ignore_eos": True, "seed": at}
            times: list[float] = []
            for delta in self._llm.stream(list(prompts[at]), **SAMPLING, **limits):
                times += [time.perf_counter()] * len(delta.token_ids)
            return times

        return ask_in_threads(ask, len(prompts), streams)

    def close(self) -> None:
        self._llm.close()
        self._folder.cleanup()


class HttpFront:
    way, vocab = "HTTP, /v1/completions", 0

    def __init__(self, folder: tempfile.TemporaryDirectory[str], device: str, streams: int) -> None:
        self._folder, self._port = folder, _free_port()
        command = [sys.executable, "-m", "coterie", "serve", folder.name, "--name", "m"]
        command += ["--port", str(self._port), "--device", device, "--adapter-bytes", "0"]
        command += ["--max-sequences", str(streams), "--capture-graphs", "start"]
        env = {**os.environ, "COTERIE_HOME": f"{folder.name}/home", "PYTHONPATH": str(ROOT)}
        # the CPU's kernels are not used, and their compilation takes time
        env["COTERIE_NATIVE"] = "0"
        self._log = Path(folder.name, "server.log")
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health/ready"):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        told = self._log.read_text(errors="replace")[-1500:]
        raise RuntimeError(f"the server is not ready: {told}")

    def ask_all(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], streams: int
    ) -> list[Answered]:
        return ask_in_threads(
            lambda at: self._ask(prompts[at], outputs[at], at), len(prompts), streams
        )

    def _ask(self, ids: Sequence[int], output: int, seed: int) -> list[float]:
        body = {"model": "m", "prompt": list(ids), "max_tokens": output, "stream": True}
        body |= {"ignore_eos": True, "seed": seed, **SAMPLING}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {answer.read()[:300]!r}")
            times = []
            for line in answer:
                # a token may have no text yet: an event stands for one or several
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())
            return times
        finally:
            connection.close()

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def client_case(front: Front, sizes: Sizes, streams: int) -> dict[str, Any]:
    """First-token and inter-token times of `streams` clients, each with one request at a time. A
    round of the same kind comes first, in which sizes of steps are captured and planned."""
    each = max(sizes.requests_per_stream, 8 // streams)
    _ask_all(front, sizes, streams, each, seed=1)
    begin = time.perf_counter()
    answers = _ask_all(front, sizes, streams, each, seed=2)
    seconds = time.perf_counter() - begin
    first = [times[0] - sent for sent, times in answers]
    gaps = [b - a for _, times in answers for a, b in pairwise(times)]
    return {
        "tok_s": sum(len(times) for _, times in answers) / seconds,
        "requests": len(answers),
        **percentiles(first, "first"),
        **percentiles(gaps, "between"),
        "note": f"through {front.way}, {WARM}",
    }


def _ask_all(front: Front, sizes: Sizes, streams: int, each: int, seed: int) -> list[Answered]:
    prompts = make_prompts(front.vocab, [sizes.prompt] * (streams * each), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    # answers of different lengths, so that clients do not send at the same time
    outputs = torch.randint(
        max(2, sizes.output // 2), sizes.output + 1, (len(prompts),), generator=draw
    ).tolist()
    return front.ask_all(prompts, outputs, streams)
