"""An application over an engine in this process, packages of real PEFT adapters, and questions."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from coterie.api.app import create_app
from coterie.core.config import Config, load
from coterie.packages.archive import pack, repack
from coterie.packages.directory import collect
from coterie.packages.manifest import from_document
from coterie.packages.signing import new_key, public_of, signed
from coterie.packages.trust import TrustStore
from coterie.service.build import build
from coterie.weights.checkpoint import open_checkpoint
from tests.helpers.adapters.peft_adapters import make_adapter
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import Served

ADMIN, CALLER = "key-of-the-admin", "key-of-a-caller"
MODEL = tiny_checkpoint("llama")
# what an expert for SQL says of itself, a question for it and one for nobody
SQL = {
    "keywords": ["sql", "query", "table", "database", "select", "join"],
    "examples": [
        "Write a SQL query that lists all customers",
        "Turn this question into SQL: how many orders were placed in May?",
        "Give me a SELECT statement that joins orders and customers",
        "SQL query for the average price per category",
    ],
}
RELATED = "Write a SQL query that lists all customers and joins their orders"
UNRELATED = "Which river flows through the capital of Austria, and how long is it?"


@cache
def fingerprint() -> str:
    return open_checkpoint(MODEL).fingerprint()


def adapter(kind: str = "lora", seed: int = 0, **options: Any) -> Path:
    return make_adapter(MODEL, kind, 200 + seed, **options)


class Packer:
    """Makes packages, signed with the key of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def package(self, name: str, version: str = "1.0.0", seed: int = 0, **more: Any) -> bytes:
        """A package of a LoRA for the served model, signed with this folder's key."""
        options = more.pop("options", {})
        base = {"name": "tiny", "fingerprint": more.pop("fingerprint", fingerprint())}
        document = {
            "schema_version": "2.0", "name": name, "version": version, "base_models": [base],
            "description": "for tests", **more,
        }  # fmt: skip
        out = self.folder / f"{name}-{version}-{seed}.expert"
        files = collect(adapter(seed=seed, **options)).files
        made = pack(files, from_document(document), out)
        repack(made, signed(made, self.key().read_bytes()), out)
        return out.read_bytes()

    def key(self) -> Path:
        path = self.folder / "signer.key"
        if not path.exists():
            new_key(path)
        return path

    def trust(self, store: Path) -> None:
        TrustStore(store).trust(public_of(self.key().read_bytes()), "tests")


class ExpertApp(Packer):
    """One application. `send` speaks as the admin unless it is told otherwise."""

    def __init__(
        self, folder: Path, runner: asyncio.Runner, file: Path | None = None, **settings: Any
    ) -> None:
        """`settings` stand over those of `file`."""
        super().__init__(folder)
        self.runner = runner
        (folder / "admins.txt").write_text(f"{ADMIN}\n")
        (folder / "callers.txt").write_text(f"{CALLER}\n")
        common = {
            "specialists.0.model": str(MODEL),
            "specialists.0.name": "tiny",
            "engine.kv_bytes": "8MB",
            "engine.threads": 1,
            "adapters.device_bytes": "4MB",
            "server.max_upload_bytes": 200_000,
        }
        config = load(file, common | settings)
        self.pipeline = build(config, inproc=True)
        runner.run(self.pipeline.start())
        self.client = self.client_with(config)

    def client_with(self, config: Config) -> httpx.AsyncClient:
        """A client of the same pipeline behind a door with other settings."""
        app = create_app(self.pipeline, config)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.run(self.pipeline.close())

    def send(
        self, method: str, path: str, body: Any = None, *, key: str = ADMIN, **headers: str
    ) -> httpx.Response:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        named = {"authorization": f"Bearer {key}", "content-type": kind}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.runner.run(self.client.request(method, path, content=raw, headers=named))

    def chat(self, model: str, content: str = "hello there", **fields: Any) -> httpx.Response:
        body = {
            "model": model,
            "max_tokens": 6,
            "temperature": 0,
            "messages": [{"role": "user", "content": content}],
        }
        return self.send("POST", "/v1/chat/completions", body | fields, key=CALLER)


def infer(server: Served, prompt: str, **fields: Any) -> Any:
    reply = server.post("/v1/infer", {"prompt": prompt, "max_tokens": 8} | fields)
    assert reply.status == 200, reply.body
    return reply.json
