"""The admin endpoints of experts and what requests see of them, over a real engine and registry."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.api.admin.experts import MAX_UPLOADS
from coterie.api.routes import described
from coterie.core.adapters import AdapterCard
from coterie.core.config import Config
from coterie.core.errors import NotFound
from coterie.core.events import Delta, Failed
from coterie.core.request import InferenceRequest, Limits, RouteHints, Sampling, Text
from coterie.service.adapters.admin import AdapterAdmin
from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.app_with_experts import ADMIN, CALLER, MODEL, ExpertApp, adapter
from tests.helpers.serving.server_process import own_home

# of 384: an answer ends within a few tokens
MOST_TOKENS = list(range(128, 384))
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("experts-api")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COTERIE_HOME", str(own_home(folder / "home")))
        yield folder


@pytest.fixture(scope="module")
def rig(folder: Path) -> Iterator[ExpertApp]:
    """Caller keys and admin keys; only what a trusted key signed."""
    with asyncio.Runner() as runner:
        settings: dict[str, Any] = {
            "server.admin_key_file": str(folder / "admins.txt"),
            "server.api_key_file": str(folder / "callers.txt"),
        }
        rig = ExpertApp(folder, runner, **settings)
        yield rig
        rig.close()


@pytest.fixture(scope="module")
def lax(folder: Path, rig: ExpertApp) -> Iterator[ExpertApp]:
    """The same home; unsigned adapters are allowed."""
    settings: dict[str, Any] = {
        "server.admin_key_file": str(folder / "admins.txt"),
        "server.allow_unsigned": True,
    }
    lax = ExpertApp(folder, rig.runner, **settings)
    yield lax
    lax.close()


def error(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["message"]


def test_nothing_changes_without_an_admin_key(rig: ExpertApp) -> None:
    ways = [
        ("GET", "/v1/experts"), ("POST", "/v1/experts"), ("DELETE", "/v1/experts/sql"),
        ("PATCH", "/v1/experts/sql"), ("POST", "/v1/experts/sql:pin"), ("POST", LOAD),
        ("POST", "/v1/experts/sql/rollback"), ("POST", UNLOAD), ("GET", "/v1/experts/sql"),
    ]  # fmt: skip
    for method, path in ways:
        for key in (CALLER, "wrong"):
            reply = rig.send(method, path, {}, key=key)
            assert reply.status_code == 401, (method, path, reply.text)
            assert "admin key" in reply.text
            assert reply.headers["www-authenticate"] == "Bearer"
    # every one of them that there is
    assert {row.path for row in described() if row.tag == "experts"} == {
        "/v1/experts", "/v1/experts/{name}", "/v1/experts/{name}/{action}",
        "/v1/experts/{name}:{action}", LOAD, UNLOAD,
    }  # fmt: skip
    # and an admin's key asks no model
    assert rig.send("GET", "/v1/models", key=ADMIN).status_code == 401


def test_a_server_without_admins_says_what_to_do(rig: ExpertApp) -> None:
    client, headers = rig.client_with(Config()), {"authorization": "Bearer guessed"}
    for method, path in (("GET", "/v1/experts"), ("POST", LOAD), ("DELETE", "/v1/experts/x")):
        reply = rig.runner.run(client.request(method, path, headers=headers))
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "permission_denied"
        assert "--admin-key-file" in reply.json()["error"]["message"]
    assert rig.runner.run(client.get("/v1/models")).status_code == 200
    rig.runner.run(client.aclose())


def test_only_what_a_trusted_key_signed(rig: ExpertApp, folder: Path) -> None:
    data = rig.package("sql")
    status, message = error(rig.send("POST", "/v1/experts", data))
    assert status == 403 and "unknown key" in message
    status, message = error(rig.send("POST", "/v1/experts", {"path": str(adapter())}))
    assert status == 403 and "not signed" in message
    unsigned = {"lora_name": "sql", "lora_path": str(adapter())}
    assert error(rig.send("POST", LOAD, unsigned))[0] == 403
    assert rig.send("GET", "/v1/experts").json()["data"] == []
    rig.trust(folder / "home" / "state" / "trust.json")
    reply = rig.send("POST", "/v1/experts", data)
    assert reply.status_code == 201, reply.text
    card = reply.json()
    assert (card["id"], card["kind"], card["description"]) == ("sql@1.0.0", "lora", "for tests")
    assert len(card["digest"]) == 64 and len(card["signer"]) == 16
    # a second time is no harm
    assert rig.send("POST", "/v1/experts", data).json() == card | {
        "installed_at": rig.send("GET", "/v1/experts/sql").json()["installed_at"]
    }


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "empty"),
        (b"not an archive", 400, "refused"),
        (b"x" * 200_001, 413, "larger than the limit of 200000"),
        ({}, 400, "path: is required"),
        ({"path": "relative/path.expert"}, 400, "absolute"),
        ({"path": "/etc/../etc/passwd"}, 400, "absolute"),
        ({"path": "/nowhere/at-all.expert"}, 400, "at-all"),
        ({"path": "/" + "x" * 300}, 400, "cannot be read"),
        ({"path": "/proc/version"}, 400, "empty"),
        ({"path": "/nowhere/at-all.expert", "name": "tiny"}, 400, "specialist's name"),
        ([1], 400, "JSON object"),
    ],
)
def test_bad_installations(rig: ExpertApp, body: Any, status: int, words: str) -> None:
    got, message = error(rig.send("POST", "/v1/experts", body))
    assert got == status and words in message
    assert "Traceback" not in message


def test_packages_that_wait_for_the_registry_are_in_memory_too(
    rig: ExpertApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no more of them are read at once than may be in memory."""
    inside, most, install = 0, 0, AdapterAdmin.install

    async def counted(self: AdapterAdmin, *arguments: Any, **named: Any) -> AdapterCard:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.02)
        try:
            return await install(self, *arguments, **named)
        finally:
            inside -= 1

    async def upload_all() -> None:
        headers = {"authorization": f"Bearer {ADMIN}", "content-type": "application/octet-stream"}
        posts = [
            rig.client.post("/v1/experts", content=b"x" * 100_000, headers=headers)
            for _ in range(8)
        ]
        assert {reply.status_code for reply in await asyncio.gather(*posts)} == {400}

    monkeypatch.setattr(AdapterAdmin, "install", counted)
    rig.runner.run(upload_all())
    assert most == MAX_UPLOADS


