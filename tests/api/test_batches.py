"""OpenAI's batches with the official client against a real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.serving.batch_requests import (
    CHAT,
    batch_server,
    begin,
    chats,
    client_of,
    ended,
    jsonl,
    line,
    rows,
    until,
)
from tests.helpers.serving.server_process import KEYS, Served, chat, own_home

SETTINGS = """
[batches]
max_requests = 200
max_open = 20
concurrency = 4
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_home(tmp_path_factory.mktemp("batches") / "home")


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    server = batch_server(home, SETTINGS, dead_model=True)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


@pytest.fixture(scope="module")
def other(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served, KEYS[1]) as made:
        yield made


def test_a_batch_of_chats_gives_the_answers_of_single_requests(client: openai.OpenAI) -> None:
    batch = begin(client, chats(20), metadata={"for": "a test"})
    assert batch.status == "validating" and batch.metadata == {"for": "a test"}
    done = ended(client, batch)
    assert done.status == "completed", done.errors
    assert done.errors is None and done.error_file_id is None
    assert done.request_counts is not None and done.request_counts.total == 20
    assert (done.request_counts.completed, done.request_counts.failed) == (20, 0)
    times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert all(at is not None for at in times) and times == sorted(times)  # type: ignore[type-var]
    assert done.expires_at == done.created_at + 24 * 3600
    found = rows(client, done.output_file_id)
    assert [row["custom_id"] for row in found] == [f"request-{i}" for i in range(20)]
    assert len({row["id"] for row in found}) == 20
    usage = 0
    for index, row in enumerate(found):
        assert row["error"] is None and row["response"]["status_code"] == 200
        assert row["id"].startswith("batch_req_") and row["response"]["request_id"]
        body = openai.types.chat.ChatCompletion.model_validate(row["response"]["body"])
        usage += body.usage.total_tokens if body.usage else 0
        if index % 5 == 0:
            single = client.chat.completions.create(**chat(f"number {index}"))
            assert body.choices[0].message.content == single.choices[0].message.content
    assert done.usage is not None and done.usage.total_tokens == usage > 0
    file = client.files.retrieve(str(done.output_file_id))
    assert file.purpose == "batch_output"
    assert file.bytes == len(client.files.content(file.id).content)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (
            "/v1/completions",
            {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 4, "n": 2, "seed": 1},
        ),
        (
            "/v1/responses",
            {"model": "tiny", "input": "hello", "max_output_tokens": 5, "temperature": 0},
        ),
        (CHAT, chat("hello", n=2, logprobs=True, top_logprobs=2)),
        ("/v1/embeddings", {"model": "static", "input": ["a dog", "a cat"], "dimensions": 8}),
    ],
)
def test_each_endpoint_answers_in_its_own_format(
    client: openai.OpenAI, endpoint: str, body: dict[str, Any]
) -> None:
    done = ended(client, begin(client, jsonl(line("one", body, endpoint)), endpoint))
    assert done.status == "completed", done
    [row] = rows(client, done.output_file_id)
    answer = row["response"]["body"]
    direct = json.loads(client.post(endpoint[3:], body=body, cast_to=str))
    changing = {"id", "created", "created_at", "completed_at", "coterie", "output", "usage"}
    assert answer.keys() == direct.keys()
    for name in answer.keys() - changing:
        assert answer[name] == direct[name], name


def test_a_request_that_fails_is_in_the_error_file(client: openai.OpenAI) -> None:
    wrong = chat("hello") | {"model": "no-such-model"}
    raw = jsonl(line("good", chat("hello")), line("bad", wrong), line("long", chat("x " * 9000)))
    done = ended(client, begin(client, raw))
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 2)
    assert [row["custom_id"] for row in rows(client, done.output_file_id)] == ["good"]
    bad, long = rows(client, done.error_file_id)
    assert bad["response"]["status_code"] == 404 and bad["error"] is None
    assert bad["response"]["body"]["error"]["code"] == "model_not_found"
    assert long["response"]["status_code"] == 400
    assert long["response"]["body"]["error"]["code"] == "context_length_exceeded"
    endpoint = "/v1/embeddings"
    inputs = {"good": "a", "wide": "a", "many": ["a"] * 3000}
    bodies: dict[str, dict[str, Any]] = {
        name: {"model": "static", "input": given} for name, given in inputs.items()
    }
    bodies["wide"] |= {"dimensions": 4096}
    bodies["chat"] = {"model": "tiny", "input": "a"}
    raw = jsonl(*(line(name, body, endpoint) for name, body in bodies.items()))
    done = ended(client, begin(client, raw, endpoint))
    [good] = rows(client, done.output_file_id)
    assert done.usage is not None and done.usage.input_tokens == 1
    assert len(good["response"]["body"]["data"][0]["embedding"]) == 64
    failed = {row["custom_id"]: row["response"] for row in rows(client, done.error_file_id)}
    assert {name: it["status_code"] for name, it in failed.items()} == dict.fromkeys(
        ("wide", "many", "chat"), 400
    )


