"""/v1/slo, /v1/ensemble, the headers, `coterie ensemble` and `coterie top`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coterie.api.app import create_app
from coterie.cli.ensemble import _details
from coterie.cli.top import WIDTH, lines
from coterie.core.config import load
from coterie.service.build import build
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.app_with_experts import adapter
from tests.helpers.serving.server_process import Reply, Served, own_home

ADMIN = "key-of-an-admin"
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 1, "maximum": 9}},
}
SETTINGS = """
[server]
admin_key_file = "{admins}"
allow_unsigned = true
[engine]
kv_bytes = "8MB"
threads = 1
max_sequences = {sequences}
max_queue = {queue}
[ensemble]
spike_s = 1.0
min_judged = 4
breach_s = 0.5
recovery_s = 0.5
shadow_sample = 1.0
fresh_shadow = 0.0
[[intents]]
name = "query"
shadow_below = 0.4
[[specialists]]
name = "sql"
model = "{model}"
context = 96
checks = ["json"]
fallback = "spare"
intents = ["query"]
[specialists.slo]
correctness = 0.9
ttft_p95_s = 5.0
[[specialists]]
name = "spare"
model = "{model}"
context = 96
checks = ["json"]
"""


@pytest.fixture
def ensemble_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    path = own_home(temporary_folder("coterie-home-"))
    monkeypatch.setenv("COTERIE_HOME", str(path))
    return path


def config_file(home: Path, *, sequences: int = 64, queue: int = 256) -> Path:
    admins = home / "admins.txt"
    admins.write_text(ADMIN + "\n")
    admins.chmod(0o600)
    file = home / "coterie.toml"
    values = {"admins": admins, "sequences": sequences, "queue": queue}
    file.write_text(SETTINGS.format(model=tiny_checkpoint("llama"), **values))
    return file


@asynccontextmanager
async def client_of(file: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = load(file)
    pipeline = build(config, inproc=True)
    await pipeline.start()
    try:
        transport = httpx.ASGITransport(create_app(pipeline, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
    finally:
        await pipeline.close()


def test_endpoints_headers_and_refusals(ensemble_home: Path) -> None:
    file = config_file(ensemble_home)
    admin = {"authorization": f"Bearer {ADMIN}"}

    async def test() -> None:
        async with client_of(file) as client:
            chat = {"model": "spare", "messages": [{"role": "user", "content": "hello"}]}
            for number in range(4):
                body = chat | {"response_format": SCHEMA, "seed": number}
                reply = await client.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
            header = reply.headers["x-coterie-slo"]
            parts = dict(part.split("=") for part in header.split(";"))
            # answers of one token have no gap between tokens
            assert set(parts) == {
                *(f"ttft_{share}" for share in ("p50", "p95", "p99")),
                "admission_p95",
                "correctness",
                "preempted",
            }
            listed = (await client.get("/v1/slo")).json()
            shown = {item["specialist"]: item for item in listed["data"]}
            assert set(listed) == {"object", "data"} and set(shown) == {"sql", "spare"}
            spare, sql = shown["spare"], shown["sql"]
            assert spare["correctness"]["state"] == "known"
            assert spare["correctness"]["rate"] == 1.0 and spare["ttft"]["count"] == 4
            assert sql["correctness"]["state"] == "unknown" and sql["correctness"]["rate"] is None
            assert sql["ttft"]["p95_s"] is None and sql["admission_to_first_token_p95_s"] is None
            assert sql["promised"]["ttft_p95_s"] == 5.0 and sql["kept"]["ttft_p95_s"] is None
            # the state of the ensemble is for admins
            assert (await client.get("/v1/ensemble")).status_code == 401
            told = "/v1/ensemble/specialists/sql/"
            assert (await client.post(told + "demote")).status_code == 401
            reply = await client.post(
                told + "demote", json={"reason": "bad release"}, headers=admin
            )
            assert reply.status_code == 200 and reply.json()["breaker"] == "shadow_only"
            body = chat | {"model": "auto", "response_format": SCHEMA}
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.headers["x-coterie-specialist"] == "spare"
            assert (await client.post(told + "demote", headers=admin)).status_code == 409
            assert (await client.post(told + "fly", headers=admin)).status_code == 404
            nobody = "/v1/ensemble/specialists/nobody/demote"
            assert (await client.post(nobody, headers=admin)).status_code == 404
            assert (await client.post(told + "restore", headers=admin)).status_code == 200
            await drained(client, chat)
            intent = "/v1/ensemble/intents/query"
            reply = await client.patch(intent, json={"shadow_below": 0.8}, headers=admin)
            assert reply.json()["shadow_below"] == 0.8 and reply.json()["overridden"]
            faults: list[dict[str, Any]] = [
                {}, {"shadow_below": 2}, {"nothing": 1}, {"priority_floor": "x"},
            ]  # fmt: skip
            for fault in faults:
                reply = await client.patch(intent, json=fault, headers=admin)
                assert reply.status_code == 400, reply.text
            assert (await client.delete(intent, headers=admin)).json()["shadow_below"] == 0.4
            assert (await client.delete(intent, headers=admin)).status_code == 409
            canaries = "/v1/ensemble/canaries"
            body = {"specialist": "spare", "intent": "query", "share": 0.1}
            reply = await client.post(canaries, json=body, headers=admin)
            assert reply.json()["current"] == "sql"
            assert (await client.post(canaries, json=body, headers=admin)).status_code == 409
            assert (await client.delete(canaries + "/query", headers=admin)).status_code == 200
            assert (await client.delete(canaries + "/query", headers=admin)).status_code == 404
            own = body | {"specialist": "sql"}
            reply = await client.post(canaries, json=own, headers=admin)
            assert reply.status_code == 409 and "already" in reply.text
            faults = [
                {"share": 0.1},
                {"expert": "nobody", "specialist": "sql", "share": 0.1},
                {"specialist": "spare", "intent": "query", "share": 0.9},
            ]
            for fault in faults:
                assert (await client.post(canaries, json=fault, headers=admin)).status_code == 400
            audit = (await client.get("/v1/ensemble/audit", headers=admin)).json()["data"]
            assert [item["kind"] for item in audit] == [
                "canary_stopped",
                "canary_started",
                "thresholds_cleared",
                "thresholds_set",
                "undrained",
                "drained",
                "restored",
                "demoted",
            ]
            assert audit[-1]["details"] == {"reason": "bad release"}
            assert all(item["actor"].startswith("admin ") for item in audit)
            assert ADMIN not in json.dumps(audit)
            page = "/v1/ensemble/audit?limit=2"
            first = (await client.get(page, headers=admin)).json()
            assert first["has_more"]
            later = (await client.get(f"{page}&before={first['next']}", headers=admin)).json()
            assert later["data"][0]["kind"] == "thresholds_cleared"
            text = (await client.get("/metrics")).text
            assert 'coterie_slo_seconds{model_name="spare",kind="ttft",quantile="p95"}' in text
            assert 'coterie_breaker_state{model_name="sql",state="closed"} 1' in text
            assert 'coterie_correctness{model_name="spare",bound="rate"} 1.0' in text
            assert 'coterie_correctness{model_name="sql",bound="rate"}' not in text

    asyncio.run(test())


async def drained(client: httpx.AsyncClient, chat: dict[str, Any]) -> None:
    """What runs ends, what comes goes elsewhere or is refused, and it can be taken back."""
    told, admin = "/v1/ensemble/specialists/sql/", {"authorization": f"Bearer {ADMIN}"}
    long = chat | {"model": "sql", "max_tokens": 40, "ignore_eos": True, "n": 8}
    begun = asyncio.create_task(client.post("/v1/chat/completions", json=long))
    while not (await client.get("/v1/slo")).json()["data"][0]["running"]:
        await asyncio.sleep(0.001)
        assert not begun.done()
    assert (await client.post(told + "drain")).status_code == 401
    reply = await client.post(told + "drain", json={"reason": "new weights"}, headers=admin)
    assert reply.status_code == 200, reply.text
    assert reply.json()["breaker"] == "draining" and reply.json()["draining"]
    assert (await client.post(told + "drain", headers=admin)).status_code == 409
    body = chat | {"model": "auto", "response_format": SCHEMA}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.headers["x-coterie-specialist"] == "spare"
    reply = await client.post("/v1/chat/completions", json=chat | {"model": "sql"})
    assert reply.status_code == 529 and "draining" in reply.text
    assert reply.headers["x-coterie-breaker"] == "draining"
    receipt = await client.get(f"/v1/receipts/{reply.headers['x-coterie-receipt']}", headers=admin)
    assert (
        receipt.json()["plan"] | {"breaker": "draining", "specialist": "sql"}
        == (receipt.json()["plan"])
    )
    assert int(reply.headers["retry-after"]) > 0
    message = chat | {"model": "sql", "max_tokens": 4}
    reply = await client.post("/v1/messages", json=message)
    assert reply.status_code == 529 and reply.json()["error"]["type"] == "overloaded_error"
    whole = (await begun).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 8
    [replica] = (await client.get("/v1/ensemble", headers=admin)).json()["replicas"]
    assert replica == {"replica": "e0r0", "draining": False, "in_flight": 0}
    # the last replica is not drained by itself, and one that is not there is not found
    path = "/v1/ensemble/replicas/"
    reply = await client.post(path + "e0r0/drain", headers=admin)
    assert reply.status_code == 409 and "no other replica" in reply.text
    reply = await client.post(path + "e9r9/drain", headers=admin)
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "not_found"
    assert (await client.post(path + "e0r0/fly", headers=admin)).status_code == 404
    reply = await client.post(told + "undrain", headers=admin)
    assert reply.json()["breaker"] == "closed" and not reply.json()["draining"]
    reply = await client.post("/v1/chat/completions", json=chat | {"model": "sql"})
    assert reply.status_code == 200, reply.text


def item(name: str, **values: Any) -> dict[str, Any]:
    quantiles = {"p50_s": 123.4567, "p95_s": 999.9, "p99_s": 12345.6, "count": 9}
    return {
        "specialist": name,
        "breaker": "closed",
        "held": False,
        "spike": "normal",
        "running": 12,
        "waiting": 345,
        "ttft": quantiles,
        "itl": quantiles,
        "admission_to_first_token_p95_s": 1.5,
        "preempted_share": 0.123,
        "kept": {"ttft_p95_s": False, "itl_p95_s": True, "correctness": False},
        "correctness": {"rate": 0.9, "low": 0.8, "high": 0.95, "judged": 12345, "floor": 0.9},
    } | values


def test_the_view_fits_80_columns() -> None:
    empty = {"p50_s": None, "p95_s": None, "p99_s": None, "count": 0}
    unknown = {"rate": None, "low": None, "high": None, "judged": 0, "floor": None}
    data = [
        item("a-name-that-is-much-longer-than-its-column"),
        item("sql", breaker="shadow_only"),
        item("held", breaker="shadow_only", held=True),
        item("busy", spike="priority_floor"),
        item("out", breaker="draining", held=True),
        item("new", ttft=empty, itl=empty, correctness=unknown, preempted_share=None)
        | {"admission_to_first_token_p95_s": None},
    ]
    shown = lines(data)
    assert len(shown) == 1 + 2 * len(data)
    assert max(map(len, shown)) <= WIDTH
    assert "shadow_only" in shown[3] and "held" in shown[5] and "spike 3" in shown[7]
    assert "draining" in shown[9]
    assert (
        "adm -" in shown[12]
        and "unknown" in shown[12]
        and "0.90!" in shown[2]
        and shown[1].count("!") == 1
    )


def run_cli(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COTERIE_HOME": str(home), "COTERIE_ADMIN_KEY": ADMIN}
    return subprocess.run(
        [sys.executable, "-m", "coterie", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_live_view(home: Path, url: str) -> None:
    """In a terminal it draws again and again, and Ctrl-C gives the screen back."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", "top", "--url", url, "--interval", "0.2"],
        env=os.environ | {"COTERIE_HOME": str(home)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + 30
    while seen.count(b"specialist") < 3:
        assert time.monotonic() < deadline, seen
        seen += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):
        while chunk := os.read(ours, 65536):
            seen += chunk
    assert process.wait(10) == 0
    os.close(ours)
    assert b"sql" in seen and seen.rstrip().endswith(b"\x1b[?1049l"), seen[-200:]