def test_another_base_is_refused(rig: ExpertApp) -> None:
    other = rig.package("foreign", seed=3, fingerprint="cd" * 32)
    status, message = error(rig.send("POST", "/v1/experts", other))
    assert status == 400 and "cdcd" in message


def test_an_expert_changes_the_answer_and_says_so(rig: ExpertApp) -> None:
    rig.send("POST", "/v1/experts", rig.package("sql"))
    rig.send("POST", "/v1/experts", rig.package("style", seed=5))
    plain, adapted = rig.chat("tiny"), rig.chat("sql")
    assert "x-coterie-adapter" not in plain.headers
    assert "adapters" not in plain.json()["coterie"]
    text = adapted.json()["choices"][0]["message"]["content"]
    assert text != plain.json()["choices"][0]["message"]["content"]
    digest = rig.send("GET", "/v1/experts/sql").json()["digest"]
    assert adapted.headers["x-coterie-adapter"] == f"sql@1.0.0#{digest[:8]}"
    assert adapted.headers["x-coterie-specialist"] == "tiny"
    assert adapted.json()["model"] == "sql"
    for spelling in ("tiny:sql", "sql@1.0.0", "auto:sql"):
        same = rig.chat(spelling)
        assert same.json()["model"] == spelling
        assert same.json()["choices"][0]["message"]["content"] == text
    # the same through the body, on every dialect
    named: dict[str, Any] = {"experts": [{"name": "sql"}]}
    assert rig.chat("tiny", **named).json()["choices"][0]["message"]["content"] == text
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, **named}
    asked = body | {"messages": [{"role": "user", "content": "hello there"}]}
    message = rig.send("POST", "/v1/messages", asked, key=CALLER)
    assert message.json()["content"] == [{"type": "text", "text": text}]
    assert message.json()["coterie"]["adapters"] == [
        {"name": "sql@1.0.0", "digest": digest, "weight": 1.0}
    ]
    assert message.headers["x-coterie-adapter"] == f"sql@1.0.0#{digest[:8]}"
    several = rig.send("POST", "/v1/completions", body | {"prompt": ["a", "b"]}, key=CALLER)
    assert several.json()["coterie"]["adapters"][0]["name"] == "sql@1.0.0"
    stream = rig.chat("sql+style", stream=True, stream_options={"include_usage": True})
    assert stream.headers["x-coterie-adapter"].startswith("sql@1.0.0#")
    assert ",style@1.0.0#" in stream.headers["x-coterie-adapter"]
    assert '"adapters":[{"name":"sql@1.0.0"' in stream.text
    # at weight 0 nothing is left of it
    none = rig.chat("tiny", experts=[{"name": "sql", "weight": 0}])
    assert none.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize(
    ("model", "experts", "status", "code", "words"),
    [
        ("sqk", [], 404, "model_not_found", "sql"),
        ("tiny:sqk", [], 404, "model_not_found", "sql"),
        ("sql@7.0", [], 404, "model_not_found", "no version"),
        ("tiny", [{"name": "sql"}] * 2, 400, None, "twice"),
        ("tiny", [{"name": f"e{i}"} for i in range(11)], 400, None, "10"),
        ("tiny", [{"name": "sql", "weight": 10.1}], 400, None, "10"),
        ("tiny", [{"name": "sql", "weight": "1"}], 400, None, "experts.0.weight"),
        ("tiny", [{"weight": 1}], 400, None, "experts.0.name"),
        ("tiny", ["sql"], 400, None, "experts.0: must be a JSON object"),
    ],
)
def test_requests_that_cannot_be(
    rig: ExpertApp, model: str, experts: Any, status: int, code: str | None, words: str
) -> None:
    rig.send("POST", "/v1/experts", rig.package("sql"))
    reply = rig.chat(model, experts=experts)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["code"] == code
    assert words in reply.json()["error"]["message"]


