"""Settings that change while a server runs: fixed experts, tenants, quotas; all at once or none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.api.app import create_app
from coterie.api.auth import tenant_of
from coterie.core.config import load
from coterie.core.errors import ConfigError, Unauthenticated
from coterie.routing.classify.features import prompt_input
from coterie.routing.classify.traffic import LabelledPrompt, input_hash
from coterie.routing.classify.train import train
from coterie.routing.classify.versions import RouterVersions
from coterie.routing.match.embed import static
from coterie.service.build import build
from tests.helpers.serving.app_with_experts import ADMIN, MODEL, Packer
from tests.helpers.serving.routed_pipeline import ask
from tests.helpers.serving.server_process import own_home

ACME, OTHER, PLAIN = "key-of-acme", "key-of-other", "key-of-nobody"
# {fixed}: the experts of `sql`; {priority}: of the tenant; {more}: anything else
FILE = """
[server]
api_key_file = "{folder}/callers.txt"
admin_key_file = "{folder}/admins.txt"
[engine]
kv_bytes = "8MB"
threads = 1
[adapters]
device_bytes = "4MB"
[[specialists]]
name = "general"
model = "{model}"
[[specialists]]
name = "sql"
model = "{model}"
adapters = {fixed}
[[tenants]]
name = "acme"
priority = {priority}
{more}
"""


class ReloadApp(Packer):
    """An application whose settings are in a file that the test rewrites."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        super().__init__(folder)
        self.runner, self.file = runner, folder / "coterie.toml"
        (folder / "admins.txt").write_text(f"{ADMIN}\n")
        self.write_keys(f"{ACME} tenant=acme\n{PLAIN}\n")
        self.write()
        config = load(self.file)
        self.pipeline = build(config, inproc=True)
        self.app = create_app(self.pipeline, config, read=lambda: load(self.file))
        runner.run(self.pipeline.start())
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self.trust(folder / "home" / "state" / "trust.json")
        for index, name in enumerate(("one", "two")):
            reply = self.send("POST", "/v1/experts", self.package(name, seed=index))
            assert reply.status_code == 201, reply.text

    def write(self, fixed: tuple[str, ...] = (), priority: int = 5, more: str = "") -> None:
        text = FILE.format(
            folder=self.folder, model=MODEL, fixed=json.dumps(list(fixed)), priority=priority,
            more=more,
        )  # fmt: skip
        self.file.write_text(text)

    def write_keys(self, text: str) -> None:
        (self.folder / "callers.txt").write_text(text)

    async def asend(
        self, method: str, path: str, body: Any = None, key: str = ADMIN, **more: str
    ) -> Any:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        headers = {
            "authorization": f"Bearer {key}",
            "content-type": kind,
            "x-coterie-debug": "true",
        }
        return await self.client.request(method, path, content=raw, headers=headers | more)

    def send(self, method: str, path: str, body: Any = None, key: str = ADMIN, **more: str) -> Any:
        return self.runner.run(self.asend(method, path, body, key, **more))

    def reload(self) -> Any:
        return self.send("POST", "/v1/config/reload")

    async def achat(self, model: str = "sql", key: str = ACME, **fields: Any) -> Any:
        messages = [{"role": "user", "content": "hello there"}]
        body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
        return await self.asend("POST", "/v1/chat/completions", body | fields, key)

    def chat(self, model: str = "sql", key: str = ACME, **fields: Any) -> Any:
        return self.runner.run(self.achat(model, key, **fields))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReloadApp]:
    folder = tmp_path_factory.mktemp("reload")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("COTERIE_HOME", str(own_home(folder / "home")))
        app = ReloadApp(folder, runner)
        yield app
        runner.run(app.client.aclose())
        runner.run(app.pipeline.close())


@pytest.fixture(autouse=True)
def as_at_start(app: ReloadApp) -> Iterator[None]:
    yield
    app.write_keys(f"{ACME} tenant=acme\n{PLAIN}\n")
    app.write()
    assert app.reload().status_code == 200


