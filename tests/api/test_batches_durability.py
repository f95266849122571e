"""Batches through the death of their server, its end, and their own; and beside other requests."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.serving.batch_requests import (
    anthropic_of,
    ask_database,
    batch_server,
    begin,
    chats,
    client_of,
    ended,
    rows,
    until,
)
from tests.helpers.serving.server_process import Probe, Served, chat, own_home

# fewer places in the engine than requests of batches that want to run
SMALL = """
[server]
drain_s = 0.2
[engine]
max_sequences = 2
max_queue = 2
[batches]
concurrency = 8
"""
RUNNING = "SELECT custom_id, state, result FROM requests WHERE batch = ? ORDER BY line"


def answered(client: openai.OpenAI, batch_id: str, count: int) -> None:
    until(
        lambda: client.batches.retrieve(batch_id).request_counts,
        lambda counts: counts is not None and counts.completed >= count,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_home(tmp_path_factory.mktemp("durable") / "home")


@pytest.mark.full
def test_batches_outlive_a_killed_server_and_end_once(home: Path) -> None:
    first = batch_server(home, SMALL)
    try:
        client = client_of(first)
        # the second one is long enough to be unfinished, however much of it runs beside the first
        batch, late = begin(client, chats(40, 80)), begin(client, chats(6, 400))
        messages = anthropic_of(first).messages.batches.create(
            requests=[_message(i, 60) for i in range(8)]
        )
        answered(client, batch.id, 4)
        _check_that_others_come_first(client, batch.id)
        # the other batches may have all places for a moment
        until(
            lambda: {row[1] for row in ask_database(home, RUNNING, batch.id)},
            lambda states: "running" in states,
        )
        first.stop(signal.SIGKILL)
        before = {row[0]: row for row in ask_database(home, RUNNING, batch.id)}
        # its time is over before the next server starts
        ask_database(home, "UPDATE batches SET expires_at = ? WHERE id = ?", time.time(), late.id)
    finally:
        first.stop(signal.SIGKILL)
    assert {row[1] for row in before.values()} >= {"pending", "running", "succeeded"}
    second = batch_server(home, SMALL)
    try:
        client = client_of(second)
        with Probe(second) as probe:
            done = ended(client, batch)
        assert done.status == "completed" and done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed) == (40, 40)
        found = rows(client, done.output_file_id)
        assert [row["custom_id"] for row in found] == [f"request-{i}" for i in range(40)]
        for row in found:
            _, state, result = before[row["custom_id"]]
            if state == "succeeded":
                assert row == json.loads(result), "a request that had ended ran again"
        single = client.chat.completions.create(**chat("number 39", max_tokens=80))
        content = single.choices[0].message.content
        assert found[39]["response"]["body"]["choices"][0]["message"]["content"] == content
        _check_expired(client, late.id)
        _check_messages(second, messages.id)
        assert probe.worst_s < 2.0
        assert ask_database(home, "SELECT count(*) FROM requests") == [(0,)]
        assert not list((home / "state" / "files").glob("*.input"))
        assert not list((home / "state" / "files").glob("*.partial"))
    finally:
        second.stop()


def _message(index: int, tokens: int = 8) -> Any:
    messages = [{"role": "user", "content": f"message {index}"}]
    params = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "messages": messages}
    return {"custom_id": f"message-{index}", "params": params}


def _check_that_others_come_first(client: openai.OpenAI, batch_id: str) -> None:
    """The batch wants more than the engine has; a chat is answered all the same."""
    for index in range(5):
        begun = time.monotonic()
        client.chat.completions.create(**chat(f"quick {index}", max_tokens=4))
        assert time.monotonic() - begun < 5.0
    assert client.batches.retrieve(batch_id).status == "in_progress", "it was over before"


def _check_expired(client: openai.OpenAI, batch_id: str) -> None:
    late = until(lambda: client.batches.retrieve(batch_id), lambda batch: batch.status == "expired")
    assert late.expired_at and late.request_counts is not None
    rest = rows(client, late.error_file_id)
    assert rest and {row["error"]["code"] for row in rest} == {"batch_expired"}
    assert len(rest) + len(rows(client, late.output_file_id)) == 6


def _check_messages(server: Served, batch_id: str) -> None:
    batches = anthropic_of(server).messages.batches
    until(lambda: batches.retrieve(batch_id), lambda batch: batch.processing_status == "ended")
    found = [item.custom_id for item in batches.results(batch_id)]
    assert found == [f"message-{i}" for i in range(8)]


@pytest.mark.full
def test_a_server_that_is_stopped_leaves_its_batches_to_the_next(home: Path) -> None:
    first = batch_server(home, SMALL)
    try:
        client = client_of(first)
        batch = begin(client, chats(30, 100))
        answered(client, batch.id, 2)
        assert first.stop() == 0
    finally:
        first.stop(signal.SIGKILL)
    states = {row[1] for row in ask_database(home, RUNNING, batch.id)}
    assert states == {"pending", "succeeded"}
    assert ask_database(home, "SELECT max(crashes) FROM requests") == [(0,)]
    second = batch_server(home, SMALL)
    try:
        client = client_of(second)
        done = ended(client, batch)
        assert done.status == "completed" and len(rows(client, done.output_file_id)) == 30
    finally:
        second.stop()