def test_the_model_list(rig: ExpertApp) -> None:
    rig.send("POST", "/v1/experts", rig.package("sql"))
    rig.send("PATCH", "/v1/experts/sql", {"alias": "stable"})
    listed = {m["id"]: m for m in rig.send("GET", "/v1/models", key=CALLER).json()["data"]}
    assert next(iter(listed)) == "tiny" and listed["tiny"]["parent"] is None
    # what a client offers as listed can be routed too
    assert list(listed)[-1] == "auto" and listed["auto"]["root"] == listed["tiny"]["root"]
    for name in ("sql", "stable"):
        assert listed[name]["parent"] == "tiny" and listed[name]["root"] == "sql@1.0.0"
        assert listed[name]["max_model_len"] == listed["tiny"]["max_model_len"]
    one = rig.send("GET", "/v1/models/tiny:sql@1.0.0", key=CALLER).json()
    assert (one["id"], one["root"]) == ("tiny:sql@1.0.0", "sql@1.0.0")
    assert rig.send("GET", "/v1/models/nobody", key=CALLER).status_code == 404
    ids = rig.send("POST", "/tokenize", {"model": "sql", "prompt": "hello"}, key=CALLER).json()
    assert ids["max_model_len"] == listed["tiny"]["max_model_len"]
    assert rig.send("DELETE", "/v1/experts/stable").json()["deleted"] is True
    assert rig.chat("stable").status_code == 404 and rig.chat("sql").status_code == 200