def test_fixed_experts_run_with_every_request(app: ReloadApp) -> None:
    before = app.chat()
    assert before.status_code == 200 and "x-coterie-adapter" not in before.headers
    app.write(fixed=("one=0.5",))
    changed = app.reload().json()
    assert changed["changed"] == ["specialists.sql.adapters"]
    assert changed["digest"] != changed["previous_digest"]
    after = app.chat()
    assert after.headers["x-coterie-adapter"].startswith("one@1.0.0#")
    assert "x-coterie-adapter" not in app.chat("general").headers
    # those of a request come behind them; the same one is not applied twice
    both = app.chat("sql:two").headers["x-coterie-adapter"]
    assert [item.partition("@")[0] for item in both.split(",")] == ["one", "two"]
    again = app.chat("sql:one").headers["x-coterie-adapter"]
    assert again == after.headers["x-coterie-adapter"]
    shown = app.send("GET", "/v1/config").json()
    assert shown["digest"] == changed["digest"]
    assert shown["fixed_experts"]["sql"][0]["weight"] == 0.5
    # /v1/models tells of the specialist, not of an expert
    card = app.send("GET", "/v1/models/sql", key=ACME).json()
    assert card["id"] == "sql" and card["parent"] is None


def test_the_answer_of_a_fixed_expert_is_that_of_the_named_one(app: ReloadApp) -> None:
    named = app.chat("general:two", max_tokens=12).json()["choices"][0]["message"]
    base = app.chat("general", max_tokens=12).json()["choices"][0]["message"]
    app.write(fixed=("two",))
    app.reload()
    assert app.chat("sql", max_tokens=12).json()["choices"][0]["message"] == named != base


def test_a_fixed_expert_keeps_its_digest(app: ReloadApp) -> None:
    reply = app.send("POST", "/v1/experts", app.package("moving", seed=5))
    assert reply.status_code == 201
    app.write(fixed=("moving",))
    app.reload()
    first = app.chat().headers["x-coterie-adapter"]
    reply = app.send("POST", "/v1/experts", app.package("moving", "2.0.0", seed=6))
    assert reply.status_code == 201
    # staged
    app.reload()
    assert app.chat().headers["x-coterie-adapter"] == first
    reply = app.send("PATCH", "/v1/experts/moving", {"version": "2.0.0"})
    assert reply.status_code == 200
    assert app.chat().headers["x-coterie-adapter"] == first
    app.reload()
    second = app.chat().headers["x-coterie-adapter"]
    assert second != first and second.startswith("moving@2.0.0#")
    # removed from the registry, it still answers; the next reload is refused
    assert app.send("DELETE", "/v1/experts/moving").status_code == 200
    assert app.chat(max_tokens=5).headers["x-coterie-adapter"] == second
    refused = app.reload()
    assert refused.status_code == 400 and "'moving' is not installed" in refused.text
    assert app.chat(max_tokens=6).status_code == 200


@pytest.mark.parametrize(
    ("fixed", "more", "words"),
    [
        (("onee",), "", "'onee' is not installed; did you mean 'one'?"),
        (("one@9",), "", "'one' has no version '9' here"),
        (("one", "one"), "", "listed twice"),
        (("one=x",), "", "'x' is no number"),
        (("one=99",), "", "a weight from -10 to 10"),
        ((), "[engine]\nthreads = 2", "not valid TOML"),
        ((), '[[specialists]]\nname = "new"', "cannot change without a restart: specialists"),
        ((), "[routing]\nthreshhold = 1", "did you mean 'threshold'?"),
        ((), '[[tenants]]\nname = "x"\nspecialists = ["sqll"]', "did you mean 'sql'?"),
        ((), '[[validators]]\nname = "v"\ncommand = ["/nowhere"]\ntask_types = ["extraction"]',
         "there is no program '/nowhere'"),
    ],
)  # fmt: skip
def test_a_wrong_file_changes_nothing(
    app: ReloadApp, fixed: tuple[str, ...], more: str, words: str
) -> None:
    before = app.send("GET", "/v1/config").json()
    app.write(fixed, priority=1, more=more)
    refused = app.reload()
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert app.send("GET", "/v1/config").json() == before
    assert "x-coterie-adapter" not in app.chat().headers


