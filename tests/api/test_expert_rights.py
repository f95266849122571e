"""Which experts a tenant may use, on every road: by name, by content, later, and in lists."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import grpc
import pytest
from websockets.sync.client import connect

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.cli.main import main
from coterie.packages.registry import AdapterRegistry
from coterie.packages.trust import TrustStore
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.app_with_experts import RELATED, SQL, Packer
from tests.helpers.serving.batch_requests import CHAT, begin, client_of, ended, jsonl, line, rows
from tests.helpers.serving.server_process import Reply, Served, own_home

ADMIN = "key-of-the-admin"
KEYS = {name: f"key-of-{name}" for name in ("free", "narrow", "picky", "both")}
# `cook` and `data` always run with an expert; `twin` has the bytes of that of `data`
SETTINGS = """
[server]
api_key_file = "{folder}/keys.txt"
admin_key_file = "{folder}/admins.txt"
[engine]
kv_bytes = "8MB"
threads = 1
[aliases]
"warehouse" = "base:sql"
"house" = "base:style"
[[specialists]]
name = "base"
model = "{model}"
[[specialists]]
name = "cook"
model = "{model}"
adapters = ["cooking"]
[[specialists]]
name = "data"
model = "{model}"
adapters = ["sql"]
[[tenants]]
name = "narrow"
specialists = ["base", "cook"]
[[tenants]]
name = "picky"
experts = ["style"]
[[tenants]]
name = "both"
specialists = ["base"]
experts = ["style"]
"""
# models -> the tenants that may use them, beside `free`
TABLE = {
    "base": {"narrow", "picky", "both"},
    "cook": {"narrow", "picky"},
    "data": {"picky"},
    "sql": {"picky"},
    "sql@1.0.0": {"picky"},
    # another version of an expert that belongs to a specialist
    "sql@2.0.0": {"picky"},
    # an alias in the registry, and one of the settings
    "db": {"picky"},
    "warehouse": {"picky"},
    # the same bytes under another name
    "twin": {"picky"},
    "base:sql": {"picky"},
    "base:style+sql": {"picky"},
    "cooking": {"narrow", "picky"},
    "base:cooking": {"narrow", "picky"},
    "style": {"narrow", "picky", "both"},
    "house": {"narrow", "picky", "both"},
    "slug": {"narrow"},
    "base:slug": {"narrow"},
    # requires `slug`
    "needy": {"narrow"},
}
LISTED = {"sql", "db", "warehouse", "twin", "cooking", "style", "house", "slug", "needy", "base",
          "cook", "data"}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("rights")
    home, packer = own_home(folder / "home"), Packer(folder)
    packer.trust(home / "state" / "trust.json")
    registry = AdapterRegistry(home / "state" / "experts")
    trust = TrustStore(home / "state" / "trust.json")
    for name, version, seed, more in (
        ("cooking", "1.0.0", 1, {}),
        ("sql", "1.0.0", 2, {"routing": SQL}),
        ("sql", "2.0.0", 3, {"routing": SQL}),
        ("twin", "1.0.0", 2, {}),
        ("style", "1.0.0", 4, {}),
        ("slug", "1.0.0", 5, {}),
        ("needy", "1.0.0", 6, {"constraints": {"requires": ["slug"]}}),
    ):
        registry.install(packer.package(name, version, seed, **more), trust=trust)
    registry.alias("db", "sql")
    registry.close()
    lines = [f"{key} tenant={name}" for name, key in KEYS.items() if name != "free"]
    (folder / "keys.txt").write_text("\n".join([KEYS["free"], *lines]) + "\n")
    (folder / "admins.txt").write_text(ADMIN + "\n")
    file = folder / "coterie.toml"
    file.write_text(SETTINGS.format(folder=folder, model=tiny_checkpoint("llama")))
    server = Served("--config", str(file), "--grpc-port", "0", COTERIE_HOME=str(home))
    yield server
    server.stop()


def post(served: Served, path: str, tenant: str, body: Any, **headers: str) -> Reply:
    return served.post(path, body, authorization=f"Bearer {KEYS[tenant]}", **headers)


def may(tenant: str, model: str) -> bool:
    return tenant == "free" or tenant in TABLE[model]


USER = [{"role": "user", "content": "hello there"}]


@pytest.mark.parametrize("tenant", KEYS)
def test_names(served: Served, tenant: str) -> None:
    key = {"authorization": f"Bearer {KEYS[tenant]}"}
    got, wanted = {}, {}
    for model in TABLE:
        body = {"model": model, "messages": USER, "max_tokens": 1}
        replies = (post(served, CHAT, tenant, body), served.get(f"/v1/models/{model}", **key))
        got[model] = [reply.status for reply in replies]
        wanted[model] = [200, 200] if may(tenant, model) else [403, 403]
        for reply in replies:
            assert reply.status == 200 or "may not use" in reply.body.decode()
    assert got == wanted


@pytest.mark.parametrize("tenant", KEYS)
def test_lists(served: Served, tenant: str) -> None:
    key = {"authorization": f"Bearer {KEYS[tenant]}"}
    wanted = {name for name in LISTED if may(tenant, name)}
    listed = {item["id"] for item in served.get("/v1/models", **key).json["data"]}
    assert listed - {"auto"} == wanted
    page = served.get("/v1/models?limit=100", anthropic_version="2023-06-01", **key).json
    assert {item["id"] for item in page["data"]} - {"auto"} == wanted
    tags = served.get("/api/tags", **key).json["models"]
    assert {item["name"].removesuffix(":latest") for item in tags} - {"auto"} == wanted
    # neither does a refusal name them
    told = post(served, CHAT, tenant, {"model": "slg", "messages": USER}).json["error"]["message"]
    names = set(re.findall(r"[a-z]+", told.partition("there is:")[2]))
    assert names & LISTED <= wanted
    assert served.get("/v1/experts", **key).status == 401


def over_grpc(served: Served, tenant: str, model: str) -> int:
    found = re.search(r"gRPC on (\S+)", served.log())
    assert found
    with grpc.insecure_channel(found[1]) as channel:
        call = channel.unary_unary(
            "/coterie.v1.Inference/Infer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.InferenceResult.FromString,
        )
        try:
            request = pb.InferRequest(prompt="hello", max_tokens=1, force_experts=[model])
            call(request, metadata=[("authorization", f"Bearer {KEYS[tenant]}")], timeout=60)
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined]
            return {grpc.StatusCode.PERMISSION_DENIED: 403}.get(code, 0)
    return 200


def over_websocket(served: Served, tenant: str, model: str) -> int:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    url = served.url.replace("http", "ws", 1) + "/v1/infer/ws"
    with connect(url, additional_headers=headers, open_timeout=30) as socket:
        socket.send(json.dumps({"prompt": "hi", "max_tokens": 1, "force_experts": [model]}))
        while True:
            event = json.loads(socket.recv(timeout=30))
            if event["event"] == "finished":
                return 200
            if event["event"] == "error":
                return 403 if "may not use" in json.dumps(event) else 0


def as_job(served: Served, tenant: str, model: str) -> int:
    body = {"prompt": "hi", "max_tokens": 1, "model": model}
    reply = post(served, "/v1/infer", tenant, body, prefer="respond-async")
    if reply.status != 202:
        return reply.status
    key, deadline = {"authorization": f"Bearer {KEYS[tenant]}"}, time.monotonic() + 60
    while True:
        job = served.get(f"/v1/jobs/{reply.json['job_id']}", **key).json
        if job["status"] in ("succeeded", "failed"):
            return 200 if job["status"] == "succeeded" else 403
        assert time.monotonic() < deadline, job
        time.sleep(0.02)


def in_a_batch(served: Served, tenant: str, model: str) -> int:
    body = {"model": model, "messages": USER, "max_tokens": 1}
    with client_of(served, KEYS[tenant]) as client:
        batch = ended(client, begin(client, jsonl(line("one", body))))
        [row] = rows(client, batch.output_file_id) or rows(client, batch.error_file_id)
    return int(row["response"]["status_code"])


def plain(path: str, **fields: Any) -> Callable[[Served, str, str], int]:
    def ask(served: Served, tenant: str, model: str) -> int:
        return post(served, path, tenant, {"model": model} | fields).status

    return ask


def with_list(path: str, name: str, **fields: Any) -> Callable[[Served, str, str], int]:
    """The expert in a list of its own beside the model."""

    def ask(served: Served, tenant: str, model: str) -> int:
        item: Any = model if name == "force_experts" else {"name": model}
        return post(served, path, tenant, {name: [item]} | fields).status

    return ask


ROADS: dict[str, Callable[[Served, str, str], int]] = {
    "chat": plain(CHAT, messages=USER, max_tokens=1),
    "chat, streamed": plain(CHAT, messages=USER, max_tokens=1, stream=True),
    "chat, experts": with_list(CHAT, "experts", model="base", messages=USER, max_tokens=1),
    "chat, auto": with_list(CHAT, "experts", model="auto", messages=USER, max_tokens=1),
    "completions": plain("/v1/completions", prompt="hi", max_tokens=1),
    "responses": plain("/v1/responses", input="hi", max_output_tokens=16),
    "messages": plain("/v1/messages", messages=USER, max_tokens=1),
    "count_tokens": plain("/v1/messages/count_tokens", messages=USER),
    "ollama chat": plain("/api/chat", messages=USER, options={"num_predict": 1}),
    "ollama generate": plain("/api/generate", prompt="hi", options={"num_predict": 1}),
    "ollama show": plain("/api/show"),
    "llama.cpp": plain("/completion", prompt="hi", n_predict=1),
    "tokenize": plain("/tokenize", prompt="hi"),
    "infer": plain("/v1/infer", prompt="hi", max_tokens=1),
    "infer, forced": with_list("/v1/infer", "force_experts", prompt="hi", max_tokens=1),
    "gRPC": over_grpc,
    "WebSocket": over_websocket,
    "job": as_job,
    "batch": in_a_batch,
}


@pytest.mark.parametrize("road", ROADS)
def test_roads(served: Served, road: str) -> None:
    ask = ROADS[road]
    got = {(tenant, model): ask(served, tenant, model)
           for tenant, model in (("narrow", "sql"), ("narrow", "style"), ("picky", "slug"),
                                 ("picky", "sql"))}  # fmt: skip
    assert got == {
        ("narrow", "sql"): 403,
        ("narrow", "style"): 200,
        ("picky", "slug"): 403,
        ("picky", "sql"): 200,
    }


def test_what_the_router_chooses_and_tells(served: Served) -> None:
    """The router considers what the tenant may use, and neither its reasons nor the receipt name
    anything else."""

    def infer(tenant: str) -> Any:
        body = {"prompt": RELATED, "max_tokens": 1, "explain": True}
        reply = post(served, "/v1/infer", tenant, body)
        assert reply.status == 200, reply.body
        return reply.json

    deadline = time.monotonic() + 90
    while infer("free")["experts_used"] != ["sql"]:
        assert time.monotonic() < deadline, infer("free")
        time.sleep(0.2)
    assert infer("picky")["experts_used"] == ["sql"]
    for tenant in ("narrow", "both"):
        answer = infer(tenant)
        key = {"authorization": f"Bearer {KEYS[tenant]}"}
        receipt = served.get(f"/v1/receipts/{answer['job_id']}", **key)
        assert receipt.status == 200
        hidden = {name for name in LISTED - {"base", "cook", "data"} if not may(tenant, name)}
        told = json.dumps(answer["plan"]) + receipt.body.decode()
        assert hidden and not {name for name in hidden if f"{name}@" in told}
        trace = answer["plan"]["reasoning_trace"]["candidates"]
        assert trace and {item["name"].partition("@")[0] for item in trace} <= LISTED - hidden


def test_receipts_are_listed_and_filtered(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant sees its own, an admin those of all; the pages make up the whole list."""

    def listed(key: str, **filters: Any) -> list[Any]:
        found, before = list[Any](), ""
        while True:
            query = urlencode(filters | {"limit": 3}) + before
            page = served.get(f"/v1/receipts?{query}", authorization=f"Bearer {key}")
            assert page.status == 200 and len(page.json["data"]) <= 3, page.body
            found += page.json["data"]
            if page.json["next"] is None:
                assert not page.json["has_more"]
                return found
            before = f"&before={page.json['next']}"

    since = time.time()
    for tenant, model in (("picky", "base"), ("narrow", "cook"), ("picky", "cook"), ("picky", "x")):
        body = {"model": model, "messages": USER, "max_tokens": 1}
        post(served, CHAT, tenant, body)
    own = listed(KEYS["picky"], since=since)
    assert [item["plan"]["specialist"] for item in own] == ["", "cook", "base"]
    assert {item["tenant"] for item in own} == {"picky"}
    every = listed(ADMIN, since=since)
    assert [item["tenant"] for item in every] == ["picky", "picky", "narrow", "picky"]
    assert [item for item in every if item["tenant"] == "picky"] == own
    assert listed(ADMIN, since=since, tenant="narrow") == [every[2]]
    assert listed(ADMIN, since=since, specialist="cook") == [every[1], every[2]]
    assert listed(ADMIN, since=since, outcome="not_found") == [every[0]]
    assert not listed(ADMIN, since=since, until=since)
    last = every[-1]["arrived_at"]
    assert [item["tenant"] for item in listed(ADMIN, since=last, until=last + 1e-4)] == ["picky"]
    whole = listed(ADMIN)
    assert len({item["request_id"] for item in whole}) == len(whole) >= 4
    assert [one["arrived_at"] for one in whole[:4]] == [one["arrived_at"] for one in every]
    path = "/v1/receipts?tenant=narrow"
    assert served.get(path, authorization=f"Bearer {KEYS['picky']}").status == 403
    assert served.get("/v1/receipts").status == 401
    for wrong in ("limit=0", "limit=9999", "before=x", "since=-1", "tennant=x"):
        reply = served.get(f"/v1/receipts?{wrong}", authorization=f"Bearer {ADMIN}")
        assert reply.status == 400, wrong
    # the command
    (tmp_path / "key").write_text(ADMIN)
    at = ("--url", served.url, "--admin-key-file", str(tmp_path / "key"))
    assert main(["receipts", "--outcome", "not_found", "--since", "1h", *at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["receipts"]
    assert every[0] in told and {item["outcome"] for item in told} == {"not_found"}
    assert main(["receipts", "--tenant", "narrow", "--limit", "2", *at]) == 0
    assert "narrow" in capsys.readouterr().out
    assert main(["receipts", every[0]["request_id"], *at]) == 0
    assert json.loads(capsys.readouterr().out) == every[0]


def test_an_admin_reads_the_figures_of_the_server(served: Served) -> None:
    admin = {"authorization": f"Bearer {ADMIN}"}
    for path in ("/metrics", "/v1/slo", "/load", "/version", "/v1/receipts"):
        assert served.get(path, **admin).status == 200, path
        assert served.get(path).status == 401, path
    assert served.get("/v1/models", **admin).status == 401


def test_the_metrics_name_nothing_to_whom_it_is_hidden(served: Served) -> None:
    """They name every expert and specialist: none of that is for a tenant with limits."""
    body = {"model": "base:sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert post(served, "/v1/chat/completions", "free", body).status == 200
    for tenant, key in KEYS.items():
        reply = served.get("/metrics", authorization=f"Bearer {key}")
        if tenant == "free":
            assert reply.status == 200 and 'adapter_name="sql"' in reply.body.decode()
        else:
            assert reply.status == 403 and b"sql" not in reply.body, tenant
        shown = served.get("/v1/slo", authorization=f"Bearer {key}").json["data"]
        names = {item["specialist"] for item in shown}
        allowed = {"base", "cook", "data"} - ({"cook"} if tenant == "both" else set())
        assert names == allowed - ({"data"} if tenant in ("narrow", "both") else set())