def test_versions_flip_roll_back_and_go(rig: ExpertApp) -> None:
    for version, seed in (("1.0.0", 10), ("1.1.0", 11), ("1.2.0", 12)):
        reply = rig.send("POST", "/v1/experts?now=true", rig.package("flip", version, seed))
        assert reply.status_code == 201 and reply.json()["current"], reply.text

    def now() -> str:
        return rig.chat("flip").headers["x-coterie-adapter"].partition("#")[0]

    assert now() == "flip@1.2.0"
    assert rig.send("POST", "/v1/experts/flip/rollback").json()["id"] == "flip@1.1.0"
    assert now() == "flip@1.1.0"
    assert rig.send("POST", "/v1/experts/flip:rollback").json()["id"] == "flip@1.0.0"
    assert rig.send("POST", "/v1/experts/flip:rollback").status_code == 404
    assert rig.send("PATCH", "/v1/experts/flip", {"version": "1.2.0"}).status_code == 200
    assert now() == "flip@1.2.0"
    # a version never changes its bytes
    again = rig.send("POST", "/v1/experts", rig.package("flip", "1.2.0", 13))
    assert again.status_code == 400 and "other weights" in again.text
    shown = rig.send("GET", "/v1/experts/flip").json()
    assert [item["version"] for item in shown["versions"]] == ["1.0.0", "1.1.0", "1.2.0"]
    assert shown["manifest"]["description"] == "for tests"
    assert rig.send("GET", "/v1/experts/flip@1.0.0").json()["version"] == "1.0.0"
    assert rig.send("POST", "/v1/experts/flip:pin").json()["pinned"] is True
    assert rig.send("DELETE", "/v1/experts/flip").status_code == 403
    assert rig.send("POST", "/v1/experts/flip:unpin").json()["pinned"] is False
    # a version is never passed over in silence
    for method, path in (("DELETE", "flip@"), ("POST", "flip@9:pin"), ("POST", "flip@/unpin")):
        assert rig.send(method, f"/v1/experts/{path}").status_code == 404, path
    assert rig.send("POST", "/v1/experts/flip@1.0.0:rollback").status_code == 400
    reply = rig.send("POST", "/v1/experts/flip@1.1.0/pin").json()
    assert (reply["id"], reply["pinned"], now()) == ("flip@1.1.0", True, "flip@1.1.0")
    assert rig.send("POST", "/v1/experts/flip@1.2.0/unpin").json()["id"] == now() == "flip@1.2.0"
    assert rig.send("DELETE", "/v1/experts/flip@1.2.0").status_code == 200
    assert now() != "flip@1.2.0"
    assert rig.send("DELETE", "/v1/experts/flip").status_code == 200
    assert rig.chat("flip").status_code == 404
    assert rig.send("DELETE", "/v1/experts/flip").status_code == 404
    for method, path, body in (
        ("PATCH", "/v1/experts/gone", {"version": "1.0.0"}),
        ("POST", "/v1/experts/gone:pin", None),
        ("POST", "/v1/experts/flip:explode", None),
        ("GET", "/v1/experts/gone", None),
    ):
        assert rig.send(method, path, body).status_code == 404
    assert rig.send("PATCH", "/v1/experts/sql", {}).status_code == 400


def test_a_later_version_is_staged_until_it_is_promoted(rig: ExpertApp) -> None:
    def now() -> str:
        return rig.chat("step").headers["x-coterie-adapter"].partition("#")[0]

    def install(version: str, seed: int, **more: Any) -> bool:
        reply = rig.send("POST", "/v1/experts", rig.package("step", version, seed, **more))
        assert reply.status_code == 201, reply.text
        return bool(reply.json()["current"])

    assert [install(f"1.{n}.0", 40 + n) for n in range(3)] == [True, False, False]
    assert now() == "step@1.0.0"
    assert rig.chat("step@1.2.0").headers["x-coterie-adapter"].startswith("step@1.2.0#")
    # nothing can judge it
    done = rig.send("POST", "/v1/experts/step/promote").json()
    assert (done["id"], done["current"], done["canary"]) == ("step@1.2.0", True, None)
    assert now() == "step@1.2.0"
    again = rig.send("POST", "/v1/experts/step:promote")
    assert again.status_code == 409 and "current version already" in again.text
    # its package states a form: a canary, and nobody gets it before
    check = {"type": "regex", "text": "[0-9]+"}
    assert not install("2.0.0", 43, check=check)
    for share in ({"share": 0.9}, {"share": "x"}):
        assert rig.send("POST", "/v1/experts/step@2.0.0/promote", share).status_code == 400
    assert rig.send("POST", "/v1/experts/step@9.0.0/promote").status_code == 404
    done = rig.send("POST", "/v1/experts/step@2.0.0/promote", {"share": 0.25}).json()
    assert (done["current"], done["canary"]["share"]) == (False, 0.25)
    assert done["canary"]["label"] == "step@2.0.0"
    [running] = rig.send("GET", "/v1/ensemble").json()["canaries"]
    assert running["candidate"] == done["digest"]
    shown = rig.send("GET", "/v1/experts/step").json()
    assert [v["version"] for v in shown["versions"] if v["current"]] == ["1.2.0"]
    assert rig.send("POST", "/v1/experts/step@2.0.0/promote").status_code == 409
    assert rig.send("DELETE", "/v1/ensemble/canaries/step").status_code == 200
    # by its path on the server
    body = {"path": str(adapter(seed=44)), "name": "step", "version": "3.0.0", "now": True}
    status, message = error(rig.send("POST", "/v1/experts", body))
    assert status == 403 and "not signed" in message
    assert rig.send("DELETE", "/v1/experts/step").status_code == 200


