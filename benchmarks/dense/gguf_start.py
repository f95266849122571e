"""What a GGUF file takes to start: memory and time to the first token, Coterie beside llama.cpp.

    python -m benchmarks.dense.gguf_start [MODEL ...] [--mixes Q4_K_M,Q6_K] [--rounds 3]
        [--threads 2] [--kv-bytes 256MB] [--json FILE]

MODEL: see `benchmarks.peers.quantised_files`. Seconds count from the start of the process to its
first token: Coterie is `coterie serve` with its kernels compiled before and the answer comes over
HTTP, llama.cpp runs in its own Python process. First start: a new home folder, the file not in the
system's cache. Second start: the same home, the file in the cache.

Memory is the worker's after that token, mapped pages of the file included, and its peak; of the
gateway apart. The worker of a model of about 1 MB with the same KV is what a worker takes without a
file, and each file's goal is that plus 1.1 times the file, at the peak 1.15 times. The time's goal
is 3 s, plus the file at the disk's speed where it was not in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.dense.cpu import System, worker
from benchmarks.limits import disk_bandwidth
from benchmarks.peers.protocol import median, prompt_ids
from benchmarks.peers.quantised_files import MIXES, MODELS, mixed
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import own_home

FIRST, SECOND = "first", "second"
OURS, PEER = "coterie", "llama.cpp"
PROMPT_TOKENS = 8
RESIDENT_SHARE, PEAK_SHARE, START_S = 1.1, 1.15, 3.0
# a server that takes longer is given up
MOST_S = 300.0
_DISK_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Started:
    first_token_s: float
    # bytes, of the process that has the weights
    resident: int
    peak: int
    gateway: int = 0


@dataclass
class FileStarts:
    file_bytes: int
    disk_bytes_s: float
    # "coterie first" and so on -> every round's
    starts: dict[str, list[Started]] = field(default_factory=dict)

    def median_of(self, key: str, what: str) -> float:
        return median([getattr(started, what) for started in self.starts[key]])


def memory_of(pid: int) -> tuple[int, int]:
    """Resident bytes now and at their peak."""
    text = Path(f"/proc/{pid}/status").read_text()
    now, peak = (re.search(rf"^{key}:\s+(\d+) kB", text, re.M) for key in ("VmRSS", "VmHWM"))
    assert now and peak, text
    return 1024 * int(now[1]), 1024 * int(peak[1])


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def start_coterie(path: Path, home: Path, threads: int, kv_bytes: str) -> Started:
    begin = time.perf_counter()
    with _serving(path, home, threads, kv_bytes) as (process, url):
        _first_token(url, begin)
        seconds = time.perf_counter() - begin
        children = psutil.Process(process.pid).children()
        pid = next(one.pid for one in children if "coterie.workers" in " ".join(one.cmdline()))
        return Started(seconds, *memory_of(pid), gateway=memory_of(process.pid)[0])


@contextmanager
def _serving(
    path: Path, home: Path, threads: int, kv_bytes: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, "-m", "coterie", "serve", str(path), "--name", "m", "--port", "0"]
    command += ["--threads", str(threads), "--kv-bytes", kv_bytes]
    log_path = home / "log"
    with log_path.open("wb") as log:
        # bytecode is kept, as an installed package's is: to compile 900 modules takes a second
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        places = {**inherited, "COTERIE_HOME": str(home)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=places)
    try:
        deadline = time.monotonic() + MOST_S
        while True:
            text = log_path.read_text(errors="replace")
            found = re.search(r"listening on (http://\S+?),", text)
            if found:
                break
            assert process.poll() is None and time.monotonic() < deadline, text[-3000:]
            time.sleep(0.01)
        yield process, found[1]
    finally:
        process.terminate()
        process.wait(60)


def _first_token(url: str, begin: float) -> None:
    body = {"model": "m", "prompt": "aaaaaaaa", "max_tokens": 1, "temperature": 0}
    while True:
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=MOST_S)
        if reply.status_code == 200:
            return
        # while the worker starts
        assert reply.status_code == 503 and time.perf_counter() - begin < MOST_S, reply.text
        time.sleep(0.02)


def start_llamacpp(path: Path, threads: int) -> Started:
    system = System(PEER, "", worker("llamacpp", str(path), "1", str(threads)))
    begin = time.perf_counter()
    system.open()
    try:
        ids = prompt_ids(PROMPT_TOKENS, 0)
        answer = system.request({"op": "greedy", "prompts": [ids], "tokens": 1})
        seconds = time.perf_counter() - begin
        assert answer is not None and system.process is not None, system.problem
        return Started(seconds, *memory_of(system.process.pid))
    finally:
        system.stop()


def measure_file(path: Path, rounds: int, threads: int, kv_bytes: str) -> FileStarts:
    drop_from_cache(path)
    disk = disk_bandwidth([path], _DISK_CHUNK, total_bytes=min(1 << 28, path.stat().st_size))
    found = FileStarts(path.stat().st_size, disk)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
            home = own_home(Path(folder), shared=("kernels",))
            for turn in (FIRST, SECOND):
                for name in (OURS, PEER):
                    if turn == FIRST:
                        drop_from_cache(path)
                    if name == OURS:
                        started = start_coterie(path, home, threads, kv_bytes)
                    else:
                        started = start_llamacpp(path, threads)
                    found.starts.setdefault(f"{name} {turn}", []).append(started)
                    print(f"{path.name} {name} {turn}: {started}", file=sys.stderr)
    return found


def table(files: dict[str, FileStarts], bare: Started) -> str:
    lines = [
        "| file | MB | worker resident, MB (goal) | peak, MB (goal) | llama.cpp resident, peak | "
        "first token, first start, s (goal) | second, s | llama.cpp first, second, s |",
        "|---" * 8 + "|",
    ]
    for name, file in files.items():
        size = file.file_bytes
        cells = [name, _mb(size)]
        for what, base, share in (
            ("resident", bare.resident, RESIDENT_SHARE),
            ("peak", bare.peak, PEAK_SHARE),
        ):
            # the worse of the two starts
            taken = max(file.median_of(f"{OURS} {turn}", what) for turn in (FIRST, SECOND))
            cells.append(f"{_mb(taken)} ({_mb(base + share * size)})")
        theirs = [file.median_of(f"{PEER} {SECOND}", what) for what in ("resident", "peak")]
        cells.append(", ".join(map(_mb, theirs)))
        goal = START_S + size / file.disk_bytes_s
        seconds = {key: file.median_of(key, "first_token_s") for key in file.starts}
        cells.append(f"{seconds[f'{OURS} {FIRST}']:.1f} ({goal:.1f})")
        cells.append(f"{seconds[f'{OURS} {SECOND}']:.1f}")
        cells.append(", ".join(f"{seconds[f'{PEER} {turn}']:.1f}" for turn in (FIRST, SECOND)))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(
        f"\na worker without a file: {_mb(bare.resident)} MB, peak {_mb(bare.peak)}, first token "
        f"after {bare.first_token_s:.1f} s; gateway {_mb(bare.gateway)} MB"
    )
    return "\n".join(lines)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--mixes", default=",".join(MIXES[:4]))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-bytes", default="256MB")
    parser.add_argument("--json", type=Path, help="write every figure there")
    args = parser.parse_args()
    tiny = tiny_checkpoint("llama", max_position_embeddings=4096)
    with tempfile.TemporaryDirectory(prefix="coterie-bench-") as folder:
        home = own_home(Path(folder), shared=("kernels",))
        # the second: whatever is made once on a machine is there
        for _ in range(2):
            bare = start_coterie(tiny, home, args.threads, args.kv_bytes)
    print(f"without a file: {bare}", file=sys.stderr)
    files: dict[str, FileStarts] = {}
    record: dict[str, Any] = {"kv_bytes": args.kv_bytes, "threads": args.threads}
    for model in args.models:
        for mix in args.mixes.split(","):
            path = mixed(model, mix, args.threads)
            name = f"{Path(model).stem} {mix}"
            files[name] = measure_file(path, args.rounds, args.threads, args.kv_bytes)
            if args.json:
                measured = {key: asdict(file) for key, file in files.items()}
                record |= {"bare": asdict(bare), "files": measured}
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(files, bare))


if __name__ == "__main__":
    main()
