"""Eight specialists under open-loop load with deadlines, on a real server of this machine.

    python -m benchmarks.ensemble.load [--minutes 10] [--load 0.8,1.5] [--config FILE] [--json FILE]

1. Alone: each kind of request is sent to an idle server; its median time is its unloaded latency.
2. Capacity: callers in a closed loop, without deadlines, at several numbers of callers. The highest
   rate of answers that came within their (not announced) deadlines is the capacity.
3. Load: requests at random times (Poisson), in the mix of the capacity runs, at a share of the
   capacity. Each announces a deadline to its last token, from 1.5 to 6 times its unloaded latency.
   Who is told to come back waits as told and comes back once, with as much time as before.

Missed is an admitted request whose last byte came after its deadline, at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLACK = (1.5, 6.0)
# (words of the prompt, tokens of the answer)
SHAPES = ((12, 24), (40, 16), (40, 48), (120, 12), (24, 32))
CALLERS = (1, 2, 3, 4, 6, 8)
NAMES = ("code", "sql", "json", "shell", "prose", "math", "chat", "translate")
WORDS = ("table", "sum", "river", "stone", "code", "list", "parse", "house", "green", "water")
# the server closes a connection that is not used for a minute
KEPT_S = 30.0

CONFIG = """
[server]
port = 0
log_level = "warning"
[engine]
kv_bytes = "512MB"
""" + "".join(f'[[specialists]]\nname = "{name}"\n' for name in NAMES)


@dataclass(frozen=True, slots=True)
class Shape:
    specialist: str
    words: int
    max_tokens: int


@dataclass(slots=True)
class Reply:
    status: int
    seconds: float
    retry_after_s: float | None = None
    finish_reason: str = ""
    body: str = ""


class Client:
    """HTTP/1.1 over kept connections; as little work per request as possible."""

    def __init__(self, port: int) -> None:
        self._port = port
        # connections and since when they are not used
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = []

    async def ask(self, shape: Shape, prompt: str, deadline_s: float | None = None) -> Reply:
        body = json.dumps({
            "model": shape.specialist, "prompt": prompt, "max_tokens": shape.max_tokens,
            "ignore_eos": True, "temperature": 0,
        }).encode()  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        )
        head += "content-type: application/json\r\n"
        if deadline_s is not None:
            head += f"x-deadline-ms: {1000 * deadline_s:.0f}\r\n"
        began = time.monotonic()
        reader, writer = await self._connection()
        writer.write(head.encode() + b"\r\n" + body)
        top = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(top.split(" ", 2)[1])
        length = re.search(r"content-length: (\d+)", top)
        text = (await reader.readexactly(int(length[1]))).decode() if length else ""
        seconds = time.monotonic() - began
        self._idle.append((reader, writer, time.monotonic()))
        wait = re.search(r"retry-after-ms: (\d+)", top)
        reason = re.search(r'"finish_reason": ?"(\w+)"', text)
        return Reply(
            status, seconds, int(wait[1]) / 1000 if wait else None, reason[1] if reason else "",
            "" if status == 200 else text,
        )  # fmt: skip

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer, since = self._idle.pop()
            if time.monotonic() - since < KEPT_S:
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)


class LoadRun:
    def __init__(self, client: Client, names: list[str], seed: int) -> None:
        self.client, self.rng = client, random.Random(seed)
        self.shapes = [Shape(name, *shape) for name in names for shape in SHAPES]
        self.alone: dict[Shape, float] = {}
        self._serial = 0

    def prompt(self, shape: Shape) -> str:
        """Different from all others from its first words on."""
        self._serial += 1
        words = (self.rng.choice(WORDS) for _ in range(shape.words - 2))
        return f"{self.rng.randrange(10**6)} {self._serial} " + " ".join(words)

    async def measure_alone(self, rounds: int) -> None:
        times: dict[Shape, list[float]] = {shape: [] for shape in self.shapes}
        for _ in range(rounds + 1):
            for shape in self.shapes:
                reply = await self.client.ask(shape, self.prompt(shape))
                assert reply.status == 200, reply.body
                times[shape].append(reply.seconds)
        # the first round warms up
        self.alone = {shape: statistics.median(some[1:]) for shape, some in times.items()}

    async def closed_loop(self, callers: int, seconds: float) -> dict[str, float]:
        """Answers in time and answers, per second."""
        until = time.monotonic() + seconds
        done: list[bool] = []

        async def call() -> None:
            while time.monotonic() < until:
                shape = self.rng.choice(self.shapes)
                slack = self.rng.uniform(*SLACK)
                reply = await self.client.ask(shape, self.prompt(shape))
                assert reply.status == 200, reply.body
                if time.monotonic() < until:
                    done.append(reply.seconds <= slack * self.alone[shape])

        await asyncio.gather(*(call() for _ in range(callers)))
        return {"in_time": sum(done) / seconds, "answers": len(done) / seconds}

    async def open_loop(self, rate: float, seconds: float) -> LoadTally:
        tally, tasks = LoadTally(), set[asyncio.Task[None]]()
        began = at = time.monotonic()
        while at - began < seconds:
            at += self.rng.expovariate(rate)
            await asyncio.sleep(max(at - time.monotonic(), 0.0))
            shape = self.rng.choice(self.shapes)
            task = asyncio.create_task(self._one(shape, tally))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        tally.seconds = time.monotonic() - began
        await asyncio.gather(*tasks)
        return tally

    async def _one(self, shape: Shape, tally: LoadTally) -> None:
        prompt, deadline_s = self.prompt(shape), self.rng.uniform(*SLACK) * self.alone[shape]
        began = time.monotonic()
        tally.asked[shape.specialist] += 1
        reply = await self.client.ask(shape, prompt, deadline_s)
        if reply.status in (429, 529):
            tally.refused += 1
            tally.offers += '"offer"' in reply.body
            if reply.retry_after_s is None:
                tally.saturated += 1
                return
            tally.waits.append(reply.retry_after_s)
            await asyncio.sleep(reply.retry_after_s)
            reply = await self.client.ask(shape, prompt, deadline_s)
            tally.told += 1
            tally.told_admitted += reply.status == 200
        if reply.status in (429, 529):
            return
        if reply.status != 200:
            tally.failed[f"{reply.status} {reply.body[:200]}"] += 1
            return
        tally.admitted += 1
        is_late = reply.seconds > deadline_s
        tally.missed += is_late
        tally.cut += reply.finish_reason == "timeout"
        tally.used.append(reply.seconds / deadline_s)
        if not is_late:
            tally.in_time[shape.specialist] += 1
        tally.ended.append((began, reply.seconds, is_late))


@dataclass(slots=True)
class LoadTally:
    seconds: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)
    in_time: Counter[str] = field(default_factory=Counter)
    admitted: int = 0
    missed: int = 0
    cut: int = 0
    refused: int = 0
    saturated: int = 0
    offers: int = 0
    told: int = 0
    told_admitted: int = 0
    waits: list[float] = field(default_factory=list)
    # share of the time until the deadline that was used
    used: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    ended: list[tuple[float, float, bool]] = field(default_factory=list)

    def report(self, load: float, capacity: float) -> dict[str, Any]:
        answered = self.in_time.total()
        served = {name: self.in_time[name] / count for name, count in self.asked.items()}
        return {
            "load": load,
            "seconds": round(self.seconds, 1),
            "asked": self.asked.total(),
            "admitted": self.admitted,
            "missed": self.missed,
            "miss_share": round(self.missed / max(self.admitted, 1), 4),
            "refused": self.refused,
            "refused_without_time": self.saturated,
            "refused_with_offer": self.offers,
            "told_to_wait": self.told,
            "told_and_admitted": round(self.told_admitted / max(self.told, 1), 3),
            "wait_p50_s": round(statistics.median(self.waits), 2) if self.waits else 0.0,
            "goodput_rps": round(answered / self.seconds, 3),
            "goodput_of_capacity": round(answered / self.seconds / capacity, 3),
            "deadline_used_p50": round(statistics.median(self.used or [0.0]), 3),
            "served_by_specialist": {name: round(share, 3) for name, share in served.items()},
            "least_served": round(min(served.values()), 3),
            "failed": dict(self.failed),
        }


async def measure(port: int, names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    run = LoadRun(Client(port), names, arguments.seed)
    await run.measure_alone(arguments.rounds)
    alone = [round(seconds, 3) for seconds in run.alone.values()]
    print(f"alone: {min(alone)} to {max(alone)} s, {len(alone)} kinds of requests", flush=True)
    rates = {}
    for callers in CALLERS:
        rates[callers] = await run.closed_loop(callers, arguments.capacity_s)
        print(f"{callers} callers: {rates[callers]}", flush=True)
    capacity = max(rate["in_time"] for rate in rates.values())
    reports = []
    for load in (float(text) for text in arguments.load.split(",")):
        tally = await run.open_loop(load * capacity, arguments.minutes * 60)
        reports.append(tally.report(load, capacity))
        print(json.dumps(reports[-1], indent=1), flush=True)
    return {"capacity_rps": capacity, "closed_loop": rates, "loads": reports}


def start(config: Path) -> tuple[subprocess.Popen[bytes], int, Path]:
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    command = [sys.executable, "-m", "coterie", "serve", "--port", "0", "--config", str(config)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ)
    until = time.monotonic() + 180
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"(?:ready|listening)[^\n]*http://[^:\s]+:(\d+)", log.read_text())
        if found and _is_ready(int(found[1])):
            return process, int(found[1]), log
        time.sleep(0.2)
    process.kill()
    raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")


def _is_ready(port: int) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each load")
    parser.add_argument("--load", default="0.8,1.5", help="shares of the capacity")
    parser.add_argument("--config", default="", help="settings with the specialists")
    parser.add_argument("--capacity-s", type=float, default=20.0, help="of each closed loop")
    parser.add_argument("--rounds", type=int, default=3, help="of each request alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    config = Path(arguments.config or tempfile.mkstemp(suffix=".toml")[1])
    if not arguments.config:
        config.write_text(CONFIG)
    names = [item["name"] for item in tomllib.loads(config.read_text())["specialists"]]
    process, port, log = start(config)
    try:
        report = asyncio.run(measure(port, names, arguments))
    finally:
        process.terminate()
        process.wait(60)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))
    print(log.read_text()[-500:] if process.returncode else "the server ended cleanly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
