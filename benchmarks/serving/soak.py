"""A soak: one server, clients of every kind, for hours, while its workers are killed.

    python -m benchmarks.serving.soak --minutes 120 --json FILE [--log FILE] [--load 0.6]

A server process of its own serves tiny models: `twin` on two replicas, `left` and `right` on one
engine with experts, `moe` with a sixth of its experts in memory, and an encoder. Every answer is
held to the one that the quiet server gave at the start. A random worker is killed every minute
(`--kill-every`); every five minutes (`--reload-every`) the settings are reloaded and the versions
of an expert installed, promoted, rolled back and removed. Think time keeps server and clients
together at `--load` cores. The JSON file is written every minute.

Exit code 1 if an answer was lost, different or failed, if anything is left running or open, or if
the gateway grew by 5% and 10 MB in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving import soak_clients as kinds
from benchmarks.serving.soak_clients import (
    ADMIN_KEY,
    EXPERT,
    GENERATORS,
    KEYS,
    RECEIPT,
    VERSIONS,
    SoakCase,
    SoakClients,
    chat,
    native,
)  # fmt: skip
from benchmarks.serving.soak_server import (
    SoakServer,
    memory_of,
    pss_mb,
    serving,
    sizes_of,
    write_settings,
)  # fmt: skip

END_S = 120.0
SAMPLE_EVERY_S, WRITE_EVERY_S = 10.0, 60.0
MAX_TRIES, MAX_FAILURES = 30, 50
# as many requests at once as do not fit in one queue
BURST, BURST_EVERY_S = 40, 60.0
# streams that run when a worker is killed, two of each model
IN_A_KILL, KILL_AFTER_S = "in a kill", (0.05, 0.6)
# seconds between two requests of a client at the start; --load sets it from then on
THINK_S = {"batch": 60.0, "metered": 4.0, "slow": 8.0, "job": 3.0}


def cases() -> list[SoakCase]:
    found: list[SoakCase] = []

    def add(kind: str, name: str, ask: Any, *arguments: Any, **more: Any) -> None:
        found.append(SoakCase(kind, f"{kind} {name}", _bound(ask, arguments), **more))

    for number, model in enumerate(GENERATORS):
        long = {"ignore_eos": True, "max_tokens": 300 if model == "twin" else 120}
        for drawn in (number * 2, number * 2 + 1):
            body = chat(model, drawn)
            add("openai", f"{model} {drawn}", kinds.openai_chat, body)
            add("openai stream", f"{model} {drawn}", kinds.openai_stream, body | long)
            add("infer", f"{model} {drawn}", kinds.infer, native(model, drawn, priority=drawn % 6))
            add("infer events", f"{model} {drawn}", kinds.infer_events, native(model, drawn))
        for stream in (False, True):
            name = f"{model} {stream}"
            add("responses", name, kinds.response, model, number, stream)
            add("anthropic", name, kinds.anthropic_message, model, number, stream)
            add("ollama", name, kinds.ollama_chat, model, number, stream)
            add("grpc", name, kinds.infer_grpc, native(model, number), stream)
        add("socket", model, kinds.infer_socket, native(model, number, max_tokens=80))
        add("job", model, kinds.job, native(model, number, max_tokens=100))
        add("session", model, kinds.session, model, number)
        whole = _bound(kinds.openai_stream, (body | long,))
        add("leaver", model, kinds.leaver, body | long,
            reference=whole, agrees=kinds.is_beginning)  # fmt: skip
        shown = native(model, number, max_tokens=200)
        add("hurried", model, kinds.hurried, shown,
            reference=_bound(kinds.infer, (shown,)), agrees=kinds.is_beginning)  # fmt: skip
        add(IN_A_KILL, model, kinds.openai_stream, body | long | {"max_tokens": 400})
        add("metered", model, kinds.openai_chat, body)
        add("burst", model, kinds.openai_chat, body | {"max_tokens": 12})
        formed = body | {"response_format": kinds.FORMAT, "max_tokens": 100}
        add("structured", f"{model} schema", kinds.openai_chat, formed)
        lines = native(model, number, regex="[a-f]{5,20}(-[0-9]{3}){2}")
        add("structured", f"{model} regex", kinds.infer, lines)
        called = body | {"tools": kinds.TOOLS, "tool_choice": "required", "max_tokens": 200}
        add("structured", f"{model} tool", kinds.openai_chat, called)
        add("several", model, kinds.openai_chat, body | {"n": 3, "temperature": 0.9, "seed": 5})
    for number in range(3):
        add("embeddings", f"{number}", kinds.vectors, number, agrees=kinds.close)
        add("embeddings", f"rerank {number}", kinds.scores, number, agrees=kinds.close)
        body = chat("left", number)
        fixed = body | {"model": f"{EXPERT}@{VERSIONS[0]}"}
        add("expert", f"fixed {number}", kinds.openai_chat, fixed)
        half = [{"name": f"{EXPERT}@{VERSIONS[0]}", "weight": 0.5}]
        add("expert", f"half {number}", kinds.openai_chat, body | {"experts": half})
        current = _bound(kinds.each_version, (body,))
        add("expert", f"current {number}", kinds.current_expert, body | {"model": EXPERT},
            reference=current, agrees=kinds.is_of_its_version)  # fmt: skip
    slow = chat("twin", 9, max_tokens=700, ignore_eos=True)
    add("slow", "twin", kinds.slow_reader, slow, 0.15,
        reference=_bound(kinds.slow_reader, (slow, 0.0)))  # fmt: skip
    add("batch", "all", kinds.batch, [chat(model, 3) for model in GENERATORS for _ in range(2)])
    return found


def _bound(ask: Any, arguments: tuple[Any, ...]) -> Any:
    return lambda clients: ask(clients, *arguments)


@dataclass(slots=True)
class Soak:
    server: SoakServer
    arguments: argparse.Namespace
    clients: dict[str, SoakClients]
    begun: float = 0.0
    think: float = 1.0
    expected: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[dict[str, Any]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    events: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    cpu_s: dict[int, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def now(self) -> float:
        return round(time.monotonic() - self.begun, 1)

    def note(self, kind: str, **more: Any) -> None:
        self.events.append({"at_s": self.now(), "kind": kind, **more})

    async def pause(self, seconds: float) -> bool:
        """Whether the soak goes on after it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)
        return not self.ended.is_set()

    # clients

    async def take_expected(self) -> None:
        for case in cases():
            ask = case.reference or case.ask
            self.expected[case.name] = await ask(self.clients[KEYS[0]])

    async def user(self, kind: str, asked: list[SoakCase]) -> None:
        while await self.pause(random.expovariate(1 / (THINK_S.get(kind, 1.0) * self.think))):
            if kind == "burst":
                chosen = random.choice(asked)
                await asyncio.gather(*(self.ask(chosen) for _ in range(BURST)))
                await self.pause(BURST_EVERY_S)
            else:
                await self.ask(random.choice(asked))

    async def ask(self, case: SoakCase) -> None:
        counts = self.counts[case.kind]
        counts["sent"] += 1
        key = KEYS[2] if case.kind == "metered" else random.choice(KEYS[:2])
        begun = time.monotonic()
        for _ in range(MAX_TRIES):
            RECEIPT.set("")
            try:
                async with asyncio.timeout(kinds.REQUEST_S):
                    answer = await case.ask(self.clients[key])
                agrees = case.agrees(self.expected[case.name], answer)
            except Exception as error:
                again = kinds.refusal(error)
                if again is None:
                    self.fail(case, begun, error)
                    return
                counts["refused"] += 1
                self.refusals[re.sub(r"[0-9a-f]{6,}|\d{4,}", "N", f"{again}")[:100]] += 1
                await asyncio.sleep(again.retry_after_s)
                counts["retried"] += 1
                continue
            counts["ended"] += 1
            if not agrees:
                self.fail(case, begun, answer)
            return
        self.fail(case, begun, TimeoutError(f"refused {MAX_TRIES} times"))

    def fail(self, case: SoakCase, begun: float, came: Any) -> None:
        what = "different"
        if isinstance(came, Exception):
            what = "failed" if kinds.is_typed(came) else "untyped"
            if isinstance(came, kinds.Lost | TimeoutError | OSError | httpx.TransportError):
                what = "lost"
        self.counts[case.kind][what] += 1
        headers = getattr(getattr(came, "response", None), "headers", {})
        if len(self.failures) < MAX_FAILURES:
            self.failures.append({
                "what": what, "case": case.name, "at_s": self.now(),
                "began_s": round(begun - self.begun, 1),
                "receipt": RECEIPT.get() or headers.get("x-coterie-receipt", ""),
                "expected": repr(self.expected[case.name])[:2000], "came": repr(came)[:2000],
                "body": str(getattr(came, "body", ""))[:1000],
                "clock": time.strftime("%H:%M:%S"),
            })  # fmt: skip

    # what is done to the server

    async def all_up(self) -> bool:
        with suppress(httpx.HTTPError):
            reply = await self.clients[KEYS[0]].http.get("/health")
            known = reply.json().get("specialists", {}).values()
            states = [state for item in known for state in item.get("states", {}).values()]
            return bool(states) and all(state == "up" for state in states)
        return False

    async def kill_workers(self) -> None:
        while self.arguments.kill_every and await self.pause(self.arguments.kill_every):
            workers = self.server.workers()
            if not workers or not await self.all_up():
                self.note("no kill, not all are up")
                continue
            victim = random.choice(workers)
            name = self.server.replicas().get(victim.pid, "?")
            asked = [case for case in cases() if case.kind == IN_A_KILL for _ in range(2)]
            streams = [asyncio.create_task(self.ask(case)) for case in asked]
            await asyncio.sleep(random.uniform(*KILL_AFTER_S))
            victim.send_signal(signal.SIGKILL)
            running, begun = sum(not one.done() for one in streams), time.monotonic()
            await asyncio.gather(*streams)
            ended_s = round(time.monotonic() - begun, 1)
            self.note("kill", pid=victim.pid, replica=name, running=running, ended_s=ended_s)

    async def reload(self) -> None:
        count = 0
        while await self.pause(self.arguments.reload_every):
            count += 1
            write_settings(self.server.folder, self.server.models, 3 if count % 2 else 4)
            if count % 4 < 2:
                self.server.process.send_signal(signal.SIGHUP)
            else:
                await self.admin("POST", "/v1/config/reload")
            self.note("reload")

    async def change_experts(self) -> None:
        name = f"{EXPERT}@{VERSIONS[1]}"
        while True:
            for method, path in (
                ("POST", f"/v1/experts/{name}/promote"), ("POST", f"/v1/experts/{EXPERT}/rollback"),
                ("DELETE", f"/v1/experts/{name}"), ("POST", "/v1/experts"),
            ):  # fmt: skip
                if not await self.pause(self.arguments.reload_every / 2):
                    return
                if path == "/v1/experts":
                    await self.install(1)
                else:
                    await self.admin(method, path)
                self.note(f"expert: {method} {path}")

    async def install(self, place: int) -> None:
        path, version = str(self.server.experts[place]), VERSIONS[place]
        body = {"path": path, "name": EXPERT, "version": version, "base": "left"}
        await self.admin("POST", "/v1/experts", body)

    async def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        try:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as client:
                reply = await client.request(method, path, json=body, headers=headers)
            reply.raise_for_status()
            return reply.json()
        except httpx.HTTPError as error:
            text = getattr(getattr(error, "response", None), "text", "")
            self.faults.append(f"{self.now()} s: {method} {path}: {error!r} {text[:300]}")
            return {}

    # what is measured

    async def watch(self) -> None:
        last = written = time.monotonic()
        await self.sample(0.0)
        while await self.pause(SAMPLE_EVERY_S):
            now = time.monotonic()
            used = await self.sample(now - last)
            factor = min(max(used / self.arguments.load, 0.6), 1.7)
            self.think = min(max(self.think * factor, 0.02), 50.0)
            last = now
            if now - written >= WRITE_EVERY_S:
                written = now
                await self.read_metrics()
                self.write()
                self.say_progress(used)

    async def sample(self, seconds: float) -> float:
        """Notes memory, and gives the cores that were used since the sample before."""
        if (code := self.server.process.poll()) is not None:
            raise RuntimeError(f"the server ended with {code}")
        names, processes, used = self.server.replicas(), {}, 0.0
        gateway = psutil.Process(self.server.process.pid)
        for process in (gateway, *self.server.workers(), psutil.Process()):
            with suppress(psutil.Error, OSError):
                times = process.cpu_times()
                cpu_s = times.user + times.system
                used += cpu_s - self.cpu_s.get(process.pid, 0.0)
                self.cpu_s[process.pid] = cpu_s
                name = "gateway" if process.pid == gateway.pid else names.get(process.pid, "")
                if name:
                    processes[name] = {
                        "pid": process.pid, "age_s": round(time.time() - process.create_time()),
                        "mb": pss_mb(process.pid), "files": process.num_fds(),
                        "threads": process.num_threads(),
                    }  # fmt: skip
        await asyncio.to_thread(self._note_folders, processes, used / seconds if seconds else 0.0)
        return used / seconds if seconds else 0.0

    def _note_folders(self, processes: dict[str, Any], used: float) -> None:
        folder = self.server.folder
        state, temporary = sizes_of(folder / "home" / "state"), sizes_of(folder / "tmp")
        self.samples.append({
            "at_s": self.now(), "cores": round(used, 3), "processes": processes,
            "state_mb": sum(state) / 1e6, "temporary_files": len(temporary),
            "temporary_mb": sum(temporary) / 1e6,
        })  # fmt: skip

    async def read_metrics(self) -> None:
        try:
            reply = await self.clients[KEYS[0]].http.get("/metrics")
        except httpx.HTTPError as error:
            self.faults.append(f"{self.now()} s: /metrics: {error!r}")
            return
        found: Counter[str] = Counter()
        wanted = r"^(coterie_(?:recoveries|worker_restarts|config_reloads|failures)_total|"
        wanted += r"vllm:num_requests_(?:running|waiting)|coterie_gateway_open_streams)"
        for name, labels, value in re.findall(wanted + r"(?:\{(.*?)\})? (\S+)$", reply.text, re.M):
            label = re.search(r'(?:kind|result|code)="([^"]*)"', labels)
            found[f"{name} {label[1]}" if label else name] += float(value)  # type: ignore[assignment]
        self.running = dict(found)

    def totals(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())

    def say_progress(self, used: float) -> None:
        totals, kills = self.totals(), sum(one["kind"] == "kill" for one in self.events)
        gateway = self.samples[-1]["processes"].get("gateway", {})
        print(
            f"{self.now() / 60:.0f} min: {dict(totals)}, {kills} kills, {used:.2f} cores, gateway "
            f"{gateway.get('mb', 0):.1f} MB, {len(self.faults)} faults",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def write(self) -> None:
        shown = {
            "minutes": self.now() / 60, "load": self.arguments.load, "totals": self.totals(),
            "clients": self.counts, "faults": self.faults, "failures": self.failures,
            "refusals": self.refusals,
            "metrics": self.running, "memory": memory_of(self.samples), "events": self.events,
            "samples": self.samples,
        }  # fmt: skip
        path = self.arguments.json
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(shown, indent=1))
        draft.replace(path)

    # from the beginning to the end

    async def run(self) -> None:
        self.begun = time.monotonic()
        await self.install(0)
        await self.install(1)
        await self.take_expected()
        print(f"{len(self.expected)} answers after {self.now()} s", file=sys.stderr, flush=True)
        self.begun = time.monotonic()
        by_kind: dict[str, list[SoakCase]] = defaultdict(list)
        for case in cases():
            by_kind[case.kind].append(case)
        by_kind.pop(IN_A_KILL)
        users = [asyncio.create_task(self.guarded(self.user(*one))) for one in by_kind.items()]
        others = (self.kill_workers(), self.reload(), self.change_experts(), self.watch())
        tasks = [asyncio.create_task(self.guarded(one)) for one in others]
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.ended.set)
        await self.pause(60 * self.arguments.minutes)
        self.ended.set()
        _, late = await asyncio.wait(users, timeout=END_S)
        self.faults += [f"clients never ended: {len(late)}"] if late else []
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks)
        await self.look_back()

    async def guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A soak whose server or whose own part ended is over."""
        try:
            await work
        except Exception as error:
            self.faults.append(f"{self.now()} s: ended early: {error!r}")
            self.ended.set()

    async def look_back(self) -> None:
        """Nothing runs, nothing is open, all reloads were done."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            await self.read_metrics()
            left: dict[str, Any] = {
                one: self.running[one] for one in QUIET if self.running.get(one)
            }
            shown = await self.admin("GET", "/v1/receipts?outcome=open&limit=5")
            if shown.get("data"):
                left["open receipts"] = [one["request_id"] for one in shown["data"]]
            if not left and await self.all_up():
                break
            await asyncio.sleep(1)
        self.faults += [f"at the end: {left}"] if left else []
        asked = sum(one["kind"] == "reload" for one in self.events)
        done = self.running.get("coterie_config_reloads_total done", 0)
        if asked != done:
            self.faults.append(f"{asked} reloads were asked for, {done} were done")
        log = self.server.log_path.read_text(errors="replace")
        died = Counter(re.findall(r'"event":"worker_died".*?"exit_code":(-?\d+)', log))
        kills = sum(one["kind"] == "kill" for one in self.events)
        if sum(died.values()) != kills:
            self.faults.append(f"{kills} kills, and these exit codes: {dict(died)}")
        await self.sample(0.0)
        grown = memory_of(self.samples).get("gateway", {})
        if grown and grown["end"] > 1.05 * grown["half"] and grown["end"] > grown["half"] + 10:
            self.faults.append(f"the gateway grew from {grown['half']} to {grown['end']} MB")

    def has_failed(self) -> bool:
        bad = ("different", "lost", "failed", "untyped")
        return bool(self.faults) or any(self.totals()[name] for name in bad)