def ask(served: Served, *, valid: bool, model: str = "auto") -> Reply:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "how many?"}]}
    if valid:
        body["response_format"] = SCHEMA
    reply = served.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    return reply


def who(reply: Reply) -> str:
    return {name.lower(): value for name, value in reply.headers.items()}["x-coterie-specialist"]


@pytest.mark.full
def test_drills_against_a_real_server(ensemble_home: Path) -> None:
    """Regression, demotion, a restart in between, recovery by shadows, the operator, the view."""
    file = config_file(ensemble_home)
    served = Served("--config", str(file), COTERIE_HOME=str(ensemble_home))
    try:
        for _ in range(5):
            ask(served, valid=True, model="spare")
        deadline = time.monotonic() + 60
        # tokens of a tiny model are no JSON
        while who(ask(served, valid=False)) == "sql":
            assert time.monotonic() < deadline
    finally:
        served.stop()
    served = Served("--config", str(file), COTERIE_HOME=str(ensemble_home))
    try:
        assert who(ask(served, valid=True)) == "spare"
        status = run_cli(ensemble_home, "ensemble", "status", "--url", served.url)
        assert status.returncode == 0 and "shadow_only" in status.stdout, status.stderr
        deadline = time.monotonic() + 60
        while who(ask(served, valid=True)) == "spare":
            assert time.monotonic() < deadline
            # shadows need a moment without primaries
            time.sleep(0.5)
        assert who(ask(served, valid=True, model="auto")) == "sql"
        at = ("--url", served.url)
        demoted = run_cli(ensemble_home, "ensemble", "demote", "sql", "--reason", "a test", *at)
        assert "shadow_only by an operator" in demoted.stdout
        assert who(ask(served, valid=True)) == "spare"
        again = run_cli(ensemble_home, "ensemble", "demote", "sql", *at)
        assert again.returncode == 1 and "already" in again.stderr
        assert "closed" in run_cli(ensemble_home, "ensemble", "restore", "sql", *at).stdout
        changed = run_cli(
            ensemble_home, "ensemble", "thresholds", "query", "--shadow-below", "0.9", *at
        )
        assert "0.9" in changed.stdout and "operator" in changed.stdout
        cleared = run_cli(ensemble_home, "ensemble", "thresholds", "query", "--clear", *at)
        assert "configuration" in cleared.stdout
        audit = run_cli(ensemble_home, "ensemble", "audit", "--json", *at)
        kinds = [entry["kind"] for entry in json.loads(audit.stdout)["data"]]
        assert kinds == [
            "thresholds_cleared",
            "thresholds_set",
            "restored",
            "demoted",
            "breaker_reset",
            "breaker_tripped",
        ]
        top = run_cli(ensemble_home, "top", *at)
        assert top.returncode == 0 and "sql" in top.stdout and "correct" in top.stdout
        assert max(map(len, top.stdout.splitlines())) <= WIDTH
        assert_live_view(ensemble_home, served.url)
        nobody = run_cli(ensemble_home, "top", "--url", "http://127.0.0.1:9")
        assert nobody.returncode == 1 and "no answer" in nobody.stderr
    finally:
        served.stop()


