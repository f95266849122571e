"""Who answers `auto` on the three APIs: by a declared intent, by the trained router, and by a
version that is promoted while the server runs."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from coterie.api.app import create_app
from coterie.core.config import load
from coterie.routing.classify.features import prompt_input
from coterie.routing.classify.traffic import LabelledPrompt, input_hash
from coterie.routing.classify.train import train
from coterie.routing.classify.versions import RouterVersions
from coterie.routing.match.embed import static
from coterie.service.build import build
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import own_home

SETTINGS = """
[engine]
kv_bytes = "8MB"
threads = 1
[ensemble]
fresh_shadow = 0.0
[[intents]]
name = "query"
[[specialists]]
name = "base"
model = "{model}"
[[specialists]]
name = "sql"
model = "{model}"
intents = ["query"]
"""
SQL = "Write SQL: how many castles are older than 300? castles(name, age)"
MODEL = "x-coterie-specialist"


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = own_home(temporary_folder("coterie-home-"))
    monkeypatch.setenv("COTERIE_HOME", str(home))
    path = home / "coterie.toml"
    path.write_text(SETTINGS.format(model=tiny_checkpoint("llama")))
    yield path
    shutil.rmtree(home)


@asynccontextmanager
async def client_of(file: Path) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
    config = load(file)
    pipeline = build(config, inproc=True)
    await pipeline.start()
    try:
        app = create_app(pipeline, config)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, app
    finally:
        await pipeline.close()


def labelled(first: int, last: int) -> list[LabelledPrompt]:
    made = []
    for number in range(first, last):
        for text, label in (
            (f"Write SQL: how many boats are older than {number}? boats(name, age)", "query"),
            (f"What do you know about the year {number}, and about boats?", "reject"),
        ):
            given = prompt_input(text, "", static())
            made.append(LabelledPrompt(given, label, input_hash(given)))
    return made


async def answer(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    headers = {"x-coterie-intent": fields.pop("header")} if "header" in fields else {}
    text = fields.pop("text", SQL)
    body: dict[str, Any] = {"prompt": text, "max_tokens": 2}
    if path != "/v1/infer":
        body = {"model": "auto", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    return await client.post(path, json=body | fields, headers=headers)


def test_who_answers_on_every_api(file: Path) -> None:
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/infer")

    async def test() -> None:
        async with client_of(file) as (client, app):
            for path in paths:
                plain = await answer(client, path)
                assert (plain.status_code, plain.headers[MODEL]) == (200, "base"), plain.text
                for fields in ({"intent": "query"}, {"header": "query"}):
                    assert (await answer(client, path, **fields)).headers[MODEL] == "sql"
                # the body counts
                both = await answer(client, path, intent="base", header="query")
                assert both.headers[MODEL] == "base"
                for fields in ({"intent": "x"}, {"header": "x"}, {"header": "a b"}):
                    wrong = await answer(client, path, **fields)
                    assert wrong.status_code == 400 and "intent" in wrong.text
            store = RouterVersions(file.parent / "state" / "router")
            version = store.add(train(labelled(0, 20))).version
            store.promote(version, labelled(100, 140))
            await app.state.reloader.reload()
            for path in paths:
                assert (await answer(client, path)).headers[MODEL] == "sql"
                other = await answer(client, path, text="What do you know about boats?")
                assert other.headers[MODEL] == "base"
                named = await answer(client, path, model="base")
                assert named.headers[MODEL] == "base"
            shown = json.loads((await answer(client, "/v1/infer", explain=True)).text)["plan"]
            assert shown["reasoning_trace"]["router_version"] == version
            assert "classified" not in shown["reasoning_trace"]
            assert "classified as query" in shown["reasons"][0]

    asyncio.run(test())