COLUMNS = ("sent", "ended", "refused", "retried", "different", "lost", "failed", "untyped")
QUIET = ("vllm:num_requests_running", "vllm:num_requests_waiting", "coterie_gateway_open_streams")


def report(soak: Soak) -> str:
    lines = [f"| client | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for kind, counts in [*sorted(soak.counts.items()), ("all", soak.totals())]:
        lines.append(f"| {kind} | {' | '.join(str(counts[name]) for name in COLUMNS)} |")
    lines += ["", "| process | start, MB | half | end | slope, MB/h | files | threads | lives |"]
    lines.append("|---" * 8 + "|")
    for name, row in memory_of(soak.samples).items():
        cells = [row.get(part, "") for part in ("start", "half", "end", "slope_per_hour")]
        for key in ("files", "threads"):
            cells.append(f"{row.get(f'{key}_start', '')} -> {row.get(f'{key}_end', '')}")
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {row['lives']} |")
    first, last = soak.samples[0], soak.samples[-1]
    for name in ("state_mb", "temporary_files", "temporary_mb"):
        lines.append(f"{name}: {first[name]:.1f} -> {last[name]:.1f}")
    lines.append(f"cores: {statistics.fmean(one['cores'] for one in soak.samples):.2f}")
    lines.append(f"events: {dict(Counter(one['kind'] for one in soak.events))}")
    kills = [one for one in soak.events if one["kind"] == "kill"]
    if kills:
        streams, longest = (
            sum(one["running"] for one in kills),
            max(one["ended_s"] for one in kills),
        )
        lines.append(f"streams that ran at a kill: {streams}, ended within {longest} s")
    lines += [f"{name}: {value:g}" for name, value in sorted(soak.running.items())]
    lines += [f"FAULT {fault}" for fault in soak.faults]
    for one in soak.failures[:10]:
        lines.append(
            f"FAILURE {one['what']}: {one['case']} at {one['at_s']} s: {one['came'][:300]}"
        )
    return "\n".join(lines)


async def soaked(server: SoakServer, arguments: argparse.Namespace) -> Soak:
    clients = {key: kinds.clients_of(server.url, server.grpc_target, key) for key in KEYS}
    soak = Soak(server, arguments, clients)
    try:
        await soak.run()
    finally:
        if soak.samples:
            soak.write()
        for one in clients.values():
            await one.close()
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--load", type=float, default=0.6, help="cores of server and clients")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds; 0 = never")
    parser.add_argument("--reload-every", type=float, default=300.0, help="seconds")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--log", type=Path, help="the server's; default: beside the JSON file")
    arguments = parser.parse_args()
    with serving(arguments.log or arguments.json.with_suffix(".log")) as server:
        soak = asyncio.run(soaked(server, arguments))
    print(report(soak))
    return 1 if soak.has_failed() else 0


if __name__ == "__main__":
    sys.exit(main())