@pytest.mark.full
def test_eight_callers_at_once_see_one_state(ensemble_home: Path) -> None:
    """An operator changes the state while eight callers send: every request is answered."""
    file = config_file(ensemble_home)
    served = Served("--config", str(file), COTERIE_HOME=str(ensemble_home))
    answers: list[str] = []
    try:
        for _ in range(5):
            ask(served, valid=True, model="spare")

        def caller() -> None:
            for _ in range(12):
                answers.append(who(ask(served, valid=True)))

        threads = [threading.Thread(target=caller) for _ in range(8)]
        for thread in threads:
            thread.start()
        headers = {"authorization": f"Bearer {ADMIN}"}
        for action in ("demote", "restore", "demote"):
            time.sleep(0.3)
            reply = served.post(f"/v1/ensemble/specialists/sql/{action}", {}, **headers)
            assert reply.status == 200
        for thread in threads:
            thread.join()
        assert len(answers) == 96 and set(answers) == {"sql", "spare"}
    finally:
        served.stop()


@pytest.mark.full
def test_drains_against_a_real_server(ensemble_home: Path) -> None:
    """Replicas one after the other, then the specialist, while callers send: nothing is lost."""
    file = config_file(ensemble_home)
    two = file.read_text().replace('name = "sql"', 'name = "sql"\nreplicas = 2', 1)
    file.write_text(two.replace('name = "spare"', 'name = "spare"\nreplicas = 2', 1))
    served = Served("--config", str(file), COTERIE_HOME=str(ensemble_home))
    at, stop = ("--url", served.url), threading.Event()
    status = (ensemble_home, "ensemble", "status", *at)
    replies: list[Reply] = []
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 30,
        "ignore_eos": True,
    }

    def caller() -> None:
        while not stop.is_set():
            replies.append(served.post("/v1/chat/completions", body))

    def receipts(since: int) -> set[str]:
        """Replicas that answered."""
        kept = [served.get(f"/v1/receipts/{reply.json['id']}").json for reply in replies[since:]]
        return {receipt["plan"]["replica"] for receipt in kept}

    threads = [threading.Thread(target=caller) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for name, other in (("e0r0", "e0r1"), ("e0r1", "e0r0")):
            told = run_cli(ensemble_home, "ensemble", "drain", name, "--replica", "--wait", *at)
            assert f"{name}: draining, 0 in flight" in told.stdout, told.stderr
            last = run_cli(ensemble_home, "ensemble", "drain", other, "--replica", *at)
            assert last.returncode == 1 and "no other replica" in last.stderr
            began = len(replies)
            while len(replies) < began + 12:
                time.sleep(0.05)
            assert receipts(began + 4) == {other}
            assert _slo(served)["sql"]["drained"] == [name]
            assert f"replica {name}: draining" in run_cli(*status).stdout
            states = served.get("/health").json["specialists"]["sql"]["states"]
            assert states == {name: "draining", other: "up"}
            told = run_cli(ensemble_home, "ensemble", "undrain", name, "--replica", *at)
            assert "takes requests" in told.stdout, told.stderr
        for _ in range(5):
            ask(served, valid=True, model="spare")
        assert "replica" not in run_cli(*status).stdout
        # a reason cannot steer the terminal of whoever reads the audit log
        why = ("--reason", "new\n\x1b[31mweights")
        told = run_cli(ensemble_home, "ensemble", "drain", "sql", "--wait", *why, *at)
        assert "sql: draining, 0 in flight" in told.stdout, told.stderr
        assert who(served.post("/v1/chat/completions", body)) == "spare"
        assert served.post("/v1/chat/completions", body | {"model": "sql"}).status == 529
        told = run_cli(ensemble_home, "ensemble", "undrain", "sql", *at)
        assert told.returncode == 0, told.stderr
        told = run_cli(ensemble_home, "ensemble", "audit", *at)
        assert "    reason new  [31mweights\n" in told.stdout and "\x1b" not in told.stdout
        stop.set()
        for thread in threads:
            thread.join()
        assert {reply.status for reply in replies} == {200}
        kinds = ("drained", "undrained", "replica_drained", "replica_undrained")
        assert [(entry["kind"], entry["subject"]) for entry in audit_of(served, *kinds)] == [
            ("replica_drained", "e0r0"),
            ("replica_undrained", "e0r0"),
            ("replica_drained", "e0r1"),
            ("replica_undrained", "e0r1"),
            ("drained", "sql"),
            ("undrained", "sql"),
        ]
    finally:
        stop.set()
        served.stop()


def audit_of(served: Served, *kinds: str) -> list[dict[str, Any]]:
    """The entries of these kinds, oldest first."""
    reply = served.get("/v1/ensemble/audit?limit=1000", authorization=f"Bearer {ADMIN}")
    assert reply.status == 200
    return [entry for entry in reversed(reply.json["data"]) if entry["kind"] in kinds]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_spike_against_a_real_server(ensemble_home: Path) -> None:
    """Fourteen callers at a lane that runs one request at a time and has eight places: the steps
    are taken in order, low priorities are refused first, and everything is undone afterwards."""
    file = config_file(ensemble_home, sequences=1, queue=8)
    served = Served("--config", str(file), COTERIE_HOME=str(ensemble_home))
    stop = threading.Event()
    numbers = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 4, "maxItems": 4}
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": "how many?"}],
        # several steps of the engine a request, so that it is the engine that falls behind
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": numbers}},
    }
    low_refused: list[dict[str, Any]] = []
    # answers by priority and status, of requests that began after the last step was taken
    counts: Counter[tuple[str, int]] = Counter()
    is_last_step = threading.Event()

    def caller(priority: str) -> None:
        while not stop.is_set():
            is_counted = is_last_step.is_set()
            reply = served.post("/v1/chat/completions", body, x_vllm_priority=priority)
            if is_counted:
                counts[priority, reply.status] += 1
            if reply.status != 200:
                time.sleep(0.1)

    def odds(priority: str) -> float:
        """Refused for one that is answered."""
        return counts[priority, 429] / max(counts[priority, 200], 0.5)

    # vLLM's numbers: 0 is the default priority, 3 is below it
    threads = [threading.Thread(target=caller, args=(p,)) for p in ["0"] * 10 + ["3"] * 4]
    try:
        try:
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 200
            # a pause of the callers may undo a step for a moment
            while (
                not low_refused or counts["0", 200] < 30 or counts["3", 200] + counts["3", 429] < 10
            ):
                assert time.monotonic() < deadline, counts
                time.sleep(0.2)
                if len(audit_of(served, "spike_raised")) >= 3:
                    is_last_step.set()
                    reply = served.post("/v1/chat/completions", body, x_vllm_priority="3")
                    if reply.status == 429 and "priority" in reply.json["error"]["message"]:
                        low_refused.append(reply.json["error"])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        deadline = time.monotonic() + 60
        steps: list[str] = []
        while not steps or steps[-1] != "normal":
            assert time.monotonic() < deadline
            time.sleep(0.2)
            found = audit_of(served, "spike_raised", "spike_lowered")
            steps = [entry["details"]["step"] for entry in found]
        print(f"since the last step: {counts}")
        # callers that are refused pause, so there is little to refuse: of the low ones first
        assert odds("3") > 1.5 * odds("0"), counts
        order = ["normal", "fewer_shadows", "spill", "priority_floor"]
        levels = [0, *(order.index(step) for step in steps)]
        assert all(abs(b - a) == 1 for a, b in itertools.pairwise(levels)), steps
        assert max(levels) == 3
        assert served.post("/v1/chat/completions", body, x_vllm_priority="3").status == 200
    finally:
        served.stop()