def test_vllms_two_endpoints(lax: ExpertApp) -> None:
    first, second = str(adapter(seed=20)), str(adapter("dora", seed=21))
    reply = lax.send("POST", LOAD, {"lora_name": "nice", "lora_path": first})
    assert (reply.status_code, reply.text) == (
        200, "Success: LoRA adapter 'nice' added successfully.",
    )  # fmt: skip
    assert reply.headers["content-type"].startswith("text/plain")
    before = lax.chat("nice")
    status, message = error(lax.send("POST", LOAD, {"lora_name": "nice", "lora_path": second}))
    assert status == 400 and message.startswith("The lora adapter 'nice' has already been loaded.")
    body = {"lora_name": "nice", "lora_path": second, "load_inplace": True}
    assert lax.send("POST", LOAD, body).status_code == 200
    after = lax.chat("nice")
    assert before.headers["x-coterie-adapter"] != after.headers["x-coterie-adapter"]
    assert before.json()["choices"] != after.json()["choices"]
    # reloads without end keep the one before, and no more
    for seed in range(22, 25):
        body["lora_path"] = str(adapter(seed=seed))
        assert lax.send("POST", LOAD, body).status_code == 200
    assert len(lax.send("GET", "/v1/experts/nice").json()["versions"]) == 2
    assert lax.send("POST", "/v1/experts/nice:rollback").status_code == 200
    reply = lax.send("POST", UNLOAD, {"lora_name": "nice"})
    assert reply.text == "Success: LoRA adapter 'nice' removed successfully."
    assert lax.chat("nice").status_code == 404
    assert error(lax.send("POST", UNLOAD, {"lora_name": "nice"})) == (
        404, "The lora adapter 'nice' cannot be found.",
    )  # fmt: skip
    for path, missing in ((LOAD, {"lora_name": "x"}), (LOAD, {"lora_path": "/x"}), (UNLOAD, {})):
        assert lax.send("POST", path, missing).status_code == 400
    wrong = {"lora_name": "x", "lora_path": "/nowhere"}
    assert lax.send("POST", LOAD, wrong).status_code == 400
    for unnameable in ("a+b", "base:a", "tiny", "A", "", "auto"):
        body = {"lora_name": unnameable, "lora_path": first}
        assert lax.send("POST", LOAD, body).status_code == 400


def test_a_reload_leaves_aliases_and_the_way_back(lax: ExpertApp) -> None:
    def load(seed: int) -> str:
        body = {"lora_name": "again", "lora_path": str(adapter(seed=seed)), "load_inplace": True}
        assert lax.send("POST", LOAD, body).status_code == 200
        return str(lax.send("GET", "/v1/experts/again").json()["id"])

    first = load(25)
    assert lax.send("PATCH", "/v1/experts/again", {"alias": "prod"}).json()["id"] == first
    second, third = load(26), load(27)
    assert lax.send("GET", "/v1/experts/prod").json()["id"] == first
    # the same bytes once more change nothing
    assert load(27) == third
    assert lax.send("POST", "/v1/experts/again/rollback").json()["id"] == second
    lax.send("POST", UNLOAD, {"lora_name": "again"})
    assert lax.send("GET", "/v1/experts/prod").status_code == 404


def test_damaged_files_are_told_without_their_place(lax: ExpertApp, folder: Path) -> None:
    for name, seed in (("damaged", 28), ("gone", 29)):
        lax.send("POST", LOAD, {"lora_name": name, "lora_path": str(adapter(seed=seed))})
        digest = lax.send("GET", f"/v1/experts/{name}").json()["digest"]
        files = folder / "home" / "state" / "experts" / "library" / digest
        if name == "gone":
            shutil.rmtree(files)
        else:
            (files / "adapter_config.json").write_text("what nobody should read {")
        reply = lax.chat(name)
        told = reply.status_code, reply.json()["error"]["code"]
        assert told == (503, "specialist_unavailable"), reply.text
        assert str(folder) not in reply.text and "nobody" not in reply.text
        assert f"{name}@" in reply.text and "damaged" in reply.text
        lax.send("POST", UNLOAD, {"lora_name": name})


def test_soft_tokens_count_in_the_context_and_not_in_the_bill(lax: ExpertApp) -> None:
    path = str(adapter("soft_prompt", num_virtual_tokens=20))
    lax.send("POST", LOAD, {"lora_name": "soft", "lora_path": path})
    plain, soft = lax.chat("tiny"), lax.chat("soft")
    assert soft.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
    room = 1024 - plain.json()["usage"]["prompt_tokens"]
    fits = lax.chat("soft", max_tokens=room - 20, stop_token_ids=MOST_TOKENS)
    assert fits.status_code == 200, fits.text
    status, message = error(lax.chat("soft", max_tokens=room - 19))
    assert status == 400 and "its adapters put 20 in front" in message
    assert lax.chat("tiny", max_tokens=room, stop_token_ids=MOST_TOKENS).status_code == 200


