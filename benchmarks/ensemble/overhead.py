"""What the gateway itself costs: latency over an engine that answers at once, beside LiteLLM.

    python -m benchmarks.ensemble.overhead [--rate 300] [--seconds 20] [--rounds 3]
                                           [--litellm VENV]

Each server has one core of its own while it is measured (the other one is stopped), the load
generator has the other core. Requests arrive at random (Poisson) at the given rate. Coterie parses,
routes by content among the eight specialists of examples/eight.toml, tokenises, admits, stamps a
receipt and keeps it, validates the answer. "To the engine" is the part up to the engine: parse,
route, tokenise, admit, stamp. LiteLLM's proxy runs with `mock_response`, which is its own way to
answer without a model; it routes by name alone. VENV is a virtual environment with
`litellm[proxy]`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ensemble.open_loop import LoadResult, post, run

ROOT = Path(__file__).resolve().parents[2]
GOAL_P50_MS, GOAL_P99_MS = 2.0, 6.0
# a rate is sustained if the slowest answers stay below this, and all come
SUSTAINED_P99_MS = 500.0
RATES = (300.0, 250.0, 200.0, 150.0, 125.0, 100.0, 75.0, 50.0, 25.0)
KEY = "sk-benchmark"
PROMPTS = (
    "How many customers placed an order in March 2024? The table is orders(id, customer, day).",
    "Write a commit message for this change: the parser now accepts empty lines at the end.",
    "Is this review positive or negative? The battery lasted two days and the screen is bright.",
    "Extract name, age and city as JSON: Maria Lopez, 34, has lived in Valencia since 2011.",
    "Make a URL slug of this title: Ten Things I Learned While Building a Compiler in Rust",
    "What does the caller want? I was charged twice and would like my money back, please.",
    "Convert to ISO 8601: the fourth of July 2021, half past three in the afternoon.",
    "Explain in two sentences why the sky is blue during the day and red in the evening.",
    "Translate into German: The train to the airport leaves every twenty minutes.",
    "def median(values):\n    values.sort()\n    return values[len(values) / 2]\n\nWhat is wrong?",
)
NUM_PROMPTS = 10_000
LITELLM_CONFIG = """\
model_list:
  - model_name: auto
    litellm_params:
      model: openai/null
      api_key: none
      mock_response: It is so.
general_settings:
  master_key: {key}
litellm_settings:
  telemetry: false