@pytest.mark.full
def test_canaries_against_a_real_server(ensemble_home: Path) -> None:
    """Two versions of an expert whose answers an operator's command tells apart: the bad one is
    rolled back, the good one promoted, both by real traffic."""
    file = config_file(ensemble_home)
    served = Served("--config", str(file), COTERIE_HOME=str(ensemble_home))
    at = ("--url", served.url)
    key = {"authorization": f"Bearer {ADMIN}"}

    def text_of(model: str) -> str:
        reply = served.post("/v1/chat/completions", body | {"model": model})
        assert reply.status == 200, reply.body
        return str(reply.json["choices"][0]["message"]["content"])

    def traffic_until(kind: str) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while not (found := audit_of(served, kind)):
            assert time.monotonic() < deadline, f"no {kind}"
            for _ in range(10):
                text_of("dialect")
        return found[-1]["details"]

    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "how many?"}],
        "temperature": 0,
    }
    try:
        for number in (1, 2):
            installed = {
                "path": str(adapter(seed=number)), "name": "dialect", "version": f"{number}.0.0",
                "base": "sql",
            }  # fmt: skip
            assert served.post("/v1/experts", installed, **key).status == 201
        first, second = text_of("dialect@1.0.0"), text_of("dialect@2.0.0")
        words = [word for word in first.split() if word.isalnum() and word not in second]
        assert words, (first, second)
        with file.open("a") as more:
            command = json.dumps(["/bin/grep", "-qF", words[0]])
            more.write(f'[[validators]]\nname = "words"\ncommand = {command}\n')
        file.write_text(file.read_text().replace('checks = ["json"]', 'checks = ["words"]'))
        assert served.post("/v1/config/reload", {}, **key).status == 200, served.log()
        # 2.0.0 is staged: nobody who names the expert gets it before it is promoted
        assert text_of("dialect") == first
        done = run_cli(ensemble_home, "expert", "promote", "dialect", *at)
        assert "dialect@2.0.0 gets 5% until" in done.stdout, done.stderr
        done = run_cli(ensemble_home, "ensemble", "canary", "--stop", "dialect", *at)
        assert done.returncode == 0, done.stderr
        done = run_cli(ensemble_home, "expert", "promote", "dialect", "--canary", "50%", *at)
        assert done.returncode == 0 and "dialect@2.0.0" in done.stdout, done.stderr
        again = run_cli(ensemble_home, "expert", "promote", "dialect", "--canary", "5%", *at)
        assert again.returncode == 1 and "is running" in again.stderr
        details = traffic_until("canary_rolled_back")
        assert details["candidate_valid"] == 0 and details["evidence_worse"] >= details["needed"]
        assert served.get("/v1/experts/dialect", **key).json["version"] == "1.0.0"
        patched = json.dumps({"version": "2.0.0"}).encode()
        headers = {"content_type": "application/json", **key}
        assert served.send("PATCH", "/v1/experts/dialect", patched, **headers).status == 200
        done = run_cli(ensemble_home, "expert", "promote", "dialect@1.0.0", "--canary", "50%", *at)
        assert done.returncode == 0, done.stderr
        details = traffic_until("canary_promoted")
        assert details["evidence_not_worse"] >= details["needed"]
        deadline = time.monotonic() + 20
        while served.get("/v1/experts/dialect", **key).json["version"] != "1.0.0":
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        served.stop()