def test_an_adapter_that_cannot_be_loaded_is_not_installed(lax: ExpertApp) -> None:
    """Made for a wider model."""
    path = str(make_adapter(tiny_checkpoint("llama", hidden_size=96), "lora", 1))
    reply = lax.send("POST", LOAD, {"lora_name": "wide", "lora_path": path})
    assert reply.status_code == 400 and ".lora_" in reply.text
    assert str(MODEL) not in reply.text
    assert lax.chat("wide").status_code == 404 and lax.chat("tiny").status_code == 200


def asked(model: str, id_: str) -> InferenceRequest:
    return InferenceRequest(
        id=id_, prompt=Text("The quick brown fox"), sampling=Sampling(temperature=0.0),
        limits=Limits(max_tokens=200, ignore_eos=True), hints=RouteHints(model),
        response_format=None, session=None, tenant="t", arrived_at=time.monotonic(),
    )  # fmt: skip


@pytest.mark.parametrize("change", ["reload", pytest.param("unload", marks=pytest.mark.full)])
def test_a_request_ends_on_the_digest_it_began_with(
    lax: ExpertApp, folder: Path, change: str
) -> None:
    first, second = str(adapter(seed=40)), str(adapter(seed=41))
    lax.send("POST", LOAD, {"lora_name": "long", "lora_path": first})
    digest = lax.send("GET", "/v1/experts/long").json()["digest"]
    files = folder / "home" / "state" / "experts" / "library" / digest

    async def tokens(model: str, id_: str) -> list[int]:
        return [t async for delta in deltas(lax, model, id_) for t in delta.token_ids]

    async def interrupted() -> list[int]:
        ids: list[int] = []
        async for delta in deltas(lax, "long", f"interrupted-{change}"):
            if not ids and change == "reload":
                await lax.pipeline.adapters.load("long", Path(second), None, True)
                # past the version that is kept for a rollback
                await lax.pipeline.adapters.load("long", Path(first), None, True)
                await lax.pipeline.adapters.load("long", Path(second), None, True)
            elif not ids:
                await lax.pipeline.adapters.remove("long")
                with pytest.raises(NotFound):
                    lax.pipeline.handle(asked("long", "too-late"))
            ids += delta.token_ids
            assert files.exists()
        return ids

    alone = lax.runner.run(tokens("long", f"alone-{change}"))
    assert lax.runner.run(interrupted()) == alone and len(alone) == 200
    if change == "reload":
        assert lax.runner.run(tokens("long", "after")) != alone
        lax.send("POST", UNLOAD, {"lora_name": "long"})
    deadline = time.monotonic() + 60
    while files.exists():
        assert time.monotonic() < deadline, "nobody runs on it any more"
        lax.runner.run(asyncio.sleep(0.02))


async def deltas(rig: ExpertApp, model: str, id_: str) -> AsyncIterator[Delta]:
    async for event in rig.pipeline.handle(asked(model, id_)):
        assert not isinstance(event, Failed), event
        if isinstance(event, Delta):
            yield event


def test_loading_begins_before_the_prompt_is_read(lax: ExpertApp) -> None:
    """A request that is refused for its length never reaches the engine; its adapter does."""
    lax.send("POST", LOAD, {"lora_name": "early", "lora_path": str(adapter(seed=50))})
    assert lax.chat("early", max_tokens=5000).status_code == 400
    deadline = time.monotonic() + 60
    while 'vllm:lora_adapter_loaded{model_name="tiny",adapter_name="early"' not in (
        lax.pipeline.metrics_text()
    ):
        assert time.monotonic() < deadline, "nothing was loaded"
        # workers report when they step
        assert lax.chat("tiny").status_code == 200
    lax.send("POST", UNLOAD, {"lora_name": "early"})


def test_a_stream_that_nobody_reads_holds_nothing(lax: ExpertApp) -> None:
    lax.send("POST", LOAD, {"lora_name": "idle", "lora_path": str(adapter(seed=30))})

    async def test() -> None:
        events = lax.pipeline.handle(asked("idle", "unread"))
        assert 'waiting_lora_adapters="idle"' in lax.pipeline.metrics_text()
        del events
        assert 'waiting_lora_adapters=""' in lax.pipeline.metrics_text()

    lax.runner.run(test())
