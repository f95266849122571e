"""The pages at / and /dashboard, and /v1/dashboard/events: files, who sees what, their cost."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.api.app import create_app
from coterie.api.native.page_files import CHAT_PAGE, DASHBOARD
from coterie.core.config import load
from coterie.core.errors import Overloaded
from coterie.core.events import Delta, Started
from coterie.service.build import build
from coterie.service.dashboard import feed as feed_module
from coterie.service.dashboard.activity import FollowedRequest
from coterie.service.dashboard.feed import MAX_LISTENERS, MAX_OF_ONE
from coterie.service.dashboard.sections import DashboardSections
from coterie.service.dashboard.stage import StageInputs, stage_of
from coterie.service.meter import RequestMeter
from coterie.service.pipeline import Pipeline
from coterie.workers.inproc import InprocReplica
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served, chat, frames, own_home

ADMIN, FIRST, SECOND = "key-of-an-admin", "key-of-one", "key-of-two"
SETTINGS = """
[server]
admin_key_file = "{home}/admins.txt"
api_key_file = "{home}/keys.txt"
[engine]
kv_bytes = "8MB"
threads = 1
[[specialists]]
name = "tiny"
model = "{model}"
context = 96
[[specialists]]
name = "experts"
model = "{experts}"
context = 96
[specialists.moe]
strategy = "lru"
cache_capacity = 4
host_budget = "0"
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    path = own_home(temporary_folder("coterie-home-"))
    (path / "admins.txt").write_text(ADMIN + "\n")
    (path / "keys.txt").write_text(f"{FIRST}\n{SECOND}\n")
    # a copy: what is served leaves its heatmap beside the model
    experts = shutil.copytree(tiny_checkpoint("qwen3_moe"), path / "moe")
    models = {"model": tiny_checkpoint("llama"), "experts": experts}
    (path / "coterie.toml").write_text(SETTINGS.format(home=path, **models))
    for name in ("admins.txt", "keys.txt"):
        (path / name).chmod(0o600)
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def serving(home: Path) -> AsyncIterator[tuple[Pipeline, httpx.AsyncClient]]:
    config = load(home / "coterie.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_HOME", str(home))
        pipeline = build(config, inproc=True)
        await pipeline.start()
        try:
            app = create_app(pipeline, config)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
                yield pipeline, made
        finally:
            await pipeline.drain()
            await pipeline.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def looked(client: httpx.AsyncClient, key: str = "") -> tuple[dict, dict]:
    """The greeting, and one whole snapshot."""
    headers = bearer(key) if key else {}
    reply = await client.get("/v1/dashboard/events?once=true", headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    (first, hello), (second, update) = frames(reply.content)
    assert (first, second) == ("hello", "update")
    return hello, update


def test_the_page_and_its_headers(server: Served) -> None:
    with httpx.Client(base_url=server.url) as client:
        page = client.get("/dashboard")
        policy = page.headers["content-security-policy"]
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        for part in (
            "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
            "img-src 'self' data:", "frame-ancestors 'none'",
        ):  # fmt: skip
            assert part in policy.split("; ")
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        for name in re.findall(r'(?:href|src)="dashboard/([^"]+)"', page.text):
            file = client.get(f"/dashboard/{name}")
            assert file.status_code == 200 and file.content == (DASHBOARD / name).read_bytes()
            assert file.headers["content-security-policy"] == policy
        etag = page.headers["etag"]
        again = client.get("/dashboard", headers={"if-none-match": etag})
        assert again.status_code == 304 and not again.content
        assert client.head("/dashboard").headers["etag"] == etag
        plain = client.get("/dashboard", headers={"accept-encoding": "identity"})
        assert plain.content == page.content and "content-encoding" not in plain.headers
        moved = client.get("/dashboard/")
        assert moved.status_code == 308 and moved.headers["location"] == "../dashboard"
        for path in ("nothing.js", "..%2fapi%2fapp.py", "__init__.py", "%2e%2e"):
            missing = client.get(f"/dashboard/{path}")
            assert missing.status_code == 404 and missing.json()["error"]["message"], path
        assert client.post("/dashboard").status_code == 405
        foreign = client.get("/dashboard", headers={"host": "evil.example"})
        assert foreign.status_code == 421
        assert client.get("/").json()["dashboard"] == "/dashboard"
        wrong = client.get("/v1/dashboard/events?twice=1")
        assert wrong.status_code == 400 and "once" in wrong.json()["error"]["message"]


def test_the_root_is_a_page_for_browsers_and_json_for_programs(server: Served) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    with httpx.Client(base_url=server.url) as client:
        page = client.get("/", headers=browser)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert page.content == (CHAT_PAGE / "index.html").read_bytes()
        dashboard = client.get("/dashboard")
        policy = page.headers["content-security-policy"]
        assert policy == dashboard.headers["content-security-policy"]
        for name in re.findall(r'(?:href|src)="((?:chat|dashboard)/[^"]+)"', page.text):
            file = client.get(f"/{name}")
            assert file.status_code == 200 and file.headers["content-security-policy"] == policy
        for name in re.findall(r'(?:href|src)="chat/([^"]+)"', page.text):
            assert client.get(f"/chat/{name}").content == (CHAT_PAGE / name).read_bytes()
        again = client.get("/", headers=browser | {"if-none-match": page.headers["etag"]})
        assert again.status_code == 304
        assert client.head("/", headers=browser).headers["etag"] == page.headers["etag"]
        for accept in ("*/*", "application/json", ""):
            about = client.get("/", headers={"accept": accept})
            assert about.json()["name"] == "Coterie"
            # a cache must not give one the answer of the other
            assert "accept" in about.headers["vary"].split(", ")
        assert "accept" in page.headers["vary"].split(", ")
        for path in ("nothing.js", "..%2fapi%2fapp.py", "%2e%2e"):
            assert client.get(f"/chat/{path}").status_code == 404, path
        foreign = client.get("/", headers=browser | {"host": "evil.example"})
        assert foreign.status_code == 421


def test_the_page_asks_nobody_else_and_inserts_no_markup() -> None:
    for path in (*DASHBOARD.iterdir(), *CHAT_PAGE.iterdir()):
        text = path.read_text()
        addresses = set(re.findall(r"https?://[\w./]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, (path.name, addresses)
        if path.suffix == ".js":
            for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert way not in text, (path.name, way)
            assert "localStorage" not in text or "key" not in re.findall(
                r"localStorage\.setItem\(([^,]+)", text
            )[0].replace("coterie", "")
    for folder in (DASHBOARD, CHAT_PAGE):
        page = (folder / "index.html").read_text()
        assert not re.findall(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", page)


def test_who_sees_what(home: Path) -> None:
    async def test() -> None:
        async with serving(home) as (_, client):
            assert (await client.get("/v1/dashboard/events")).status_code == 401
            wrong = await client.get("/v1/dashboard/events", headers=bearer("nobody's"))
            assert wrong.status_code == 401
            # the page itself holds nothing
            assert (await client.get("/dashboard")).status_code == 200
            browser = {"accept": "text/html"}
            assert (await client.get("/", headers=browser)).status_code == 200
            assert (await client.get("/chat/app.js")).status_code == 200
            # what programs get there names the server's version
            assert (await client.get("/")).status_code == 401
            assert (await client.get("/v1/models", headers=browser)).status_code == 401
            mine = "what only the first tenant may see"
            for key, content in ((FIRST, mine), (SECOND, "hello")):
                body = chat(content, max_tokens=2)
                reply = await client.post("/v1/chat/completions", json=body, headers=bearer(key))
                assert reply.status_code == 200, reply.text
            job = await client.post(
                "/v1/infer",
                json={"prompt": "later", "max_tokens": 2},
                headers=bearer(FIRST) | {"prefer": "respond-async"},
            )
            assert job.status_code == 202, job.text
            hello, first = await looked(client, FIRST)
            assert hello["view"] == "tenant" and not hello["controls"] and hello["asks_key"]
            tenants = {receipt["tenant"] for receipt in first["receipts"]}
            assert len(tenants) == 1
            assert [item["job_id"] for item in first["jobs"]["data"]] == [job.json()["job_id"]]
            for hidden in ("engines", "adapters", "residency", "ensemble", "audit"):
                assert hidden not in first
            _, second = await looked(client, SECOND)
            others = {receipt["tenant"] for receipt in second["receipts"]}
            assert len(others) == 1 and others != tenants and not second["jobs"]["data"]
            hello, whole = await looked(client, ADMIN)
            assert hello["view"] == "operator" and hello["controls"]
            assert tenants | others <= {receipt["tenant"] for receipt in whole["receipts"]}
            assert {item["specialist"] for item in whole["specialists"]} == {"tiny", "experts"}
            assert whole["engines"] and whole["server"]["config_digest"]
            # no text of a caller, no key
            text = json.dumps([first, second, whole])
            assert mine not in text and not any(key in text for key in (ADMIN, FIRST, SECOND))
            # an admin key gives no right to send requests, here as everywhere
            reply = await client.post("/v1/chat/completions", json=chat(), headers=bearer(ADMIN))
            assert reply.status_code == 401

    asyncio.run(test())


def test_where_moe_experts_are(home: Path) -> None:
    async def test() -> None:
        async with serving(home) as (_, client):
            body = chat("hello", model="experts", max_tokens=3)
            await client.post("/v1/chat/completions", json=body, headers=bearer(FIRST))
            # the first look asks the worker, a later one shows what it said
            residency: dict[str, Any] = {}
            for _ in range(100):
                _, seen = await looked(client, ADMIN)
                if residency := seen["residency"]:
                    break
                await asyncio.sleep(0.1)
            [found] = residency.values()
            assert found["layers"] == [0, 1, 2] and found["num_experts"] == 8
            assert len(found["tiers"]) == 24 and found["strategy"] == "lru"
            # four slots on the device, nothing in RAM
            assert found["tiers"].count("2") == 4 and found["tiers"].count("0") == 20
            assert len(found["hit_rates"]) == 3

    asyncio.run(test())


def test_a_request_in_flight_says_where_it_is(home: Path) -> None:
    async def test() -> None:
        async with serving(home) as (pipeline, client):
            sections = sections_of(pipeline)

            async def in_flight() -> list[dict[str, Any]]:
                found: list[dict[str, Any]]
                found = json.loads((await sections.read([None]))[None]["requests"])["data"]
                return found

            body = chat("hello there", max_tokens=60, ignore_eos=True)
            asked = [
                asyncio.create_task(
                    client.post("/v1/chat/completions", json=body, headers=bearer(FIRST))
                )
                for _ in range(3)
            ]
            rows: list[dict[str, Any]] = []
            while not all(task.done() for task in asked):
                await asyncio.sleep(0.005)
                rows += await in_flight()
            stages = {row["stage"] for row in rows}
            assert stages <= {"preparing", "waiting", "prompt", "answering", "checking"}
            answering = [row for row in rows if row["stage"] == "answering"]
            assert max(row["tokens"] for row in answering) > 1, stages
            assert all(row["max_tokens"] == 60 and row["replica"] for row in answering)
            assert all(task.result().status_code == 200 for task in asked)
            assert await in_flight() == []

    asyncio.run(test())


def sections_of(pipeline: Pipeline) -> DashboardSections:
    return DashboardSections(
        pipeline.fleet,
        pipeline.ensemble,
        pipeline.jobs,
        pipeline.activity,
        pipeline.encoders,
        pipeline.health,
    )


def test_a_request_that_waits_says_why(home: Path) -> None:
    """From the parts of a real request: its worker is down, its place is taken, its tokens stop."""

    async def test() -> None:
        async with serving(home) as (pipeline, client):
            body = chat("hello there", max_tokens=40, ignore_eos=True)
            asked = asyncio.create_task(
                client.post("/v1/chat/completions", json=body, headers=bearer(FIRST))
            )
            while not pipeline.activity.open:
                await asyncio.sleep(0.001)
            [request] = pipeline.activity.open.values()
            assert (await asked).status_code == 200
            [slo, _] = pipeline.ensemble.report()
            assert slo["specialist"] == "tiny"
            inputs = StageInputs(slo, {request.run.replica: 0.9})
            # it has ended, and its parts say so
            assert stage_of(request, inputs, time.monotonic()).name == "checking"
            meter = RequestMeter(request.run.served.series, time.monotonic(), 1)
            waiting = FollowedRequest(pipeline.activity, request.run, meter)
            stage = stage_of(waiting, inputs, time.monotonic() + 30)
            assert stage.name == "waiting" and stage.is_slow and "step" in stage.why
            [replica] = request.run.served.replicas.members
            assert isinstance(replica, InprocReplica)
            replica._draining, replica._running = False, False
            stage = stage_of(waiting, inputs, time.monotonic())
            assert stage.why.startswith("its worker is ")
            replica._running = True
            meter.observe([Started(request.run.request.id, replica.name, 30, 10)])
            stage = stage_of(waiting, StageInputs(slo, {}), time.monotonic())
            assert stage.name == "prompt" and "30 tokens, 10 cached" in stage.why
            stage = stage_of(waiting, inputs, time.monotonic())
            assert stage.why == "waits for MoE experts 90% of the time"
            meter.observe([Delta(request.run.request.id, 0, "a", (1,))])
            stage = stage_of(waiting, StageInputs(slo, {}), time.monotonic())
            assert stage.name == "answering" and not stage.why and not stage.is_slow
            stage = stage_of(waiting, StageInputs(slo, {}), time.monotonic() + 30)
            assert stage.is_slow and stage.why == "no token for 30 s"

    asyncio.run(test())


def test_looking_costs_one_snapshot_a_second_for_all(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "INTERVAL_S", 0.1)

    async def test() -> None:
        async with serving(home) as (pipeline, _):
            feed = pipeline.dashboard
            await asyncio.sleep(0.3)
            assert feed.num_snapshots == 0

            async def look(tenant: str | None, count: int) -> list[dict[str, Any]]:
                async with aclosing(feed.frames(feed.listen(tenant, lambda: True))) as stream:
                    return [frames(await anext(stream))[0][1] for _ in range(count)]

            looks = [look(None, 2) for _ in range(MAX_OF_ONE)]
            seen = await asyncio.gather(*looks)
            # all were served by the same few snapshots
            assert feed.num_snapshots <= 3
            assert all("specialists" in found[1] and "engines" in found[1] for found in seen)
            assert feed.num_listeners == 0
            await asyncio.sleep(0.3)
            before = feed.num_snapshots
            await asyncio.sleep(0.3)
            assert feed.num_snapshots == before
            # what did not change is not sent again; that nothing changed is said now and then
            [_, first, *later] = await look(None, 4)
            assert set(first) > {"at", "server", "specialists", "adapters", "jobs"}
            assert all("adapters" not in item and "server" not in item for item in later)

    asyncio.run(test())


def test_listeners_are_limited_and_end(home: Path) -> None:
    async def test() -> None:
        async with serving(home) as (pipeline, client):
            feed = pipeline.dashboard
            held = [feed.listen("one", lambda: True) for _ in range(MAX_OF_ONE)]
            with pytest.raises(Overloaded, match="dashboards are open"):
                feed.listen("one", lambda: True)
            held += [
                feed.listen(f"t{number // MAX_OF_ONE}", lambda: True)
                for number in range(MAX_LISTENERS - MAX_OF_ONE)
            ]
            reply = await client.get("/v1/dashboard/events", headers=bearer(ADMIN))
            assert reply.status_code == 429 and reply.headers["retry-after"]
            for listener in held:
                feed.leave(listener)
            feed.leave(held[0])
            assert feed.num_listeners == 0
            # a key that is revoked ends its stream
            allowed = [True]
            async with aclosing(feed.frames(feed.listen("one", lambda: allowed[0]))) as stream:
                await anext(stream)
                await anext(stream)
                allowed[0] = False
                assert b'"reason":"key"' in [frame async for frame in stream][-1]
            # and so does the end of the server
            async with aclosing(feed.frames(feed.listen(None, lambda: True))) as stream:
                await anext(stream)
                await pipeline.drain()
                assert b'"reason":"drain"' in [frame async for frame in stream][-1]
            with pytest.raises(Overloaded):
                feed.listen(None, lambda: True)
            assert feed.num_listeners == 0

    asyncio.run(test())


def test_a_reload_is_in_the_audit_log_and_takes_keys_away(home: Path) -> None:
    async def test() -> None:
        async with serving(home) as (_, client):
            reply = await client.post("/v1/config/reload", headers=bearer(ADMIN))
            assert reply.status_code == 200, reply.text
            _, seen = await looked(client, ADMIN)
            assert seen["audit"][0]["kind"] == "config_reloaded"
            assert seen["audit"][0]["actor"].startswith("admin ")
            assert ADMIN not in json.dumps(seen)
            listed = await client.get("/v1/ensemble/audit", headers=bearer(ADMIN))
            assert listed.json()["data"][0]["kind"] == "config_reloaded"

    asyncio.run(test())


def test_a_stream_of_a_real_server(server: Served) -> None:
    """Without keys everything is seen, and nothing can be changed."""
    with httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("GET", "/v1/dashboard/events") as stream:
            assert stream.headers["cache-control"] == "no-store"
            raw, asked = b"", False
            for part in stream.iter_bytes():
                raw += part
                found = frames(raw[: raw.rfind(b"\n\n") + 2])
                if not asked and any(
                    name == "update" and "engines" in data for name, data in found
                ):
                    asked = True
                    reply = server.post("/v1/chat/completions", chat("hello", max_tokens=2))
                    number = reply.headers["x-coterie-receipt"]
                receipts = [item for _, data in found for item in data.get("receipts", ())]
                if asked and any(item["request_id"] == number for item in receipts):
                    break
        hello = found[0][1]
        assert hello["view"] == "local" and not hello["controls"] and not hello["has_admins"]