def test_the_audit_log_has_readable_numbers() -> None:
    figures = {"started_at": 1_795_041_234.5, "ended_at": 0.0, "share": 0.05, "needed": 20.0,
               "evidence_worse": 1.5e9, "candidate_judged": 12, "label": "sql@2.0.0"}  # fmt: skip
    told = _details(figures)
    assert "started_at 2026-11-18 22:33:54Z, ended_at -, share 0.05" in told
    assert "e+" not in told and "evidence_worse 1,500,000,000" in told


def _slo(served: Served) -> dict[str, dict[str, Any]]:
    return {item["specialist"]: item for item in served.get("/v1/slo").json["data"]}


TWO_ENGINES = """
[engine]
kv_bytes = "8MB"
threads = 1
restart_backoff_s = 0.02
max_restart_backoff_s = 0.05
[ensemble]
min_judged = 4
[[specialists]]
name = "sql"
model = "{llama}"
fallback = "spare"
[[specialists]]
name = "spare"
model = "{qwen}"
checks = ["json"]
"""


@pytest.mark.full
def test_a_replica_that_crashes_again_and_again(ensemble_home: Path) -> None:
    """Five crashes in a row eject the only replica; the fallback on another engine answers, and
    after 30 seconds the replica gets requests again."""
    file = ensemble_home / "two.toml"
    models = {"llama": tiny_checkpoint("llama"), "qwen": tiny_checkpoint("qwen3")}
    file.write_text(TWO_ENGINES.format(**models))
    served = Served("--config", str(file), COTERIE_HOME=str(ensemble_home))
    try:
        for _ in range(5):
            ask(served, valid=True, model="spare")
        [spare] = re.findall(r'"replica":"e1r0","pid":(\d+)', served.log())
        deadline, killed = time.monotonic() + 90, set[int]()
        while len(killed) < 5:
            assert time.monotonic() < deadline
            assert who(ask(served, valid=True)) in ("sql", "spare")
            children = psutil.Process(served.process.pid).children()
            for child in children:
                is_worker = "coterie.workers.child" in " ".join(child.cmdline())
                is_new = child.pid not in killed and child.pid != int(spare)
                if is_worker and is_new and len(killed) < 5:
                    child.kill()
                    killed.add(child.pid)
            time.sleep(0.3)
        assert len(killed) == 5
        # while it starts again the fallback answers anyway; five crashes in a row eject it
        while not (shown := _slo(served))["sql"]["ejected"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert shown["sql"]["breaker"] == "ejected" and shown["sql"]["ejected"] == ["e0r0"]
        began = time.monotonic()
        while who(ask(served, valid=True)) == "spare":
            assert time.monotonic() < began + 60
            time.sleep(0.5)
    finally:
        # one that is killed while it starts is a failed start
        served.expected_deaths = served.log().count('"event":"worker_died"')
        served.stop()