"""


@dataclass(slots=True)
class MeasuredServer:
    """A server process on its own core."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    # seconds from arrival to submission, 8 bytes each; None = it does not tell
    times: Path | None = None
    rounds: list[dict[str, float]] = field(default_factory=list)

    def pause(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is not None:
            return
        self.resume()
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def submit_s(self, start: int) -> list[float]:
        """The times that were appended since `start`."""
        if self.times is None:
            return []
        data = self.times.read_bytes()[8 * start :]
        return sorted(struct.unpack(f"<{len(data) // 8}d", data))

    def cpu_s(self) -> float:
        parent = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
        return sum(item.user + item.system for item in times)


def body_of(prompt: str) -> bytes:
    message = {"role": "user", "content": prompt}
    return json.dumps({"model": "auto", "max_tokens": 16, "messages": [message]}).encode()


def requests() -> list[bytes]:
    """None is sent twice in a round: what is remembered of a whole prompt would not help."""
    prompts = [f"{PROMPTS[n % len(PROMPTS)]} Case {n}." for n in range(NUM_PROMPTS)]
    return [post("/v1/chat/completions", body_of(prompt), KEY) for prompt in prompts]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def started(
    name: str, command: Sequence[str], port: int, health: str, env: dict[str, str], log: Path
) -> MeasuredServer:
    core = str(min(os.sched_getaffinity(0)))
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", core, *command],
            stdout=output, stderr=output, env=env, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
    server = MeasuredServer(name, process, port)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{health}", timeout=5):
                warm_up(port)
                return server
        except OSError:
            time.sleep(0.5)
    server.stop()
    raise SystemExit(f"{name} did not start: {log.read_text(errors='replace')[-2000:]}")


def warm_up(port: int, count: int = 30) -> None:
    """The first requests import modules and fill caches."""
    for number in range(count):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            body_of(PROMPTS[number % len(PROMPTS)]),
            {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()


def start_coterie(folder: Path, arguments: argparse.Namespace) -> MeasuredServer:
    home = folder / "home"
    home.mkdir()
    for shared in ("models", "kernels", "routing"):
        source = Path(arguments.home) / shared
        if source.is_dir():
            (home / shared).symlink_to(source)
    times = folder / "times"
    env = {**os.environ, "COTERIE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    env["NULL_ENGINE_TIMES"] = str(times)
    install = [sys.executable, "-m", "coterie", "expert", "install", "--shipped"]
    subprocess.run(install, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder / "keys.txt").write_text(f"{KEY}\n")
    port = free_port()
    command = [
        sys.executable, "-m", "benchmarks.ensemble.null_engine", "serve",
        "--config", arguments.config, "--port", str(port),
        "--api-key-file", str(folder / "keys.txt"), *arguments.serve,
    ]  # fmt: skip
    server = started("coterie", command, port, "/health/ready", env, folder / "coterie.log")
    server.times = times
    return server


def start_litellm(folder: Path, venv: Path) -> MeasuredServer:
    config = folder / "litellm.yaml"
    config.write_text(LITELLM_CONFIG.format(key=KEY))
    port = free_port()
    env = {**os.environ, "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}
    env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    env.pop("PYTHONPATH", None)
    command = [
        str(venv / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1",
        "--port", str(port), "--num_workers", "1",
    ]  # fmt: skip
    return started("litellm", command, port, "/health/liveliness", env, folder / "litellm.log")


def measured(server: MeasuredServer, rate: float, seconds: float, seed: int) -> dict[str, float]:
    server.resume()
    run(server.port, requests(), min(rate, 50), 1.0, seed + 1000)
    before, start = server.cpu_s(), len(server.submit_s(0))
    result = run(server.port, requests(), rate, seconds, seed)
    cpu_s = server.cpu_s() - before
    server.pause()
    wrong = sum(count for status, count in result.statuses.items() if status != 200)
    if wrong:
        raise SystemExit(f"{server.name}: {wrong} answers were not 200: {dict(result.statuses)}")
    found = figures(result, rate, cpu_s)
    for name, share in (("submit_p50_ms", 0.5), ("submit_p99_ms", 0.99)):
        times = server.submit_s(start)
        if times:
            found[name] = round(1e3 * times[int(share * len(times))], 3)
    return found


def figures(result: LoadResult, rate: float, cpu_s: float) -> dict[str, float]:
    return {
        "rate": rate,
        "answered_per_s": round(result.rate, 1),
        "p50_ms": round(result.percentile_ms(0.50), 3),
        "p95_ms": round(result.percentile_ms(0.95), 3),
        "p99_ms": round(result.percentile_ms(0.99), 3),
        "max_ms": round(result.percentile_ms(1.0), 3),
        "cpu_ms_per_request": round(1e3 * cpu_s / max(len(result.latencies_s), 1), 3),
        "unanswered": result.unanswered,
    }


def sustained_rate(server: MeasuredServer, highest: float) -> float:
    """The highest rate at which the server answers everything in time."""
    for rate in (highest, *(item for item in RATES if item < highest)):
        found = measured(server, rate, 5.0, seed=1)
        if found["p99_ms"] < SUSTAINED_P99_MS and not found["unanswered"]:
            return rate
    return RATES[-1]


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(item[name] for item in rounds), 3) for name in rounds[0]}


def table(servers: Sequence[MeasuredServer]) -> str:
    lines = [
        "| server | requests/s | p50 ms | p95 ms | p99 ms | to the engine p50 ms | p99 ms "
        "| CPU ms per request |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for server in servers:
        found = medians(server.rounds)
        lines.append(
            f"| {server.name} | {found['answered_per_s']:.0f} | {found['p50_ms']:.2f} | "
            f"{found['p95_ms']:.2f} | {found['p99_ms']:.2f} | {found.get('submit_p50_ms', '')} | "
            f"{found.get('submit_p99_ms', '')} | {found['cpu_ms_per_request']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litellm", type=Path, metavar="VENV")
    parser.add_argument("--config", default=str(ROOT / "examples" / "eight.toml"))
    parser.add_argument("--home", default=os.environ.get("COTERIE_HOME", ""))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further flags")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="coterie-overhead-") as name:
        folder = Path(name)
        servers = [start_coterie(folder, arguments)]
        try:
            servers[0].pause()
            if arguments.litellm is not None:
                servers.append(start_litellm(folder, arguments.litellm))
                servers[1].pause()
            os.sched_setaffinity(0, {cores[-1]})
            compare(servers, arguments)
        finally:
            for server in servers:
                server.stop()
    print(table(servers))
    report: dict[str, Any] = {server.name: medians(server.rounds) for server in servers}
    report |= {"rounds": {server.name: server.rounds for server in servers}}
    report |= {"goal_p50_ms": GOAL_P50_MS, "goal_p99_ms": GOAL_P99_MS}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def compare(servers: Sequence[MeasuredServer], arguments: argparse.Namespace) -> None:
    rates = [sustained_rate(server, arguments.rate) for server in servers]
    for number in range(arguments.rounds):
        for server, rate in zip(servers, rates, strict=True):
            found = measured(server, rate, arguments.seconds, seed=number)
            server.rounds.append(found)
            print(f"round {number + 1}, {server.name}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
