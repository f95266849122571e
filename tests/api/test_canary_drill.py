"""A candidate with random weights on a real server: it is rolled back soon, also when every answer
is cut; and a tenant with limits of 1 to 8 changes nothing that a canary or a breaker counts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coterie.packages import shipped
from coterie.packages.archive import inspect, unpack
from examples.expert_data.sql_held_out import items
from tests.helpers.serving.server_process import Served, own_home

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [item.prompt for item in items()]
SETTINGS = """
[server]
api_key_file = "{folder}/keys"
admin_key_file = "{folder}/admins"
allow_unsigned = true
[ensemble]
breach_s = 0.0
max_shadows = 0
[[tenants]]
name = "honest"
[[tenants]]
name = "low"
[[specialists]]
name = "general"
[[specialists]]
name = "sql"
adapters = ["text-to-sql"]
checks = ["sql"]
slo = {{ correctness = 0.5 }}
"""
HONEST, LOW, ADMIN = "key-of-the-honest", "key-with-low-limits", "key-of-the-admin"


class Drill:
    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, own_home(folder / "home")
        (folder / "keys").write_text(f"{HONEST} tenant=honest\n{LOW} tenant=low\n")
        (folder / "admins").write_text(f"{ADMIN}\n")
        (folder / "coterie.toml").write_text(SETTINGS.format(folder=folder))
        self.install(shipped.FOLDER / "text-to-sql.expert")
        self.install(self.random_weights(), "--name", "text-to-sql", "--version", "9.0.0")
        config = str(folder / "coterie.toml")
        self.server = Served("--config", config, COTERIE_HOME=str(self.home))
        self._numbers = iter(range(10**6))
        self._lock = threading.Lock()

    def install(self, source: Path, *more: str) -> None:
        command = [sys.executable, "-m", "coterie", "expert", "install", str(source), *more]
        environment = {**os.environ, "COTERIE_HOME": str(self.home)}
        subprocess.run([*command, "--allow-unsigned"], check=True, env=environment, timeout=120)

    def random_weights(self) -> Path:
        """The same tensors as the shipped expert's, of normal noise."""
        folder = self.folder / "random"
        folder.mkdir()
        unpack(inspect(shipped.FOLDER / "text-to-sql.expert"), folder)
        (folder / "manifest.json").unlink()
        path, draw = folder / "adapter_model.safetensors", torch.Generator().manual_seed(7)
        tensors = {
            name: torch.randn(value.shape, generator=draw).mul(0.5).to(value.dtype)
            for name, value in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
        return folder

    def ask(self, key: str, **fields: Any) -> str:
        """The answer's finish_reason."""
        with self._lock:
            prompt = PROMPTS[next(self._numbers) % len(PROMPTS)]
        body = {"model": "sql", "messages": [{"role": "user", "content": prompt}], "seed": 1}
        reply = self.server.post(
            "/v1/chat/completions", body | fields, authorization=f"Bearer {key}"
        )
        assert reply.status == 200, reply.body
        return str(reply.json["choices"][0]["finish_reason"])

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        raw = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {ADMIN}", "content_type": "application/json"}
        reply = self.server.send(method, path, raw, **headers)
        assert reply.status in (200, 201), reply.body
        return reply.json

    def figures(self) -> dict[str, Any] | None:
        """Of the running canary; None once it has ended."""
        found = self.admin("GET", "/v1/ensemble")["canaries"]
        return found[0] if found else None

    def specialist(self) -> dict[str, Any]:
        data = self.admin("GET", "/v1/ensemble")["specialists"]
        return next(item for item in data if item["specialist"] == "sql")

    def until_decided(self, **fields: Any) -> dict[str, Any]:
        """Start the canary, ask until it has ended, and return the audit log's entry."""
        body = {"expert": "text-to-sql@9.0.0", "share": 0.4}
        self.admin("POST", "/v1/ensemble/canaries", body)
        with ThreadPoolExecutor(4) as pool:
            for _ in range(40):
                list(pool.map(lambda _: self.ask(HONEST, **fields), range(4)))
                if self.figures() is None:
                    break
        entry = self.admin("GET", "/v1/ensemble/audit?limit=1")["data"][0]
        print(json.dumps({"fields": fields, "kind": entry["kind"]} | entry["details"]))
        return dict(entry)


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    made = Drill(tmp_path_factory.mktemp("canary"))
    yield made
    assert made.server.stop() == 0


@pytest.mark.parametrize(
    "fields",
    [
        # whole answers have about 15 tokens
        {"max_tokens": 64},
        # every answer of both is cut
        {"max_tokens": 24, "min_tokens": 24},
        {"max_tokens": 16, "min_tokens": 16, "temperature": 0},
    ],
)
def test_random_weights_are_rolled_back(drill: Drill, fields: dict[str, Any]) -> None:
    entry = drill.until_decided(**fields)
    details = entry["details"]
    assert entry["kind"] == "canary_rolled_back", entry
    answers = details["candidate_judged"] + details["candidate_open"]
    assert 0 < answers <= 30, details
    # nobody doubts the specialist for what its candidate wrote
    assert drill.specialist()["breaker"] == "closed"


def test_a_tenant_with_low_limits_moves_nothing(drill: Drill) -> None:
    """Beside a canary, 120 answers of limits 1 to 8, some as whole as they get."""
    for _ in range(24):
        drill.ask(HONEST, max_tokens=64)
    drill.admin("POST", "/v1/ensemble/canaries", {"expert": "text-to-sql@9.0.0", "share": 0.02})
    for _ in range(3):
        drill.ask(HONEST, max_tokens=64)
    before, known, rng = drill.figures(), drill.specialist(), random.Random(5)
    assert before is not None and known["correctness"]["judged"] >= 20
    limits = [rng.randint(1, 8) for _ in range(120)]
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(lambda limit: drill.ask(LOW, max_tokens=limit), limits))
    after, now = drill.figures(), drill.specialist()
    print(json.dumps({"cut": ends.count("length"), "canary": after, "breaker": now["breaker"]}))
    assert after == before
    assert now["correctness"] == known["correctness"] and now["ended"] == known["ended"]
    assert now["breaker"] == "closed"
    drill.admin("DELETE", "/v1/ensemble/canaries/text-to-sql")
