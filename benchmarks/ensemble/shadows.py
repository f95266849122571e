"""Do shadows delay primaries? Open-loop load on a real server, with and without shadows in turn.

    python -m benchmarks.ensemble.shadows [--rate 1.5] [--seconds 40] [--rounds 4] [--model MODEL]

Three specialists share one engine. With shadows, every request is answered by a second specialist
too (`fresh_shadow = 1`, a window that never fills); without, `max_shadows = 0`. The server is the
same: the setting is changed by a reload between the phases. The times are those of the client:
first token, and gaps between tokens, of primaries only.

Both sides get requests of the same sizes at the same times, so each is compared with itself; their
words differ from the first on, so that no prompt is cached. The
verdict is about the mean difference of first tokens, with its 95% interval (bootstrap): `shown` if
all of it is below one engine step, for which a primary may have to wait (the p95 gap between tokens
without shadows), `delayed` if all of it is above, otherwise `undecided`: measure longer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

NAMES = ("general", "sql", "prose")
ADMIN = "benchmark-admin-key"
# results of shadows that ran on an engine
RAN = ("agreed", "disagreed", "judged", "unjudged", "preempted")
MIN_PAIRS, RESAMPLES = 20, 2000
# begins each prompt
SERIAL = itertools.count(10**6)
START_S = 120.0
WORDS = ("table", "sum", "river", "stone", "code", "list", "parse", "house", "green", "water")
CONFIG = """
[server]
port = 0
log_level = "warning"
admin_key_file = "{folder}/admins.txt"
[engine]
kv_bytes = "512MB"
[ensemble]
max_shadows = {shadows}
fresh_shadow = 1.0
min_judged = 1000000
"""


def config(folder: Path, model: str, shadows: int) -> str:
    text = CONFIG.format(folder=folder, shadows=shadows)
    for name in NAMES:
        text += f'[[specialists]]\nname = "{name}"\nmodel = "{model}"\nchecks = ["json"]\n'
        if name != NAMES[0]:
            text += f'fallback = "{NAMES[0]}"\n'
    return text


class BenchServer:
    """`coterie serve` in a folder of its own for settings; models and state as usual."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model
        (folder / "admins.txt").write_text(ADMIN + "\n")
        (folder / "admins.txt").chmod(0o600)
        self.configure(0)
        self._log = (folder / "log").open("wb")
        command = [sys.executable, "-m", "coterie", "serve", "--config", str(folder / "c.toml")]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=dict(os.environ)
        )

    def configure(self, shadows: int) -> None:
        (self.folder / "c.toml").write_text(config(self.folder, self.model, shadows))

    async def url(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            text = (self.folder / "log").read_text(errors="replace")
            found = re.search(r"(http://[\d.]+:\d+)", text)
            if found is not None:
                async with httpx.AsyncClient() as client:
                    try:
                        ready = await client.get(found[1] + "/health/ready")
                    except httpx.HTTPError:
                        ready = None
                if ready is not None and ready.status_code == 200:
                    return found[1]
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended:\n{text}")
            await asyncio.sleep(0.2)
        raise SystemExit("the server did not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self._log.close()


@dataclass(slots=True)
class PrimaryTimes:
    """What the client measured, in seconds."""

    # first token by request
    ttft: dict[int, float] = field(default_factory=dict)
    itl: list[float] = field(default_factory=list)
    refused: int = 0

    def add(self, other: PrimaryTimes) -> None:
        before = max(self.ttft, default=-1) + 1
        self.ttft |= {before + number: value for number, value in other.ttft.items()}
        self.itl += other.itl
        self.refused += other.refused


async def one(
    client: httpx.AsyncClient, rng: random.Random, number: int, times: PrimaryTimes
) -> None:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 60)))
    body = {
        "model": rng.choice(NAMES[1:]),
        "messages": [{"role": "user", "content": f"{next(SERIAL)} Write about {words}."}],
        "max_tokens": rng.randint(8, 32),
        "stream": True,
        "temperature": 0,
    }
    began = last = time.perf_counter()
    first = True
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                times.refused += 1
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                delta = json.loads(line[6:])["choices"][0]["delta"]
                if not delta.get("content"):
                    continue
                now = time.perf_counter()
                if first:
                    times.ttft[number] = now - began
                else:
                    times.itl.append(now - last)
                first, last = False, now
    except httpx.HTTPError:
        times.refused += 1