def test_a_model_that_cannot_answer_holds_up_only_its_own_requests(
    client: openai.OpenAI, other: openai.OpenAI
) -> None:
    dead = begin(client, jsonl(*(line(f"{i}", chat(model="dead")) for i in range(20))))
    mixed = begin(client, jsonl(line("dead", chat(model="dead")), line("good", chat())))
    begun = time.monotonic()
    assert ended(other, begin(other, chats(20))).status == "completed"
    until(
        lambda: client.batches.retrieve(mixed.id).request_counts,
        lambda counts: counts is not None and counts.completed == 1,
    )
    assert time.monotonic() - begun < 20
    for batch in (dead, mixed):
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert ended(client, batch).status == "cancelled"


def test_each_result_is_one_line(client: openai.OpenAI) -> None:
    names = ["a\u2028b\u0085c\u2029", "d\u2028"]
    wrong = chat(model="no-such-model")
    done = ended(client, begin(client, jsonl(line(names[0], chat()), line(names[1], wrong))))
    for name, file in zip(names, (done.output_file_id, done.error_file_id), strict=True):
        assert [row["custom_id"] for row in rows(client, file)] == [name]


def test_wrong_lines_fail_the_batch_and_are_named(client: openai.OpenAI) -> None:
    raw = b"\n".join(
        [
            jsonl(line("a", chat())).strip(),
            b"{not json",
            jsonl(line("a", chat())).strip(),
            b"",
            jsonl(line("b", chat(), method="GET")).strip(),
            jsonl(line("c", chat(), "/v1/completions")).strip(),
            jsonl(line("d", chat(temperature=9.0))).strip(),
            jsonl(line("e", chat(stream=True))).strip(),
            jsonl({"custom_id": "f", "method": "POST", "url": CHAT}).strip(),
            jsonl(line("", chat())).strip(),
            b"[1, 2]",
            jsonl(line("g", chat(tools=[{"type": "nothing"}]))).strip(),
            b'{"custom_id": "\xff"}',
        ]
    )
    done = ended(client, begin(client, raw))
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    assert done.errors is not None and done.errors.data is not None
    found = [(fault.line, fault.code) for fault in done.errors.data]
    assert found == [
        (2, "invalid_json_line"), (3, "duplicate_custom_id"), (5, "invalid_method"),
        (6, "mismatched_url"), (7, "invalid_body"), (8, "invalid_body"), (9, "missing_body"),
        (10, "invalid_custom_id"), (11, "invalid_json_line"), (12, "invalid_body"),
        (13, "invalid_json_line"),
    ]  # fmt: skip
    assert done.errors.data[4].param == "body.temperature"
    in_file = [row["error"]["line"] for row in rows(client, done.error_file_id)]
    assert in_file == [at for at, _ in found]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\n \n", "empty_file"),
        (chats(201), "too_many_requests"),
        (b"\n" * 2_000_000, "too_many_lines"),
        (b"\0" * 50, "invalid_json_line"),
    ],
)
def test_an_input_without_good_requests_fails(client: openai.OpenAI, raw: bytes, code: str) -> None:
    done = ended(client, begin(client, raw))
    assert done.status == "failed" and done.errors is not None and done.errors.data
    assert done.errors.data[0].code == code


