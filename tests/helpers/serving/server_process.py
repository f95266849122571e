"""A real server process for tests: `python -m coterie serve` on a free port, logs in a file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from coterie.weights.home import home
from tests.helpers.cpu_speed import lateness, slowness
from tests.helpers.folders import temporary_folder

START_S = 90.0
# the longest that a probe may take on a machine with other work
MAX_PROBE_S = 2.0
# of the two tenants of the fixture `strict_server`
KEYS = ("key-of-the-first-tenant", "key-of-the-second-tenant")


class Served:
    """One running server. `wait_ready=False` returns as soon as it listens."""

    def __init__(self, *arguments: str, wait_ready: bool = True, **environment: str) -> None:
        # workers that the test killed
        self.expected_deaths = 0
        self._checked = False
        self.folder = temporary_folder("coterie-served-")
        self.log_path, self.out_path = self.folder / "log", self.folder / "out"
        # a tiny model is quickest on one thread, and leaves the other cores to the test
        command = [sys.executable, "-m", "coterie", "serve", "--port", "0", "--threads", "1"]
        command += arguments
        with self.log_path.open("wb") as log, self.out_path.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=log, env={**os.environ, **environment}
            )
        try:
            self.url = self._wait_for(r"listening on (https?://\S+?),")
            if wait_ready:
                self.wait_ready()
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log())
            if found:
                return found[1]
            assert self.process.poll() is None, f"the server ended: {self.log()}"
            time.sleep(0.05)
        raise AssertionError(f"not listening after {START_S} s: {self.log()}")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.get("/health/ready").status == 200:
                return
            assert self.process.poll() is None, f"the server ended: {self.log()}"
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_S} s: {self.log()}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status. Fails where a worker died or a value was lost that no test asked for:
        continuation after a crash is not to hide a fault."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        if not self._checked:
            self._checked = True
            found = re.findall(r'^.*"event":"worker_died".*$', self.log(), re.M)
            assert len(found) == self.expected_deaths, (
                f"{len(found)} workers died and {self.expected_deaths} were to: {self.log()}"
            )
            assert '"event":"value_refused"' not in self.log(), self.log()
        return code

    def kill_workers(self) -> int:
        """kill -9 of every worker that runs; how many."""
        children = psutil.Process(self.process.pid).children()
        workers = [one for one in children if "coterie.workers.child" in one.cmdline()]
        for worker in workers:
            worker.kill()
        self.expected_deaths += len(workers)
        return len(workers)

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, None, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """`body`: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, raw, **{"content_type": "application/json", **headers})

    def send(self, method: str, path: str, body: bytes | None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, body, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Reply(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, dict(error.headers), error.read())

    def metric(self, name: str, key: str = "", **labels: str) -> float:
        """The sum of a metric's samples, of those with these labels. `key`: of a caller."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        text = self.get("/metrics", **headers).body.decode()
        found = re.findall(rf"^{re.escape(name)}(?:\{{(.*?)\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for given, value in found if all(one in given for one in wanted))


def own_home(path: Path, *, shared: tuple[str, ...] = ("kernels", "routing")) -> Path:
    """A home of its own for what a server installs, with the compiled kernels and the learnt probes
    of the common one."""
    path.mkdir(parents=True, exist_ok=True)
    for name in shared:
        common = home() / name
        common.mkdir(parents=True, exist_ok=True)
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).symlink_to(common)
    return path


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.body = status, body
        self.headers = {name.lower(): value for name, value in headers.items()}

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def chat(content: str = "hello there", **fields: Any) -> dict[str, Any]:
    """A small chat body, greedy so that its answer is always the same."""
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": messages} | fields


def frames(raw: bytes) -> list[tuple[str | None, Any]]:
    """(event name, data) of every frame; data is parsed where it is JSON."""
    found: list[tuple[str | None, Any]] = []
    for block in raw.decode().split("\n\n"):
        name, data = None, None
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        if data is not None:
            found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


class MachineLag:
    """How late a thread of this machine comes that asked to sleep for a moment, at worst."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MachineLag:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        nap_s, begun = 0.01, time.monotonic()
        while not self._ended.wait(nap_s):
            now = time.monotonic()
            self.worst_s, begun = max(self.worst_s, now - begun - nap_s), now

    def allowed_s(self, limit_s: float) -> float:
        """The limit on cores of the usual speed, or more where the machine itself is late: an
        answer needs it many times, and what computes gets its part of a core late."""
        return max(limit_s * slowness(), limit_s / 4 * lateness(), 16 * self.worst_s)


class Probe:
    """Asks for health all the time; `worst_s` is the longest answer."""

    def __init__(self, served: Served) -> None:
        self.served, self.worst_s, self.num_answers = served, 0.0, 0
        self.lag = MachineLag()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Probe:
        self.lag.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.lag.__exit__()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            begun = time.monotonic()
            assert self.served.get("/health/live").status == 200
            self.worst_s = max(self.worst_s, time.monotonic() - begun)
            self.num_answers += 1