async def phase(url: str, rate: float, seconds: float, seed: int) -> PrimaryTimes:
    """Requests at random times; the same ones for the same seed."""
    rng = random.Random(seed)
    times = PrimaryTimes()
    running: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        due = time.perf_counter()
        end, number = due + seconds, 0
        while due < end:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            own = random.Random(rng.random())
            running.add(asyncio.ensure_future(one(client, own, number, times)))
            number += 1
        await asyncio.gather(*running)
    return times


async def shadow_counts(url: str) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        text = (await client.get(url + "/metrics")).text
    counts: dict[str, float] = {}
    for _, result, value in re.findall(
        r'^coterie_shadows_total\{model_name="(\w+)",result="(\w+)"\} ([\d.]+)', text, re.M
    ):
        counts[result] = counts.get(result, 0) + float(value)
    return counts


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    server = BenchServer(folder, args.model)
    sides = {"without": PrimaryTimes(), "with": PrimaryTimes()}
    pairs: list[tuple[float, float]] = []
    try:
        url = await server.url()
        await phase(url, args.rate, 5.0, 0)
        for number in range(args.rounds):
            # the order changes, so that a slow drift of the machine favours neither side
            found: dict[str, PrimaryTimes] = {}
            for side in ("without", "with") if number % 2 == 0 else ("with", "without"):
                server.configure(0 if side == "without" else 2)
                async with httpx.AsyncClient() as client:
                    headers = {"authorization": f"Bearer {ADMIN}"}
                    reply = await client.post(url + "/v1/config/reload", headers=headers)
                    reply.raise_for_status()
                found[side] = await phase(url, args.rate, args.seconds, number)
                sides[side].add(found[side])
            first, second = found["without"].ttft, found["with"].ttft
            pairs += [(first[key], second[key]) for key in first.keys() & second.keys()]
        shadows = await shadow_counts(url)
    finally:
        server.stop()
    return {
        "rate": args.rate,
        "seconds": args.seconds * args.rounds,
        "shadows": shadows,
        "primaries": {
            side: {
                "ttft": _figures(list(times.ttft.values())),
                "itl": _figures(times.itl),
                "refused": times.refused,
            }
            for side, times in sides.items()
        },
        "delay": delay(pairs, sides["without"].itl, shadows),
    }


def delay(
    pairs: list[tuple[float, float]], gaps: list[float], shadows: dict[str, float]
) -> dict[str, Any]:
    """How much later first tokens come with shadows, and what that shows. `pairs`: seconds of one
    request without and with shadows."""
    differences = [later - sooner for sooner, later in pairs]
    ran = sum(shadows.get(result, 0) for result in RAN)
    if len(differences) < MIN_PAIRS or not ran or not gaps:
        return {"verdict": "nothing shown", "pairs": len(pairs), "shadows": ran}
    rng = random.Random(1)
    means = sorted(fmean(rng.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]
    step = sorted(gaps)[int(0.95 * len(gaps))]
    verdict = "shown" if high < step else "delayed" if low > step else "undecided"
    return {
        "verdict": verdict,
        "pairs": len(pairs),
        "shadows": ran,
        "mean_ms": round(1000 * fmean(differences), 2),
        "low_ms": round(1000 * low, 2),
        "high_ms": round(1000 * high, 2),
        "step_ms": round(1000 * step, 2),
    }


def _figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

    quantiles = {f"p{share}_ms": round(at(share / 100) * 1000, 2) for share in (50, 95, 99)}
    return {"count": len(ordered), **quantiles}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second")
    parser.add_argument("--seconds", type=float, default=40.0, help="of one phase")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--model", default="", help="(default: the default model)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coterie-shadows-") as folder:
        report = asyncio.run(measure(args, Path(folder)))
    for side, kinds in report["primaries"].items():
        for kind in ("ttft", "itl"):
            figures = kinds[kind]
            print(
                f"{side:<8} {kind:<5} {figures['count']:>6}  p50 {figures['p50_ms']:>8} ms  "
                f"p95 {figures['p95_ms']:>8} ms  p99 {figures['p99_ms']:>8} ms"
            )
        print(f"{side:<8} refused {kinds['refused']}")
    print("shadows", report["shadows"])
    found = report["delay"]
    print(f"verdict  {found['verdict']}: ", end="")
    if "mean_ms" in found:
        print(
            f"first tokens come {found['mean_ms']} ms later with shadows, 95% interval "
            f"[{found['low_ms']}, {found['high_ms']}], over {found['pairs']} requests; one engine "
            f"step takes {found['step_ms']} ms"
        )
    else:
        print(f"{found['pairs']} requests, {found['shadows']:.0f} shadows")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))
    return int(found["verdict"] != "shown")


if __name__ == "__main__":
    sys.exit(main())
