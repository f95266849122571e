"""Anthropic's message batches with the official client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.helpers.serving.batch_requests import anthropic_of, batch_server, client_of, until
from tests.helpers.serving.server_process import KEYS, Probe, Served, own_home

SETTINGS = """
[batches]
max_requests = 50
concurrency = 4
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home: Path = own_home(tmp_path_factory.mktemp("messages") / "home")
    server = batch_server(home, SETTINGS)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic_of(served) as made:
        yield made


def message(custom_id: str, content: str = "hello", **fields: Any) -> Any:
    params = {
        "model": "tiny", "max_tokens": 8, "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip
    return {"custom_id": custom_id, "params": params | fields}


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    return until(
        lambda: client.messages.batches.retrieve(batch_id),
        lambda batch: batch.processing_status == "ended",
    )


def test_results_are_the_messages_of_single_requests(client: anthropic.Anthropic) -> None:
    requests = [message(f"id-{i}", f"message {i}\u2028\u0085 line") for i in range(6)]
    requests[3]["params"]["model"] = "no-such-model"
    requests[4]["params"]["max_tokens"] = -1
    requests[5]["params"]["stream"] = True
    batch = client.messages.batches.create(requests=requests)
    assert batch.processing_status == "in_progress" and batch.request_counts.processing == 6
    assert batch.results_url is None and batch.ended_at is None
    assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
    done = ended(client, batch.id)
    counts = done.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 3, 3)
    assert done.ended_at >= done.created_at and done.results_url.startswith("http://127.0.0.1")
    found = {item.custom_id: item.result for item in client.messages.batches.results(batch.id)}
    assert list(found) == [f"id-{i}" for i in range(6)]
    for index in range(3):
        result = found[f"id-{index}"]
        assert result.type == "succeeded"
        direct = requests[index]["params"]
        # the client's own method has no temperature any more
        given = {name: direct[name] for name in ("model", "max_tokens", "messages")}
        single = client.messages.create(**given, extra_body={"temperature": 0})
        assert result.message.content == single.content
        assert result.message.usage.output_tokens == single.usage.output_tokens
    kinds = [found[f"id-{i}"].error.error.type for i in (3, 4, 5)]  # type: ignore[union-attr]
    assert kinds == ["not_found_error", "invalid_request_error", "invalid_request_error"]


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "1 to 50"),
        ([message("a"), message("a")], "requests.1.custom_id"),
        ([message("not good")], "requests.0.custom_id"),
        ([message("x" * 65)], "requests.0.custom_id"),
        ([{"custom_id": "a"}], "params"),
        ([{"custom_id": "a", "params": [1]}], "requests.0.params"),
        ([message(f"id-{i}") for i in range(51)], "1 to 50"),
        ("nothing", "requests"),
    ],
)
def test_a_wrong_list_is_refused_at_once(
    client: anthropic.Anthropic, requests: Any, said: str
) -> None:
    before = [item.id for item in client.messages.batches.list()]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.batches.create(requests=requests)
    assert said in str(refused.value)
    assert [item.id for item in client.messages.batches.list()] == before


def test_a_body_that_is_no_list_of_requests_is_refused(served: Served) -> None:
    for body, status in (
        (b"", 400), (b"{", 400), (b"[]", 400), (b'{"requests":[{"custom_id":"\xff"}]}', 400),
        (b'{"requests":' + b"[" * 100_000, 400), (b" " * 32_000_001, 413),
        (b'{"requests":[{"custom_id":"a","params":{"a":"' + b"x" * 4_000_001 + b'"}}]}', 413),
    ):  # fmt: skip
        reply = served.post("/v1/messages/batches", body, x_api_key=KEYS[0])
        assert reply.status == status, reply.body
        assert reply.json["type"] == "error"
    form = served.send("POST", "/v1/messages/batches", b"{}", content_type="text/plain",
                       x_api_key=KEYS[0])  # fmt: skip
    assert form.status == 415


