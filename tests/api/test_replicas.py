"""Two replicas of one model, one of them killed: the other one continues what it had.

The oracle is the same server undisturbed: every stream has the same text, its last event included.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, own_home

KILLS = 10
# a stream may pause this long while the other replica has room
MAX_PAUSE_S = 3.0
# of the drill's streams: the prompts are so different that no two share a beginning
LENGTHS = (300, 320, 340, 360, 380, 400, 420, 440, 350, 390)
STREAMS = len(LENGTHS)
ADMIN = "an-admin-key-of-the-replicas"
ADAPTERS = ("lora", "soft_prompt")


def serve(folder: Path, backoff_s: float) -> Served:
    file, model = folder / "coterie.toml", tiny_checkpoint("llama", max_position_embeddings=8192)
    keys = folder / "keys.txt"
    keys.write_text(f"{ADMIN}\n")
    file.write_text(f"""
        [server]
        admin_key_file = "{keys}"
        allow_unsigned = true
        [engine]
        kv_bytes = "64MB"
        threads = 1
        restart_backoff_s = {backoff_s}
        max_restart_backoff_s = {backoff_s}
        [[specialists]]
        name = "tiny"
        model = "{model}"
        dtype = "fp32"
        replicas = 2
    """)
    served = Served("--config", str(file), COTERIE_HOME=str(own_home(folder / "home")))
    for seed, kind in enumerate(ADAPTERS):
        body = {"lora_name": kind, "lora_path": str(make_adapter(model, kind, seed))}
        reply = served.post("/v1/load_lora_adapter", body, authorization=f"Bearer {ADMIN}")
        assert reply.status == 200, reply.body
    return served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A dead worker is not started again in the time of a test."""
    server = serve(tmp_path_factory.mktemp("replicas"), backoff_s=60.0)
    try:
        yield server
    finally:
        assert server.stop() == 0, server.log()


def bodies(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Greedy, sampled, two choices, logprobs, a grammar, penalties, a session, an urgent one, and
    with adapters."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.0, "n": 2},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 1.0, "structured_outputs": {"regex": "[a-z0-9 ]{1,4000}"}},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 20, "cache_key": "a conversation"},
        {"temperature": 1.0, "min_p": 0.02, "priority": 5},
        {"temperature": 0, "model": "tiny:lora"},
        {"temperature": 1.0, "model": "tiny:soft_prompt"},
    ]
    return [
        {
            "model": "tiny", "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "max_tokens": length, "seed": 10 * seed + place,
            "messages": [{"role": "user", "content": f"{place} of {seed}: " + "word " * place}],
        } | kind
        for place, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
    ]  # fmt: skip


