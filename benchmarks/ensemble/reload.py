"""Settings that change under load: is a request lost, or answered by settings that never existed?

    coterie expert install --shipped
    python -m benchmarks.ensemble.reload [--seconds 60] [--callers 8] [--json FILE]

Serves examples/eight.toml with two versions of one file: another fixed expert of `text-to-sql` and
another priority of the tenant, changed together. Callers ask every specialist over the three APIs,
whole and streamed, while the file is rewritten and reloaded by SIGHUP and over HTTP in turn, with a
wrong file after each. Every answer must be complete, and its expert, its priority, its text and the
digest of the settings in its receipt must be those of one version. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

EIGHT = Path(__file__).resolve().parents[2] / "examples" / "eight.toml"
KEY, ADMIN = "key-of-the-callers", "key-of-the-admin"
START_S = 180.0
PAUSE_S = 0.1
TOKENS = 12
FLIPPED = "text-to-sql"
# version -> (the fixed expert of FLIPPED, the priority of the tenant)
VERSIONS = {"A": ("text-to-sql", 3), "B": ("json-extract", 1)}
PROMPT = "Table users(id, name, age). How many users are older than 30?"


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    """What one answer shows of the settings that made it."""

    specialist: str
    expert: str
    priority: str
    # digest of the settings, from the receipt
    config: str
    text: str


@dataclass(slots=True)
class ReloadCounts:
    answers: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    mixed: list[SeenAnswer] = field(default_factory=list)
    reload_s: list[float] = field(default_factory=list)
    signals: int = 0
    refused: int = 0


def settings(folder: Path, version: str, wrong: bool = False) -> str:
    expert, priority = VERSIONS[version]
    text = EIGHT.read_text().replace('adapters = ["text-to-sql"]', f'adapters = ["{expert}"]')
    # the answer is compared, not judged
    text = re.sub(r"^checks = .*$", "", text, flags=re.M)
    keys = f'api_key_file = "{folder}/keys.txt"\nadmin_key_file = "{folder}/admins.txt"'
    more = '\n[[tenants]]\nname = "nobody"\nspecialists = ["nowhere"]' if wrong else ""
    return f'[server]\n{keys}\n{text}\n[[tenants]]\nname = "load"\npriority = {priority}{more}\n'


def write(folder: Path, text: str) -> None:
    """As an editor does: the file is never half written."""
    draft = folder / "draft.toml"
    draft.write_text(text)
    draft.replace(folder / "coterie.toml")


class Caller:
    def __init__(self, url: str) -> None:
        headers = {
            "authorization": f"Bearer {KEY}",
            "anthropic-version": "2023-06-01",
            "x-coterie-debug": "true",
            "x-vllm-priority": "-4",
        }
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=120)
        self.ways: tuple[Callable[[str], Any], ...] = (
            self.chat, self.chat_stream, self.messages, self.messages_stream, self.infer,
        )  # fmt: skip

    async def chat(self, model: str) -> SeenAnswer:
        reply = await self._post("/v1/chat/completions", self._body(model))
        return _seen(reply, reply.json()["choices"][0]["message"]["content"])

    async def messages(self, model: str) -> SeenAnswer:
        reply = await self._post("/v1/messages", self._body(model))
        return _seen(reply, "".join(block["text"] for block in reply.json()["content"]))

    async def infer(self, model: str) -> SeenAnswer:
        body = self._body(model) | {"prompt": PROMPT, "priority": 9}
        del body["messages"]
        reply = await self._post("/v1/infer", body)
        # tuned by the expert: only its name and priority are compared
        return _seen(reply, "")

    async def chat_stream(self, model: str) -> SeenAnswer:
        return await self._stream("/v1/chat/completions", model, "data: [DONE]", _chat_text)

    async def messages_stream(self, model: str) -> SeenAnswer:
        return await self._stream("/v1/messages", model, "event: message_stop", _message_text)

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        reply = await self.client.post(path, json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:200]}")
        return reply

    async def _stream(
        self, path: str, model: str, last: str, text_of: Callable[[Any], str]
    ) -> SeenAnswer:
        body, pieces, ended = self._body(model) | {"stream": True}, [], False
        async with self.client.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{path}: {reply.status_code}")
            async for line in reply.aiter_lines():
                ended = ended or line.startswith(last)
                if line.startswith("data: {"):
                    pieces.append(text_of(json.loads(line[6:])))
        if not ended:
            raise RuntimeError(f"{path}: the stream ended early")
        return _seen(reply, "".join(pieces))

    def _body(self, model: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": PROMPT}]
        return {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}


def _chat_text(frame: Any) -> str:
    if "error" in frame:
        raise RuntimeError(str(frame["error"]))
    return str(frame["choices"][0]["delta"].get("content") or "") if frame["choices"] else ""


def _message_text(frame: Any) -> str:
    if frame["type"] == "error":
        raise RuntimeError(str(frame["error"]))
    return str(frame.get("delta", {}).get("text", ""))


def _seen(reply: httpx.Response, text: str) -> SeenAnswer:
    headers = reply.headers
    expert = headers.get("x-coterie-adapter", "").partition("@")[0]
    priority, config = headers["x-coterie-priority"], headers["x-coterie-config"]
    return SeenAnswer(headers["x-coterie-specialist"], expert, priority, config, text)


async def references(caller: Caller, reload: Any, names: list[str]) -> dict[SeenAnswer, str]:
    """Every answer that one of the versions gives, made without load."""
    known: dict[SeenAnswer, str] = {}
    for version in VERSIONS:
        await reload(version)
        for name in names:
            for way in caller.ways:
                known[await way(name)] = version
    return known


async def call(
    caller: Caller, known: dict[SeenAnswer, str], names: list[str], counts: ReloadCounts,
    place: int, until: float,
) -> None:  # fmt: skip
    index = place
    while time.monotonic() < until:
        # half of the requests go to the specialist that changes
        name = FLIPPED if index % 2 else names[index // 2 % len(names)]
        index += 1
        way = caller.ways[index // 3 % len(caller.ways)]
        try:
            seen = await way(name)
        except (httpx.HTTPError, RuntimeError) as error:
            counts.lost.append(str(error))
            continue
        version = known.get(seen)
        if version is None:
            counts.mixed.append(seen)
        else:
            counts.answers[version] += 1


async def flip(
    folder: Path, process: subprocess.Popen[bytes], admin: httpx.AsyncClient,
    counts: ReloadCounts, until: float,
) -> None:  # fmt: skip
    count = 0
    while time.monotonic() < until:
        version = "AB"[count % 2]
        write(folder, settings(folder, version))
        if count % 3 == 2:
            process.send_signal(signal.SIGHUP)
            counts.signals += 1
            await asyncio.sleep(PAUSE_S)
        else:
            began = time.perf_counter()
            reply = await admin.post("/v1/config/reload")
            counts.reload_s.append(time.perf_counter() - began)
            assert reply.status_code == 200, reply.text
        await asyncio.sleep(PAUSE_S)
        write(folder, settings(folder, version, wrong=True))
        reply = await admin.post("/v1/config/reload")
        assert reply.status_code == 400 and "nowhere" in reply.text, reply.text
        counts.refused += 1
        count += 1


async def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    process = _start(folder)
    try:
        url = await asyncio.to_thread(_url, folder, process)
        caller = Caller(url)
        headers = {"authorization": f"Bearer {ADMIN}"}
        admin = httpx.AsyncClient(base_url=url, headers=headers, timeout=60)

        async def reload(version: str) -> None:
            write(folder, settings(folder, version))
            reply = await admin.post("/v1/config/reload")
            assert reply.status_code == 200, reply.text

        names = re.findall(r'^\[\[specialists\]\]\nname = "(.+)"$', EIGHT.read_text(), re.M)
        known = await references(caller, reload, names)
        counts, until = ReloadCounts(), time.monotonic() + args.seconds
        callers = [
            call(caller, known, names, counts, place, until) for place in range(args.callers)
        ]
        await asyncio.gather(flip(folder, process, admin, counts, until), *callers)
        await caller.client.aclose()
        await admin.aclose()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return _report(args, counts)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "keys.txt").write_text(f"{KEY} tenant=load\n")
    (folder / "admins.txt").write_text(f"{ADMIN}\n")
    for file in ("keys.txt", "admins.txt"):
        os.chmod(folder / file, 0o600)
    write(folder, settings(folder, "A"))
    command = [sys.executable, "-m", "coterie", "serve", "--port", "0"]
    command += ["--config", str(folder / "coterie.toml"), "--log-level", "warning"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _url(folder: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"listening on (http://\S+?),", (folder / "log").read_text())
        if found and httpx.get(f"{found[1]}/health/ready").status_code == 200:
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start: {(folder / 'log').read_text()}")


def _report(args: argparse.Namespace, counts: ReloadCounts) -> dict[str, Any]:
    done = sum(counts.answers.values())
    return {
        "seconds": args.seconds,
        "callers": args.callers,
        "answers": done,
        "answers_by_version": dict(sorted(counts.answers.items())),
        "lost": len(counts.lost),
        "mixed": len(counts.mixed),
        "reloads": len(counts.reload_s) + counts.signals,
        "wrong_files_refused": counts.refused,
        "reload_ms_p50": round(statistics.median(counts.reload_s) * 1000, 1),
        "reload_ms_max": round(max(counts.reload_s) * 1000, 1),
        "examples": [str(item) for item in [*counts.lost[:3], *counts.mixed[:3]]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(measure(Path(folder), args))
    for name, value in report.items():
        print(f"{name:<22}{value}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["lost"] or report["mixed"] else 0


if __name__ == "__main__":
    sys.exit(main())
