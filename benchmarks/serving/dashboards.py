"""CPU time of the gateway with open dashboards, and without any, under the same load.

    python -m benchmarks.serving.dashboards [--dashboards 3] [--rate 2] [--seconds 15] [--rounds 6]

A real server with the eight specialists of examples/eight.toml answers `--rate` requests a second.
Rounds with and without dashboards take turns. A dashboard is the operator's stream, read in this
process as the page reads it: what the page does with it is the browser's work, not the gateway's.
Goal: three of them take under 2% of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.ensemble.overhead import PROMPTS
from coterie.weights.home import home

ROOT = Path(__file__).resolve().parents[2]
GOAL_SHARE = 0.02
# before the first round: imports, caches, adapters
WARM_UP_S = 15.0


def start(folder: Path, shared_home: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The server and its address."""
    own = folder / "home"
    own.mkdir()
    for shared in ("models", "kernels", "routing"):
        if (shared_home / shared).is_dir():
            (own / shared).symlink_to(shared_home / shared)
    env = {**os.environ, "COTERIE_HOME": str(own), "PYTHONPATH": str(ROOT)}
    coterie = [sys.executable, "-m", "coterie"]
    install = [*coterie, "expert", "install", "--shipped"]
    subprocess.run(install, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*coterie, "serve", "--config", str(ROOT / "examples" / "eight.toml"), "--port", "0"],
            env=env, cwd=ROOT, stdout=output, stderr=output,
        )  # fmt: skip
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"listening on (http://\S+?),", log.read_text(errors="replace"))
        if found and _is_ready(found[1]):
            return process, found[1]
        time.sleep(0.2)
    process.kill()
    raise SystemExit(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


async def follow(client: httpx.AsyncClient, counts: list[int]) -> None:
    """One dashboard until it is cancelled; adds the bytes it got to `counts`."""
    async with client.stream("GET", "/v1/dashboard/events") as stream:
        stream.raise_for_status()
        counts.append(0)
        at = len(counts) - 1
        async for part in stream.aiter_raw():
            counts[at] += len(part)


async def ask(client: httpx.AsyncClient, number: int) -> None:
    message = {"role": "user", "content": f"{PROMPTS[number % len(PROMPTS)]} Case {number}."}
    body = {"model": "auto", "max_tokens": 16, "temperature": 0, "messages": [message]}
    reply = await client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()


async def one_round(
    client: httpx.AsyncClient, gateway: psutil.Process, dashboards: int, rate: float, seconds: float
) -> dict[str, float]:
    counts: list[int] = []
    streams = [asyncio.ensure_future(follow(client, counts)) for _ in range(dashboards)]
    # the first whole snapshot is not what an open dashboard costs
    await asyncio.sleep(2.0)
    got = sum(counts)
    used = sum(gateway.cpu_times()[:2])
    begun = time.monotonic()
    asked: list[asyncio.Future[None]] = []
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(begun + number / rate - time.monotonic(), 0))
        asked.append(asyncio.ensure_future(ask(client, number)))
    await asyncio.gather(*asked)
    await asyncio.sleep(max(begun + seconds - time.monotonic(), 0))
    wall_s = time.monotonic() - begun
    share = (sum(gateway.cpu_times()[:2]) - used) / wall_s
    received = sum(counts) - got
    for stream in streams:
        stream.cancel()
    for ended in await asyncio.gather(*streams, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended
    per_s = received / wall_s / dashboards if dashboards else 0.0
    return {"cpu_share": share, "bytes_per_s": per_s, "requests_per_s": len(asked) / wall_s}


async def measure(arguments: argparse.Namespace, process: Any, url: str) -> dict[str, Any]:
    gateway = psutil.Process(process.pid)
    rounds: dict[int, list[dict[str, float]]] = {0: [], arguments.dashboards: []}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await one_round(client, gateway, arguments.dashboards, arguments.rate, WARM_UP_S)
        for number in range(arguments.rounds):
            # each goes first as often as the other
            for dashboards in sorted(rounds, reverse=number % 2 == 1):
                found = await one_round(
                    client, gateway, dashboards, arguments.rate, arguments.seconds
                )
                rounds[dashboards].append(found)
                print(f"{dashboards} dashboards: {found['cpu_share']:.2%} of a core", flush=True)
    without, looked_at = rounds.values()
    pairs = [b["cpu_share"] - a["cpu_share"] for a, b in zip(without, looked_at, strict=True)]
    return {
        "dashboards": arguments.dashboards,
        "requests_per_s": round(statistics.median(r["requests_per_s"] for r in looked_at), 2),
        "cpu_without": round(statistics.median(r["cpu_share"] for r in without), 4),
        "cpu_with": round(statistics.median(r["cpu_share"] for r in looked_at), 4),
        "cpu_of_dashboards": round(statistics.median(pairs), 4),
        "lowest_and_highest": [round(min(pairs), 4), round(max(pairs), 4)],
        "goal": GOAL_SHARE,
        "bytes_per_s_each": round(statistics.median(r["bytes_per_s"] for r in looked_at)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dashboards", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=6, help="with, and as many without")
    parser.add_argument("--home", type=Path, default=home(), help="where models are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(Path(folder), arguments.home)
        try:
            result = asyncio.run(measure(arguments, process, url))
        finally:
            process.terminate()
            process.wait(60)
    for name, value in result.items():
        print(f"{name:22} {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