def test_a_reload_tells_what_changed_beside_the_settings(app: ReloadApp) -> None:
    assert app.reload().json()["changed"] == []
    routers = RouterVersions(app.folder / "home" / "state" / "router")
    rows = []
    for number in range(24):
        for text, label in (("Count the orders of customer", "sql"), ("Tell me about", "reject")):
            given = prompt_input(f"{text} {number}", "", static())
            rows.append(LabelledPrompt(given, label, input_hash(given)))
    version = routers.add(train(rows)).version
    routers._use([version], "tests", {})
    assert app.reload().json()["changed"] == [f"trained router none -> {version}"]
    routers._use([], "tests", {})
    app.write_keys(f"{ACME} tenant=acme\n{PLAIN} priority=9\n")
    assert app.reload().json()["changed"] == [f"trained router {version} -> none", "keys"]
    # a fixed expert with another current version
    for version, seed in (("1.0.0", 7), ("2.0.0", 8)):
        app.send("POST", "/v1/experts", app.package("mover", version, seed=seed))
    app.write(fixed=("mover",))
    app.reload()
    app.send("POST", "/v1/experts/mover@2.0.0/promote")
    app.send("PATCH", "/v1/experts/mover", {"version": "1.0.0"})
    assert app.reload().json()["changed"] == ["specialists.sql.adapters"]


def test_a_structure_needs_no_declared_intent(app: ReloadApp) -> None:
    text = app.file.read_text().replace("[[tenants]]", 'intents = ["stack-trace"]\n[[tenants]]', 1)
    app.file.write_text(text)
    assert app.reload().status_code == 200
    trace = 'Traceback (most recent call last)\n  File "a.py", line 3, in main\nValueError: x'
    messages = [{"role": "user", "content": trace}]
    reply = app.chat("auto", messages=messages)
    assert reply.headers["x-coterie-specialist"] == "sql"
    assert "stack-trace" in reply.headers["x-coterie-reasons"]
    app.file.write_text(text.replace("stack-trace", "stack-trade"))
    refused = app.reload()
    assert refused.status_code == 400 and "did you mean 'stack-trace'?" in refused.text


def test_what_needs_a_restart_is_refused_by_name(app: ReloadApp) -> None:
    text = app.file.read_text().replace(
        'name = "sql"', 'name = "sql"\nblock_size = 8\nreplicas = 2'
    )
    app.file.write_text(text.replace("threads = 1", "threads = 1\nmax_queue = 9"))
    message = app.reload().json()["error"]["message"]
    names = "engine.max_queue, specialists.sql.block_size, specialists.sql.replicas"
    assert message == f"cannot change without a restart: {names}"


def test_only_admins_reload(app: ReloadApp) -> None:
    for path, method in (("/v1/config", "GET"), ("/v1/config/reload", "POST")):
        assert app.send(method, path, key=ACME).status_code == 401


def test_tenants_keys_and_priorities(app: ReloadApp) -> None:
    assert app.chat(key=OTHER).status_code == 401
    app.write_keys(f"{ACME} tenant=acme\n{OTHER} tenant=acme\n{PLAIN}\n")
    app.write(priority=3)
    assert app.reload().json()["changed"] == ["tenants.acme.priority"]
    for key in (ACME, OTHER):
        assert app.chat(key=key, priority=-4).headers["x-coterie-priority"] == "3"
    assert app.chat(key=PLAIN, priority=-4).headers["x-coterie-priority"] == "5"
    # a key of a tenant that nobody has written down
    app.write_keys(f"{ACME} tenant=acme\n{OTHER} tenant=acmee\n")
    refused = app.reload()
    assert refused.status_code == 400 and "the tenant 'acmee'" in refused.text
    assert OTHER not in refused.text and app.chat(key=OTHER).status_code == 200
    app.write_keys(f"{OTHER} tenant=acme\n")
    app.reload()
    assert app.chat(key=ACME).status_code == 401 and app.chat(key=OTHER).status_code == 200