@dataclass
class Stream:
    """One streamed answer, read on a thread."""

    served: Served
    body: dict[str, Any]
    # everything that the caller sees but ids and times
    seen: list[Any] = field(default_factory=list)
    text: dict[int, str] = field(default_factory=dict)
    receipt_id: str = ""
    # the one that it began at
    longest_pause_s: float = 0.0
    error: str = ""
    thread: threading.Thread | None = None

    def start(self) -> Stream:
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        return self

    @property
    def has_ended(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()

    def join(self) -> Stream:
        assert self.thread is not None
        self.thread.join(300)
        assert self.has_ended and not self.error, self.error
        return self

    def _read(self) -> None:
        try:
            self._frames()
        except Exception as error:
            self.error = repr(error)

    def _frames(self) -> None:
        asked = urllib.request.Request(
            self.served.url + "/v1/chat/completions",
            json.dumps(self.body).encode(),
            {"content-type": "application/json", "x-coterie-debug": "true"},
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            last = time.monotonic()
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                now = time.monotonic()
                if self.text:
                    self.longest_pause_s = max(self.longest_pause_s, now - last)
                last = now
                self._take(json.loads(line[6:]))

    def _take(self, frame: dict[str, Any]) -> None:
        assert "error" not in frame, frame
        # headers that had to go before the request began do not name it
        self.receipt_id = frame["id"]
        for choice in frame["choices"]:
            index = choice["index"]
            text = choice["delta"].get("content") or ""
            self.text[index] = self.text.get(index, "") + text
            for token in (choice.get("logprobs") or {}).get("content") or ():
                self.seen.append((index, token["token"], token["top_logprobs"][0]["token"]))
            if choice["finish_reason"]:
                self.seen.append((index, choice["finish_reason"]))
        if frame.get("usage"):
            self.seen.append(frame["usage"]["completion_tokens"])


def run(served: Served, asked: list[dict[str, Any]]) -> list[Stream]:
    return [stream.join() for stream in [Stream(served, body).start() for body in asked]]


def until_begun(streams: list[Stream], least: int = STREAMS) -> None:
    while sum(bool(stream.text) for stream in streams) < least:
        assert not any(stream.error for stream in streams), [one.error for one in streams]
        time.sleep(0.005)


def same(streams: list[Stream], undisturbed: list[Stream]) -> int:
    """How many streams are as in the run that nobody disturbed."""
    pairs = zip(streams, undisturbed, strict=True)
    return sum(
        (one.text, sorted(map(str, one.seen))) == (two.text, sorted(map(str, two.seen)))
        for one, two in pairs
    )


def workers(served: Served) -> dict[str, int]:
    """Process ids by replica, from the log."""
    found = {}
    for line in served.log().splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if entry.get("event") in ("worker_ready", "worker_restarted"):
                found[entry["replica"]] = entry["pid"]
    return {name: pid for name, pid in found.items() if psutil.pid_exists(pid)}


def kill(served: Served, replica: str) -> None:
    os.kill(workers(served)[replica], signal.SIGKILL)
    served.expected_deaths += 1


def receipts(served: Served, streams: list[Stream]) -> list[dict[str, Any]]:
    return [served.get(f"/v1/receipts/{one.receipt_id}").json for one in streams]


def moved(served: Served) -> float:
    return served.metric("coterie_recoveries_total", where="tiny", kind="moved")


def test_the_other_replica_continues_what_a_killed_one_had(served: Served) -> None:
    undisturbed = run(served, bodies(1))
    used = {receipt["plan"]["replica"] for receipt in receipts(served, undisturbed)}
    assert used == {"e0r0", "e0r1"}
    streams = [Stream(served, body).start() for body in bodies(1)]
    # on a busy machine the first ones end before the last ones begin
    until_begun(streams, STREAMS // 2)
    kill(served, "e0r0")
    for stream in streams:
        stream.join()
    assert same(streams, undisturbed) == STREAMS
    # nobody waited for the next worker: it is not there yet
    assert '"event":"worker_restarted"' not in served.log()
    reason = "continued by e0r1: the worker of e0r0 was lost"
    continued = [
        one for one in receipts(served, streams) if one["plan"]["reasons"][-1:] == [reason]
    ]
    assert moved(served) == len(continued) > 0
    for receipt in continued:
        assert receipt["plan"]["replica"] == "e0r1"
        assert receipt["outcome"] == "length"
    # one that had not reached its worker yet lost no time
    assert any(receipt["timings"]["outage_ms"] > 0 for receipt in continued)
    # nothing is counted twice or left behind
    for kind in ("running", "waiting"):
        assert served.metric(f"vllm:num_requests_{kind}") == 0


JOB = {"prompt": "a job", "model": "tiny", "max_tokens": 300, "temperature": 0}


def _search(served: Served, into: list[Any]) -> None:
    beams = {"use_beam_search": True, "n": 3, "max_tokens": 200, "prompt": "beams", "model": "tiny"}
    reply = served.post("/v1/completions", beams)
    assert reply.status == 200, reply.body
    into.append([choice["text"] for choice in reply.json["choices"]])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_kills(tmp_path: Path) -> None:
    """The long form: ten kills at seeded moments, each of ten streams, a beam search and a job
    that run on both replicas."""
    drawn, served = random.Random(1), serve(tmp_path, backoff_s=0.5)
    pauses: list[float] = []
    try:
        for count in range(KILLS):
            began = time.monotonic()
            asked = bodies(count)
            undisturbed, beams = run(served, asked), list[Any]()
            _search(served, beams)
            whole_s = time.monotonic() - began
            streams = [Stream(served, body).start() for body in asked]
            job = served.post("/v1/infer", JOB, prefer="respond-async").headers["location"]
            found: list[Any] = []
            searching = threading.Thread(target=_search, args=(served, found))
            searching.start()
            until_begun(streams)
            time.sleep(drawn.uniform(0.0, 0.3 * whole_s))
            victim = drawn.choice(["e0r0", "e0r1"])
            kill(served, victim)
            for stream in streams:
                stream.join()
            searching.join()
            assert same(streams, undisturbed) == STREAMS, count
            assert found == beams
            pauses.append(max(stream.longest_pause_s for stream in streams))
            while (state := served.get(job).json)["status"] in ("queued", "processing"):
                time.sleep(0.05)
            assert state["status"] == "succeeded", state
            while served.get("/health").json["specialists"]["tiny"]["states"][victim] != "up":
                time.sleep(0.05)
        print(f"{KILLS} kills, {moved(served):.0f} requests moved, longest pauses {pauses}")
        assert max(pauses) < MAX_PAUSE_S
        assert moved(served) >= KILLS
    finally:
        assert served.stop() == 0, served.log()
