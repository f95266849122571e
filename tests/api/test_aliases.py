"""Model aliases: who answers, under which name, for whom, and when the settings change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.api.app import create_app
from coterie.cli.main import main
from coterie.core.config import Config, load
from coterie.core.errors import ConfigError
from coterie.service.build import build
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.http_peer import DONE, HEAD, Peer, chunk, saying, serving
from tests.helpers.serving.server_process import own_home

KEYS = {
    "free": "key-of-nobody",
    "acme": "key-of-acme",
    "poor": "key-of-poor",
    "late": "key-of-late",
}
SETTINGS = """
[server]
api_key_file = "{home}/keys.txt"
admin_key_file = "{home}/admins.txt"
[engine]
kv_bytes = "8MB"
threads = 1
[[specialists]]
name = "near"
model = "{model}"
[[specialists]]
name = "far"
remote = {{ url = "{url}", model = "big", context = 512 }}
[[specialists]]
name = "third"
model = "{model}"
context = 256
[[tenants]]
name = "late"
specialists = ["third"]
[[tenants]]
name = "acme"
specialists = ["near"]
[[tenants]]
name = "poor"
requests_per_minute = 1
[aliases]
"claude-*" = "auto"
"claude-opus-*" = "far"
"gpt-4o" = "near"
"llama3.2:*" = "near"
{more}
"""
TALK: dict[str, Any] = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello there"}]}
# the same for Ollama's API
SHORT: dict[str, Any] = {"messages": TALK["messages"], "options": {"num_predict": 4}}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = own_home(tmp_path / "home")
    monkeypatch.setenv("COTERIE_HOME", str(home))
    (home / "admins.txt").write_text("admin\n")
    lines = [KEYS["free"], *(f"{KEYS[name]} tenant={name}" for name in ("acme", "poor", "late"))]
    (home / "keys.txt").write_text("\n".join(lines) + "\n")
    yield home


def config_of(home: Path, url: str, more: str = "") -> Config:
    file = home / "coterie.toml"
    model = tiny_checkpoint("llama")
    file.write_text(SETTINGS.format(home=home, model=model, url=url, more=more))
    return load(file)


class Door:
    def __init__(self, client: httpx.AsyncClient, peer: Peer, home: Path) -> None:
        self.client, self.peer, self.home = client, peer, home

    async def post(self, path: str, body: dict[str, Any], key: str = "free") -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS.get(key, key)}"}
        return await self.client.post(path, json=body, headers=headers)

    async def get(self, path: str, key: str = "free") -> Any:
        headers = {"authorization": f"Bearer {KEYS[key]}"}
        return (await self.client.get(path, headers=headers)).json()

    async def model(self, name: str, key: str = "free") -> Any:
        """The status, or the name in the answer."""
        reply = await self.post("/v1/chat/completions", TALK | {"model": name}, key)
        return reply.json()["model"] if reply.status_code == 200 else reply.status_code


@asynccontextmanager
async def opened(home: Path, *pieces: bytes) -> AsyncIterator[Door]:
    said = pieces or (HEAD, chunk("far"), chunk(end="stop"), DONE)
    async with serving(saying(*said)) as peer:
        config = config_of(home, peer.url)
        pipeline = build(config, inproc=True)
        await pipeline.start()
        try:
            app = create_app(pipeline, config, read=lambda: load(home / "coterie.toml"))
            transport = httpx.ASGITransport(app)
            url = "http://localhost"
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                yield Door(client, peer, home)
        finally:
            await pipeline.close()


def test_who_answers(files: Path) -> None:
    async def test() -> None:
        async with opened(files) as door:
            assert await door.model("claude-3-5-haiku") == "near"
            assert await door.model("claude-opus-9") == "far"
            assert await door.model("gpt-4o") == "near"
            assert await door.model("near") == "near"
            assert await door.model("gpt-4o-mini") == 404
            # a tenant needs the right to use what an alias means
            assert await door.model("gpt-4o", "acme") == "near"
            assert await door.model("claude-haiku", "acme") == "near"
            assert await door.model("claude-opus-9", "acme") == 403
            body = TALK | {"model": "claude-3-5-haiku"}
            message = await door.post("/v1/messages", body)
            assert message.json()["model"] == "near"
            assert message.json()["coterie"]["receipt"]["plan"]["model"] == "claude-3-5-haiku"
            counted = await door.post("/v1/messages/count_tokens", body)
            assert counted.json()["input_tokens"] > 5
            asked = {"model": "gpt-4o", "input": "hello", "max_output_tokens": 4}
            for more in ({}, {"background": True}):
                reply = await door.post("/v1/responses", asked | more)
                assert reply.json()["model"] == "near"
            streamed = await door.post("/api/chat", SHORT | {"model": "llama3.2:3b"})
            assert '"model":"near"' in streamed.text
            infer = {"prompt": "hello", "model": "claude-x", "max_tokens": 4}
            assert (await door.post("/v1/infer", infer)).status_code == 200

    asyncio.run(test())


def test_a_tenant_that_may_not_use_the_first(files: Path) -> None:
    """Prompts of tokens are for the specialist that answers, templates for those who may use it."""

    async def test() -> None:
        async with opened(files) as door:
            turn = TALK["messages"]
            path: str
            body: dict[str, Any]
            for path, body in (
                ("/completion", {"prompt": [5, 6], "n_predict": 2}),
                (
                    "/api/generate",
                    {"model": "auto", "prompt": "x", "context": [5], "stream": False},
                ),
                (
                    "/api/generate",
                    {"model": "claude-x", "prompt": "x", "context": [5], "stream": False},
                ),
            ):
                reply = await door.post(path, body, "late")
                assert reply.status_code == 200 and reply.json()["model"] == "third", reply.text
            assert (await door.get("/props", "late"))["model_alias"] == "third"
            tokens = await door.post("/tokenize", {"prompt": "x"}, "late")
            assert tokens.json()["max_model_len"] == 256
            for path, body in (
                ("/apply-template", {"messages": turn}),
                ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [5]}),
                ("/v1/messages/count_tokens", {"messages": turn}),
                ("/v1/responses/input_tokens", {"input": "x"}),
            ):
                reply = await door.post(path, body | {"model": "near"}, "late")
                assert reply.status_code == 403, (path, reply.text)
                assert (await door.post(path, body | {"model": "third"}, "late")).status_code == 200

    asyncio.run(test())


def test_which_are_listed(files: Path) -> None:
    async def test() -> None:
        async with opened(files) as door:
            cards = {card["id"]: card for card in (await door.get("/v1/models"))["data"]}
            assert set(cards) == {"near", "far", "third", "auto", "gpt-4o"}
            assert cards["gpt-4o"]["root"] == "near"
            assert cards["gpt-4o"]["max_model_len"] == cards["near"]["max_model_len"]
            theirs = {card["id"] for card in (await door.get("/v1/models", "acme"))["data"]}
            assert theirs == {"near", "gpt-4o"}
            one = await door.get("/v1/models/claude-opus-4")
            assert (one["id"], one["root"], one["max_model_len"]) == ("claude-opus-4", "far", 512)
            tags = {model["name"] for model in (await door.get("/api/tags"))["models"]}
            assert tags == {f"{name}:latest" for name in cards}
            running = (await door.get("/api/ps"))["models"]
            assert {model["name"] for model in running} == {
                "near:latest",
                "far:latest",
                "third:latest",
            }

    asyncio.run(test())


def test_a_reload_changes_them(files: Path) -> None:
    async def test() -> None:
        async with opened(files) as door:
            assert await door.model("o3") == 404
            config_of(files, door.peer.url, '"o?" = "far"')
            done = await door.post("/v1/config/reload", {}, "admin")
            assert done.status_code == 200 and done.json()["changed"] == ["aliases"]
            assert await door.model("o3") == "far"
            config_of(files, door.peer.url, '"o?" = "nowhere"')
            refused = await door.post("/v1/config/reload", {}, "admin")
            assert refused.status_code == 400 and "nowhere" in refused.text
            assert await door.model("o3") == "far"

    asyncio.run(test())


def test_faults_in_ollamas_shape(files: Path) -> None:
    """An error in the middle of a stream, a deadline that ends an answer, and a quota."""

    async def test() -> None:
        async with opened(files, HEAD, chunk("one"), chunk("two")) as door:
            body = SHORT | {"model": "far"}
            *parts, last = (await door.post("/api/chat", body)).text.splitlines()
            assert "one" in parts[0] and last.startswith('{"error":"')
            *parts, last = (
                await door.post("/api/generate", {"model": "far", "prompt": "x"})
            ).text.splitlines()
            assert '"response":"one"' in parts[0] and last.startswith('{"error":"')
            late = await door.client.post(
                "/api/chat",
                json=SHORT | {"model": "near", "stream": False},
                headers={"authorization": f"Bearer {KEYS['free']}", "x-deadline-ms": "1"},
            )
            assert late.status_code == 200 and late.json()["done_reason"] == "length"
            first, second = [
                await door.post("/api/chat", SHORT | {"model": "near", "stream": False}, "poor")
                for _ in range(2)
            ]
            assert (first.status_code, second.status_code) == (200, 429)
            assert list(second.json()) == ["error"] and int(second.headers["retry-after"]) > 0
            assert second.headers["x-ratelimit-remaining-requests"] == "0"
            # the tokens of a model elsewhere are not known
            for path, more in (
                ("/api/chat", {"truncate": True, "messages": LONG}),
                ("/api/generate", {"prompt": "x", "suffix": "y"}),
                ("/api/generate", {"prompt": "x", "context": [1]}),
            ):
                reply = await door.post(path, {"model": "far"} | more)
                assert reply.status_code == 400 and "another server" in reply.json()["error"]

    asyncio.run(test())


LONG = [{"role": "user", "content": "word " * 300}] * 2
FAULTS = {
    '"near" = "far"': "aliases.near: is the name of a model",
    '"auto" = "far"': "aliases.auto: is the name of a model",
    '"x" = "nobody"': "there is no model 'nobody'",
    '"x" = "near:nobody"': "there is no model 'nobody'",
    '"x" = "gpt-4o"': "'gpt-4o' is an alias itself; write 'near'",
    '"x" = "claude-3"': "'claude-3' is an alias itself; write 'auto'",
    '"x" = ""': "must be the name of a model",
    '"x" = 5': "must be the name of a model",
    '"a b" = "near"': "a name has letters",
}


@pytest.mark.parametrize("line", FAULTS)
def test_faults_are_found_before_the_start(
    files: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        config_of(files, "http://127.0.0.1:9/v1", line)
    except ConfigError as error:
        assert FAULTS[line] in error.message
    assert main(["config", "check", str(files / "coterie.toml")]) == 2
    assert FAULTS[line] in capsys.readouterr().out


def test_shown_settings_are_read_again(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(files, "http://127.0.0.1:9/v1")
    assert main(["config", "show", str(files / "coterie.toml")]) == 0
    shown = files / "shown.toml"
    shown.write_text(capsys.readouterr().out)
    assert load(shown).aliases == config.aliases