def test_a_key_that_is_gone_when_its_request_is_planned(app: ReloadApp) -> None:
    """It was received with the settings before; those of now do not know it."""
    received = replace(ask(), tenant=tenant_of(PLAIN.encode()))
    assert app.pipeline.snapshot.within_rights(received).limits.priority == 5
    app.write_keys(f"{ACME} tenant=acme\n")
    app.reload()
    with pytest.raises(Unauthenticated, match="any more"):
        app.pipeline.plan(received)
    # a job was accepted, and is answered
    job = replace(received, submitted_at=1.0)
    assert app.pipeline.snapshot.within_rights(job) is job


def test_specialists_of_a_tenant(app: ReloadApp) -> None:
    app.write(more='specialists = ["sql"]')
    app.reload()
    assert app.chat("sql").status_code == 200
    refused = app.chat("general")
    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"
    assert "may not use the specialist `general`" in refused.text
    job = {"prompt": "hello", "model": "general"}
    for prefer in ("", "respond-async"):
        asked = app.send("POST", "/v1/infer", job, key=ACME, prefer=prefer)
        assert asked.status_code == 403, asked.text
    # nobody named: the first that it may use; an expert runs on what it may use
    for model in ("auto", "two"):
        assert app.chat(model).headers["x-coterie-specialist"] == "sql"
    listed = [item["id"] for item in app.send("GET", "/v1/models", key=ACME).json()["data"]]
    assert "sql" in listed and "general" not in listed
    assert app.send("GET", "/v1/models/general", key=ACME).status_code == 403
    assert app.chat("general", key=PLAIN).status_code == 200