def test_a_long_list_of_nothing_holds_up_nobody(served: Served) -> None:
    one = b'{"custom_id":"a","params":{}}'
    body = b'{"requests":[' + b",".join([one] * 1_000_000) + b"]}"
    with Probe(served) as probe:
        reply = served.post("/v1/messages/batches", body, x_api_key=KEYS[0])
    assert reply.status == 400 and "1 to 50" in reply.json["error"]["message"]
    # 0.1 to 0.2 s on a quiet machine, in one turn of the interpreter's
    assert probe.worst_s < probe.lag.allowed_s(2.0)


def test_new_lines_between_the_values_of_a_body_mean_nothing(served: Served) -> None:
    body = b"""{
      "requests": [{
        "custom_id": "a",
        "params": {
          "model": "tiny",
          "max_tokens": 4,
          "messages": [{"role": "user", "content": "two\\nlines"}]
        }
      }]
    }"""
    reply = served.post("/v1/messages/batches", body, x_api_key=KEYS[0])
    assert reply.status == 200, reply.body
    with anthropic_of(served) as client:
        ended(client, reply.json["id"])
        [item] = client.messages.batches.results(reply.json["id"])
        assert item.result.type == "succeeded"


def test_cancelled_in_the_middle(client: anthropic.Anthropic) -> None:
    requests = [message(f"id-{i}", max_tokens=400) for i in range(40)]
    batch = client.messages.batches.create(requests=requests)
    # while it runs; once it is cancelled it may end before the next call
    with pytest.raises(anthropic.BadRequestError):
        client.messages.batches.delete(batch.id)
    stopped = client.messages.batches.cancel(batch.id)
    assert stopped.processing_status == "canceling" and stopped.cancel_initiated_at
    done = ended(client, batch.id)
    counts = done.request_counts
    assert counts.canceled > 0 and counts.canceled + counts.succeeded == 40
    kinds = [item.result.type for item in client.messages.batches.results(batch.id)]
    assert len(kinds) == 40 and kinds.count("canceled") == counts.canceled
    with pytest.raises(anthropic.ConflictError):
        client.messages.batches.cancel(batch.id)


def test_a_deleted_batch_is_gone_with_its_results(
    client: anthropic.Anthropic, served: Served
) -> None:
    batch = client.messages.batches.create(requests=[message("a")])
    ended(client, batch.id)
    with client_of(served) as files:
        # results are not among the files
        assert list(files.files.list()) == []
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    for call in (client.messages.batches.retrieve, client.messages.batches.delete,
                 client.messages.batches.results):  # fmt: skip
        with pytest.raises(anthropic.NotFoundError):
            call(batch.id)


def test_a_tenant_sees_nothing_of_another(client: anthropic.Anthropic, served: Served) -> None:
    batch = client.messages.batches.create(requests=[message("a")])
    ended(client, batch.id)
    with anthropic_of(served, KEYS[1]) as other:
        calls = other.messages.batches
        for call in (calls.retrieve, calls.cancel, calls.delete, calls.results):
            with pytest.raises(anthropic.NotFoundError):
                call(batch.id)
        assert list(calls.list()) == []
    with client_of(served) as openai_client:
        # nor is it one of the other vendor's batches
        assert batch.id not in [item.id for item in openai_client.batches.list()]
    reply = served.get(f"/v1/messages/batches/{batch.id}/results", x_api_key=KEYS[1])
    assert reply.status == 404 and reply.json["error"]["type"] == "not_found_error"


def test_pages_in_both_directions(client: anthropic.Anthropic) -> None:
    made = [client.messages.batches.create(requests=[message("a")]).id for _ in range(4)]
    newest = made[::-1]
    page = client.messages.batches.list(limit=2)
    assert [item.id for item in page.data] == newest[:2] and page.has_more
    assert [item.id for item in page.get_next_page().data] == newest[2:]
    # the client's newer interface adds a parameter of its own
    assert [item.id for item in client.beta.messages.batches.list(limit=2)][:4] == newest
    with pytest.raises(anthropic.BadRequestError, match="after_id"):
        client.messages.batches.list(after_id="msgbatch_nothing")
    back = client.messages.batches.list(limit=2, before_id=newest[3])
    assert [item.id for item in back.data] == newest[1:3] and back.has_more
    for batch_id in made:
        ended(client, batch_id)