def test_cancelled_in_the_middle_keeps_what_was_answered(client: openai.OpenAI) -> None:
    batch = begin(client, chats(60, 150))

    def answered(count: int) -> Any:
        found = until(
            lambda: client.batches.retrieve(batch.id).request_counts,
            lambda counts: counts is not None and counts.completed >= count,
        )
        return found

    answered(3)
    stopped = client.batches.cancel(batch.id)
    assert stopped.status == "cancelling" and stopped.cancelling_at
    done = ended(client, batch)
    assert done.status == "cancelled" and done.cancelled_at and done.request_counts
    good, rest = rows(client, done.output_file_id), rows(client, done.error_file_id)
    assert len(good) == done.request_counts.completed >= 3 and len(good) + len(rest) == 60
    assert {row["error"]["code"] for row in rest} == {"batch_cancelled"}
    ids = [row["custom_id"] for row in good + rest]
    assert len(set(ids)) == 60
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_tenant_sees_nothing_of_another(client: openai.OpenAI, other: openai.OpenAI) -> None:
    done = ended(client, begin(client, chats(1)))
    for file_id in (done.input_file_id, str(done.output_file_id)):
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError) as refused:
                call(file_id)
            assert refused.value.code == "file_not_found"
    for look in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError) as refused:
            look(done.id)
        assert refused.value.code == "batch_not_found"
    with pytest.raises(openai.NotFoundError):
        other.batches.create(
            input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    assert done.id not in [item.id for item in other.batches.list(limit=100)]
    assert done.input_file_id not in [item.id for item in other.files.list()]
    with pytest.raises(openai.BadRequestError):
        other.batches.list(after=done.id)


def test_what_a_batch_must_not_be_is_refused(client: openai.OpenAI) -> None:
    file = client.files.create(file=("a.jsonl", chats(1)), purpose="batch")
    output = ended(client, begin(client, chats(1))).output_file_id

    def refused(error: type[openai.APIStatusError], **fields: Any) -> str:
        body: dict[str, Any] = {
            "input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"
        }  # fmt: skip
        with pytest.raises(error) as found:
            client.batches.create(**(body | fields))
        return str(found.value.param)

    assert refused(openai.NotFoundError, input_file_id="file-nothing") == "input_file_id"
    assert refused(openai.BadRequestError, input_file_id=output) == "input_file_id"
    assert refused(openai.BadRequestError, endpoint="/v1/moderations") == "endpoint"
    assert refused(openai.BadRequestError, completion_window="1h") == "completion_window"
    assert refused(openai.BadRequestError, metadata={"k": 1}) == "metadata.k"


def test_deleting_the_input_does_not_stop_its_batch(client: openai.OpenAI) -> None:
    batch = begin(client, chats(12, 40))
    assert client.files.delete(batch.input_file_id).deleted
    done = ended(client, batch)
    assert done.status == "completed" and len(rows(client, done.output_file_id)) == 12


def test_eight_callers_and_no_answer_is_lost_or_doubled(client: openai.OpenAI) -> None:
    def call(number: int) -> None:
        raw = jsonl(*(line(f"{number}-{i}", chat(f"{number} {i}")) for i in range(15)))
        done = ended(client, begin(client, raw))
        assert done.status == "completed"
        found = [row["custom_id"] for row in rows(client, done.output_file_id)]
        assert found == [f"{number}-{i}" for i in range(15)]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))


def test_pages_of_batches_come_newest_first(client: openai.OpenAI) -> None:
    made = [ended(client, begin(client, chats(1))).id for _ in range(3)]
    listed = [item.id for item in client.batches.list(limit=2)]
    assert listed[:3] == made[::-1] and len(listed) == len(set(listed)) > 3


def test_metrics_count_requests_by_their_end(client: openai.OpenAI, served: Served) -> None:
    def value(name: str) -> float:
        text = served.get("/metrics", Authorization=f"Bearer {KEYS[0]}").body.decode()
        [found] = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found)

    before = value('coterie_batch_requests_total{state="succeeded"}')
    batch = begin(client, chats(30, 300))
    running = 'coterie_batch_requests_open{state="running"}'
    assert until(lambda: value(running), lambda count: count > 0) <= 4
    until(lambda: value('coterie_batches{status="in_progress"}'), lambda count: count == 1)
    client.batches.cancel(batch.id)
    done = ended(client, batch)
    assert done.request_counts is not None
    after = value('coterie_batch_requests_total{state="succeeded"}')
    assert after - before == done.request_counts.completed
    assert value('coterie_batch_requests_total{state="canceled"}') > 0
    assert value("coterie_file_bytes") > 0 == value(running)