def test_quotas_and_their_headers(app: ReloadApp) -> None:
    app.write(more="requests_per_minute = 3\ntokens_per_minute = 1000")
    app.reload()
    reply = app.chat()
    assert reply.headers["x-ratelimit-limit-requests"] == "3"
    assert reply.headers["x-ratelimit-remaining-requests"] == "2"
    assert reply.headers["x-ratelimit-reset-requests"] == "20s"
    assert reply.headers["x-ratelimit-limit-tokens"] == "1000"
    used = reply.json()["usage"]["total_tokens"]
    assert 1000 - int(reply.headers["x-ratelimit-remaining-tokens"]) in (used, used - 1)
    assert "x-ratelimit-limit-requests" not in app.chat(key=PLAIN).headers
    body = {"model": "sql", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    claude = app.send("POST", "/v1/messages", body, key=ACME)
    assert claude.headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert claude.headers["anthropic-ratelimit-tokens-limit"] == "1000"
    assert claude.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    app.chat()
    refused = app.chat()
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert 0 < int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-should-retry"] == "true"
    # once each, not a second time with the size of a queue
    names = [name for name, _ in refused.headers.multi_items() if name.startswith("x-ratelimit")]
    assert len(names) == len(set(names)) == 6
    job = app.send("POST", "/v1/infer", {"prompt": "hello"}, key=ACME)
    assert job.status_code == 429


def test_a_quota_of_tokens(app: ReloadApp) -> None:
    app.write_keys(f"{ACME} tenant=acme\n{OTHER} tenant=small\n{PLAIN}\n")
    app.write(more='[[tenants]]\nname = "small"\ntokens_per_minute = 100')
    assert app.reload().status_code == 200
    refused = app.chat(key=OTHER, messages=[{"role": "user", "content": "word " * 200}])
    assert refused.status_code == 400 and "100 tokens a minute" in refused.text
    assert app.chat(key=OTHER, max_tokens=5).status_code == 200
    last = app.chat(key=OTHER, max_tokens=100)
    assert app.chat(key=ACME).status_code == 200
    assert last.status_code == 429 and last.json()["error"]["type"] == "tokens"


def test_the_specialist_s_checks_judge_its_answers(app: ReloadApp) -> None:
    body = {"prompt": "say anything", "max_tokens": 4, "model": "sql"}
    text = app.file.read_text().replace("adapters = []", 'checks = ["json"]')
    app.file.write_text(text)
    assert app.reload().status_code == 200
    judged = app.send("POST", "/v1/infer", body, key=ACME).json()["validation"]
    assert judged["validator"] == "json" and not judged["valid"]


async def _storm(app: ReloadApp, flipping: asyncio.Task[None]) -> list[tuple[str, ...]]:
    """What the answers show of their settings, until the last reload: experts, priority, digest."""
    seen: list[tuple[str, ...]] = []
    while not flipping.done():
        reply = await app.achat(priority=-4, max_tokens=3)
        assert reply.status_code == 200, reply.text
        headers = reply.headers
        adapter = headers.get("x-coterie-adapter", "").partition("@")[0]
        seen.append((adapter, headers["x-coterie-priority"], headers["x-coterie-config"]))
    return seen


async def _flip(app: ReloadApp, times: int) -> None:
    for count in range(times):
        fixed, priority = (("one",), 1) if count % 2 == 0 else (("two",), 3)
        app.write(fixed, priority)
        reply = await app.asend("POST", "/v1/config/reload")
        assert reply.status_code == 200, reply.text
        # every version answers some requests
        for _ in range(2):
            assert (await app.achat(max_tokens=3)).status_code == 200
        # a wrong file in between is not taken
        app.write(("three",), 4)
        assert (await app.asend("POST", "/v1/config/reload")).status_code == 400


def _under_load(app: ReloadApp, callers: int, flips: int) -> None:
    async def both() -> list[list[tuple[str, ...]]]:
        flipping = asyncio.ensure_future(_flip(app, flips))
        seen = await asyncio.gather(*(_storm(app, flipping) for _ in range(callers)))
        await flipping
        return seen

    digests = []
    for fixed, priority in (("one", 1), ("two", 3)):
        app.write((fixed,), priority)
        digests.append(app.reload().json()["digest"])
    seen = {item for listed in app.runner.run(both()) for item in listed}
    # nothing is lost, and nothing of two settings is in one answer
    assert seen == {("one", "1", digests[0]), ("two", "3", digests[1])}


def test_under_load_every_answer_has_the_settings_of_one_file(app: ReloadApp) -> None:
    _under_load(app, 3, 3)


@pytest.mark.full
def test_under_more_load(app: ReloadApp) -> None:
    _under_load(app, 16, 20)


def test_eight_specialists_share_one_engine(app: ReloadApp) -> None:
    lines = [f'[[specialists]]\nname = "s{i}"\nmodel = "{MODEL}"\n' for i in range(8)]
    app.file.write_text('[engine]\nkv_bytes = "8MB"\nthreads = 1\n' + "".join(lines))

    async def one() -> None:
        pipeline = build(load(app.file), inproc=True)
        (group,) = pipeline.fleet._groups
        assert len(group.specialists) == 8 and len(group.replicas) == 1
        await pipeline.start()
        try:
            infos = [item.info for item in pipeline.fleet._served.values()]
            assert len(infos) == 8 and all(info is infos[0] for info in infos)
            assert sum(infos[0].contexts[name] > 0 for name in group.specialists) == 8
        finally:
            await pipeline.close()

    app.runner.run(one())


def test_a_missing_expert_ends_the_start(app: ReloadApp) -> None:
    app.write(fixed=("nobody",))

    async def start() -> None:
        pipeline = build(load(app.file), inproc=True)
        try:
            await pipeline.start()
        finally:
            await pipeline.close()

    with pytest.raises(ConfigError, match=r"specialists\.sql\.adapters: .*'nobody' is not inst"):
        app.runner.run(start())
