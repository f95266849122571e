"""The server of `benchmarks.serving.soak`, and what its processes take of memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving.soak_clients import ADMIN_KEY, KEYS
from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.models.tiny_encoder import tiny_encoder
from tests.helpers.serving.server_process import own_home

START_S = 120.0
SETTINGS = """
[server]
api_key_file = "{folder}/keys"
admin_key_file = "{folder}/admins"
allow_unsigned = true
grpc_port = 0
[engine]
kv_bytes = "48MB"
threads = 1
max_sequences = 8
max_queue = 16
[adapters]
device_bytes = "8MB"
[[tenants]]
name = "second"
max_running = {max_running}
[[tenants]]
name = "metered"
requests_per_minute = 30
[[specialists]]
name = "twin"
model = "{models[twin]}"
dtype = "fp32"
replicas = 2
[[specialists]]
name = "left"
model = "{models[left]}"
[[specialists]]
name = "right"
model = "{models[left]}"
weight = 2.0
[[specialists]]
name = "moe"
model = "{models[moe]}"
context = 1024
[specialists.moe]
strategy = "lru"
cache_capacity = 4
host_budget = "0"
[[specialists]]
kind = "encoder"
name = "encoder"
model = "{models[encoder]}"
"""


@dataclass(slots=True)
class SoakServer:
    folder: Path
    log_path: Path
    models: dict[str, Path]
    # PEFT directories, the versions of one expert
    experts: list[Path]
    process: subprocess.Popen[bytes]
    url: str = ""
    grpc_target: str = ""
    names: dict[int, str] = field(default_factory=dict)
    # bytes of the log
    num_read: int = 0

    def workers(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            return [one for one in children if "coterie.workers" in " ".join(one.cmdline())]
        return []

    def replicas(self) -> dict[int, str]:
        """Names by process id, of all workers that have been."""
        with self.log_path.open("rb") as log:
            log.seek(self.num_read)
            read = log.read()
        whole = read[: read.rfind(b"\n") + 1]
        self.num_read += len(whole)
        for line in whole.splitlines():
            if b'"event":"worker_ready"' in line or b'"event":"worker_restarted"' in line:
                entry = json.loads(line)
                self.names[entry["pid"]] = entry["replica"]
        return self.names


def write_settings(folder: Path, models: dict[str, Path], max_running: int) -> None:
    text = SETTINGS.format(folder=folder, models=models, max_running=max_running)
    (folder / "coterie.toml").write_text(text)


@contextmanager
def serving(log_path: Path) -> Iterator[SoakServer]:
    folder = temporary_folder("coterie-soak-")
    base = tiny_checkpoint("llama", seed=1, max_position_embeddings=2048)
    # a server leaves its heatmap beside a model with experts
    shutil.copytree(tiny_checkpoint("qwen3_moe"), folder / "moe")
    models = {"twin": tiny_checkpoint("llama", max_position_embeddings=8192), "left": base,
              "moe": folder / "moe", "encoder": tiny_encoder(folder / "encoder")}  # fmt: skip
    experts = [make_adapter(base, "lora", seed) for seed in (1, 2)]
    write_settings(folder, models, 4)
    (folder / "keys").write_text(f"{KEYS[0]}\n{KEYS[1]} tenant=second\n{KEYS[2]} tenant=metered\n")
    (folder / "admins").write_text(f"{ADMIN_KEY}\n")
    for name in ("keys", "admins"):
        (folder / name).chmod(0o600)
    (folder / "tmp").mkdir()
    places = {"COTERIE_HOME": str(own_home(folder / "home")), "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-m", "coterie", "serve", "--port", "0"]
    command += ["--config", str(folder / "coterie.toml")]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **places})
    server = SoakServer(folder, log_path, models, experts, process)
    try:
        _until_ready(server)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _until_ready(server: SoakServer) -> None:
    deadline = time.monotonic() + START_S
    while True:
        text = server.log_path.read_text(errors="replace")
        assert server.process.poll() is None and time.monotonic() < deadline, text[-3000:]
        found = re.search(r"listening on (http://\S+?),", text), re.search(r"gRPC on (\S+)", text)
        if found[0] and found[1]:
            server.url, server.grpc_target = found[0][1], found[1][1].rstrip(",")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{server.url}/health/ready").status_code == 200:
                    return
        time.sleep(0.2)


def pss_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.M)
    return round(int(found[1]) * 1024 / 1e6, 2) if found else 0.0


def sizes_of(folder: Path) -> list[int]:
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found.append(os.lstat(os.path.join(place, name)).st_size)
    return found


def memory_of(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """MB by process name. The gateway: at the start, at half, at the end, and what it grows by in
    an hour of the second half. Workers are younger: `start` and `end` are of lives of the first
    and the second half at the same age, `slope` is within the lives of the second half."""
    found: dict[str, dict[str, Any]] = {}
    names = sorted({name for sample in samples for name in sample["processes"]})
    half_s = samples[-1]["at_s"] / 2 if samples else 0.0
    for name in names:
        rows = [(s["at_s"], s["processes"][name]) for s in samples if name in s["processes"]]
        later = [(at, row) for at, row in rows if at >= half_s]
        if name == "gateway":
            few = max(1, len(rows) // 20)
            middle = len(rows) // 2
            parts = {"start": rows[:few], "half": rows[middle : middle + few], "end": rows[-few:]}
        else:
            young = [(at, row) for at, row in rows if 20 <= row["age_s"] <= 60]
            parts = {
                "start": [item for item in young if item[0] < half_s],
                "end": [item for item in young if item[0] >= half_s],
            }
        summary: dict[str, Any] = {}
        for key in ("mb", "files", "threads"):
            for part, chosen in parts.items():
                if chosen:
                    value = statistics.median(row[key] for _, row in chosen)
                    summary[part if key == "mb" else f"{key}_{part}"] = round(value, 1)
        summary["slope_per_hour"] = slope_per_hour(later)
        summary["lives"] = len({row["pid"] for _, row in rows})
        found[name] = summary
    return found


def slope_per_hour(rows: list[tuple[float, dict[str, Any]]]) -> float | None:
    """MB an hour within lives, from their first minute on."""
    above = below = 0.0
    for pid in {row["pid"] for _, row in rows}:
        points = [(r["age_s"], r["mb"]) for _, r in rows if r["pid"] == pid and r["age_s"] > 60]
        if len(points) > 2:
            age, mb = (statistics.fmean(column) for column in zip(*points, strict=True))
            above += sum((x - age) * (y - mb) for x, y in points)
            below += sum((x - age) ** 2 for x, _ in points)
    return round(3600 * above / below, 1) if below else None
