"""Batches over HTTP for tests: a server with two tenants, input files, and waiting for an end."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import openai
from openai.types import Batch

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.server_process import KEYS, Served, chat

END_S = 90.0
CHAT = "/v1/chat/completions"
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
T = TypeVar("T")


def batch_server(home: Path, settings: str = "", dead_model: bool = False) -> Served:
    """The tiny model with a long context, an encoder and two tenants. `dead_model`: and one on a
    server that does not answer."""
    keys, config = home.parent / "keys.txt", home.parent / "coterie.toml"
    keys.write_text("\n".join(KEYS) + "\n")
    config.write_text(settings)
    model = str(tiny_checkpoint("llama", max_position_embeddings=8192))
    common = ("--api-key-file", str(keys), "--config", str(config), "--encoder", "static")
    if not dead_model:
        return Served(model, "--name", "tiny", *common, COTERIE_HOME=str(home))
    specialists = f"""
        [[specialists]]
        name = "tiny"
        model = "{model}"
        [[specialists]]
        name = "dead"
        remote = {{ url = "http://127.0.0.1:9/v1", model = "dead", context = 512 }}
        """
    config.write_text(settings + specialists)
    server = Served(*common, COTERIE_HOME=str(home), wait_ready=False)
    # it is never wholly ready
    until(lambda: server.post(CHAT, chat(), x_api_key=KEYS[0]).status, lambda code: code == 200)
    return server


def client_of(server: Served, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def anthropic_of(server: Served, key: str = KEYS[0]) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def line(custom_id: str, body: dict[str, Any], url: str = CHAT, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields


def jsonl(*lines: Any) -> bytes:
    return b"\n".join(json.dumps(item).encode() for item in lines) + b"\n"


def chats(count: int, tokens: int = 8) -> bytes:
    """An input file of so many chats, each with another answer."""
    rows = [line(f"request-{i}", chat(f"number {i}", max_tokens=tokens)) for i in range(count)]
    return jsonl(*rows)


def begin(client: openai.OpenAI, raw: bytes, endpoint: Any = CHAT, **fields: Any) -> Batch:
    file = client.files.create(file=("input.jsonl", raw), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def until(question: Callable[[], T], is_it: Callable[[T], bool]) -> T:
    deadline = time.monotonic() + END_S
    while not is_it(found := question()):
        assert time.monotonic() < deadline, f"still {found}"
        time.sleep(0.02)
    return found


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    return until(lambda: client.batches.retrieve(batch.id), lambda found: found.status not in OPEN)


def rows(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(item) for item in client.files.content(file_id).text.splitlines()]


def ask_database(home: Path, query: str, *values: Any) -> list[Any]:
    """Rows of the database of batches; also of one that a server uses."""
    with closing(sqlite3.connect(home / "state" / "batches.db", timeout=20)) as sql, sql:
        return sql.execute(query, values).fetchall()
