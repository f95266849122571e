"""Responses that are kept: continued, read and deleted by their tenant; and in the background."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.models.tool_callers import DONE, ONE, RESULTS, SPOKEN, WEATHER
from tests.helpers.serving.response_events import (
    BEGIN,
    MESSAGE,
    MESSAGE_END,
    checked_events,
    kinds_of,
)
from tests.helpers.serving.server_process import KEYS, Served, frames, own_home

ASK: dict[str, Any] = {"model": "tiny", "input": "hello there", "temperature": 0}
TOOLS: list[Any] = [{"type": "function", "strict": False, **WEATHER}]
PATH = "/v1/responses"
ENDED = ("completed", "incomplete", "failed", "cancelled")


def ended(client: openai.OpenAI, response: Any) -> Any:
    """The response when it has ended."""
    deadline = time.monotonic() + 60
    while response.status not in ENDED:
        assert time.monotonic() < deadline, response
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    """`previous_response_id` gives the same tokens as all items sent again."""
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 6}
    first: Any = client.responses.create(**asked, input="one", instructions="Count.")
    second: Any = client.responses.create(**asked, input="two", previous_response_id=first.id)
    third: Any = client.responses.create(
        **asked, input="three", previous_response_id=second.id, instructions="Go on."
    )
    items: list[Any] = [
        {"role": "user", "content": "one"}, first.output[0].to_dict(),
        {"role": "user", "content": "two"}, second.output[0].to_dict(),
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    whole: Any = client.responses.create(**asked, input=items, instructions="Go on.", store=False)
    assert whole.usage.input_tokens == third.usage.input_tokens
    assert whole.output_text == third.output_text
    assert third.previous_response_id == second.id
    # two may continue the same one
    other: Any = client.responses.create(**asked, input="two", previous_response_id=first.id)
    assert other.output_text == second.output_text
    # what the model read, newest first
    listed: Any = client.responses.input_items.list(third.id, limit=3)
    assert listed.data[0].content[0].text == "three" and listed.has_more
    every: list[Any] = list(client.responses.input_items.list(third.id, order="asc"))
    texts = [item.content[0].text for item in every]
    assert texts == ["one", first.output_text, "two", second.output_text, "three"]


def test_read_and_deleted(client: openai.OpenAI, server: Served) -> None:
    made: Any = client.responses.create(**ASK, max_output_tokens=5)
    again: Any = client.responses.retrieve(made.id)
    assert again.to_dict() == made.to_dict()
    streamed: list[Any] = list(client.responses.create(**ASK, max_output_tokens=5, stream=True))
    found: Any = client.responses.retrieve(streamed[-1].response.id)
    assert found.output_text == made.output_text == streamed[-1].response.output_text
    assert found.output[0].id == streamed[-1].response.output[0].id
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as gone:
            call(made.id)
        assert gone.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(**ASK, previous_response_id=made.id)
    assert unknown.value.code == "previous_response_not_found"
    # what is not to be kept is not
    private: Any = client.responses.create(**ASK, max_output_tokens=5, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(private.id)
    assert private.store is False
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(found.id)
    assert "background" in refused.value.message


def test_events_are_sent_again(client: openai.OpenAI, server: Served) -> None:
    made: Any = client.responses.create(**ASK, max_output_tokens=5)
    path = f"{PATH}/{made.id}?stream=true"
    events = checked_events(server.get(path))
    delta = "response.output_text.delta"
    assert [event.type for event in events] == [
        *BEGIN, *MESSAGE, delta, *MESSAGE_END, "response.incomplete",
    ]  # fmt: skip
    assert events[-1].response.to_dict() == made.to_dict()
    rest = checked_events(server.get(f"{path}&starting_after=4"))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[5:]]


def test_an_item_is_referred_to(caller: openai.OpenAI) -> None:
    """As the AI SDK sends a conversation whose items are kept."""
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "temperature": 0}
    first: Any = caller.responses.create(**asked, input=ONE)
    call = first.output[1]
    items: list[Any] = [
        {"role": "user", "content": ONE},
        {"type": "item_reference", "id": first.output[0].id},
        {"type": "item_reference", "id": call.id},
        {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS["Paris"]},
    ]
    second: Any = caller.responses.create(**asked, input=items)
    assert second.output_text == DONE
    # the items themselves are kept, so that the response can be continued without the first
    caller.responses.delete(first.id)
    listed: list[Any] = list(caller.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in listed] == [
        "message", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert listed[1].content[0].text == SPOKEN


def test_a_tenant_finds_its_own_alone(strict_server: Served) -> None:
    url = f"{strict_server.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key=KEYS[0], max_retries=4) as mine,
        openai.OpenAI(base_url=url, api_key=KEYS[1], max_retries=4) as other,
    ):
        made: Any = mine.responses.create(**ASK, max_output_tokens=3)
        assert mine.responses.retrieve(made.id).id == made.id
        for call in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.input_items.list(made.id)
        with pytest.raises(openai.BadRequestError) as unknown:
            other.responses.create(**ASK, previous_response_id=made.id)
        assert unknown.value.code == "previous_response_not_found"
        item: Any = {"type": "item_reference", "id": made.output[0].id}
        with pytest.raises(openai.BadRequestError):
            other.responses.create(**ASK | {"input": [item]})
        assert mine.responses.retrieve(made.id).output == made.output


def test_in_the_background(client: openai.OpenAI, server: Served) -> None:
    whole: Any = client.responses.create(**ASK, max_output_tokens=12, store=False)
    made: Any = client.responses.create(**ASK, max_output_tokens=12, background=True)
    assert made.status == "queued" and made.background and made.output == []
    found = ended(client, made)
    assert (found.status, found.output_text) == ("incomplete", whole.output_text)
    assert found.usage.output_tokens == 12 and found.usage.input_tokens == whole.usage.input_tokens
    assert found.model_extra["coterie"]["receipt"]["request_id"] == made.id
    assert client.responses.retrieve(made.id).to_dict() == found.to_dict()
    # ended, it stays as it is; it is continued and deleted as any other
    assert client.responses.cancel(made.id).to_dict() == found.to_dict()
    after: Any = client.responses.create(**ASK, previous_response_id=made.id, max_output_tokens=2)
    assert after.usage.input_tokens > found.usage.input_tokens + 12
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_background_events(client: openai.OpenAI, server: Served) -> None:
    body = ASK | {"max_output_tokens": 12, "background": True, "stream": True}
    reply = server.post(PATH, body)
    events = checked_events(reply)
    assert kinds_of(events) == [
        "response.created", "response.queued", "response.in_progress", *MESSAGE,
        "response.output_text.delta", *MESSAGE_END, "response.incomplete",
    ]  # fmt: skip
    final = events[-1].response
    again = server.get(f"{PATH}/{final.id}?stream=true&starting_after=1")
    assert frames(again.body)[1:] == frames(reply.body)[3:]


def test_a_background_answer_has_its_calls(caller: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "temperature": 0}
    whole: Any = caller.responses.create(**asked, input=ONE)
    # an item brings the tools, and holds for the responses that go on
    more: Any = {"type": "additional_tools", "role": "developer", "tools": TOOLS}
    del asked["tools"]
    items: list[Any] = [more, {"role": "user", "content": ONE}]
    found = ended(caller, caller.responses.create(**asked, input=items, background=True))
    assert found.status == "completed"
    assert [item.type for item in found.output] == ["message", "function_call"]
    assert found.output[1].arguments == whole.output[1].arguments
    output: Any = {
        "type": "function_call_output", "call_id": found.output[1].call_id,
        "output": RESULTS["Paris"],
    }  # fmt: skip
    second: Any = caller.responses.create(
        **asked, input=[output], previous_response_id=found.id, background=True
    )
    assert ended(caller, second).output_text == DONE
    listed: list[Any] = list(caller.responses.input_items.list(second.id, order="asc"))
    assert (listed[0].type, listed[0].tools[0].name) == ("additional_tools", "weather")


def test_a_background_response_is_cancelled(client: openai.OpenAI, server: Served) -> None:
    asked = {**ASK, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    made: Any = client.responses.create(**asked, background=True)
    gone: Any = client.responses.cancel(made.id)
    assert gone.status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASK, previous_response_id=made.id)
    assert refused.value.param == "previous_response_id"
    # deleted while it runs, it is stopped too
    other: Any = client.responses.create(**asked, background=True)
    client.responses.delete(other.id)
    assert server.get(f"/v1/jobs/{other.id}").status == 404
    # one that still runs cannot be continued
    running: Any = client.responses.create(**asked, background=True)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASK, previous_response_id=running.id)
    client.responses.cancel(running.id)


def test_what_a_job_would_refuse_is_refused_at_once(server: Served) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": odd}
    reply = server.post(PATH, ASK | {"background": True, "text": {"format": form}})
    assert (reply.status, reply.json["error"]["param"]) == (400, "text.format"), reply.body
    unknown = server.post(PATH, ASK | {"background": True, "model": "nobody"})
    assert unknown.status == 404


def test_a_client_that_leaves_stops_its_response(client: openai.OpenAI, server: Served) -> None:
    asked = {**ASK, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    stream = client.responses.create(**asked, stream=True)
    first: Any = next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while server.metric("coterie_gateway_open_streams") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.response.id)
    assert server.get(f"/v1/receipts/{first.response.id}").json["outcome"] == "abort"


@pytest.mark.full
def test_a_killed_worker_is_a_pause() -> None:
    served = Served(str(tiny_checkpoint("llama")), "--name", "tiny")
    try:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            asked = {**ASK, "max_output_tokens": 600, "extra_body": {"ignore_eos": True}}
            whole: Any = client.responses.create(**asked).output_text
            kinds, text = list[str](), ""
            for event in client.responses.create(**asked, stream=True):
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
                    if len(kinds) == 20:
                        assert served.kill_workers() == 1
            assert text == whole
            assert kinds.count("response.created") == kinds.count("response.incomplete") == 1
    finally:
        served.stop()


@pytest.mark.full
def test_responses_outlive_a_killed_server(tmp_path: Path) -> None:
    """A background response is answered by the next server; a kept one is read there."""
    home = str(own_home(tmp_path / "home"))
    model = str(tiny_checkpoint("llama"))
    first = Served(model, "--name", "tiny", COTERIE_HOME=home)
    kept = first.post(PATH, ASK | {"max_output_tokens": 4}).json
    body = ASK | {"max_output_tokens": 900, "ignore_eos": True, "background": True}
    made = [first.post(PATH, body | {"seed": at}).json["id"] for at in range(3)]
    first.process.kill()
    first.process.wait()
    second = Served(model, "--name", "tiny", COTERIE_HOME=home)
    try:
        assert second.get(f"{PATH}/{kept['id']}").json == kept
        with openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0) as client:
            found = [ended(client, client.responses.retrieve(name)) for name in made]
            assert [one.status for one in found] == ["incomplete"] * 3
            assert all(one.usage.output_tokens == 900 for one in found)
            more = client.responses.create(**ASK, previous_response_id=kept["id"])
            assert more.previous_response_id == kept["id"]
    finally:
        second.stop()


@pytest.mark.full
def test_an_end_is_written_though_nobody_asks(tmp_path: Path) -> None:
    """A job is kept for less long than its response."""
    home = own_home(tmp_path / "home")
    served = Served(str(tiny_checkpoint("llama")), "--name", "tiny", COTERIE_HOME=str(home))
    try:
        made = served.post(PATH, ASK | {"max_output_tokens": 4, "background": True}).json["id"]
        deadline = time.monotonic() + 90
        with sqlite3.connect(home / "state" / "responses.db") as db:
            while db.execute("SELECT 1 FROM responses WHERE request IS NOT NULL").fetchall():
                assert time.monotonic() < deadline
                time.sleep(0.5)
        assert served.send("DELETE", f"/v1/jobs/{made}", None).status == 200
        found = served.get(f"{PATH}/{made}").json
        assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", 4)
    finally:
        served.stop()


@pytest.mark.full
def test_a_server_that_keeps_nothing(tmp_path: Path) -> None:
    config = tmp_path / "coterie.toml"
    config.write_text("[responses]\nmax_bytes = 0\n")
    home = own_home(tmp_path / "home")
    served = Served(
        str(tiny_checkpoint("llama")), "--name", "tiny", "--config", str(config),
        COTERIE_HOME=str(home),
    )  # fmt: skip
    try:
        made = served.post(PATH, ASK | {"max_output_tokens": 3}).json
        assert made["store"] is False
        assert served.get(f"{PATH}/{made['id']}").status == 404
        for fields in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            assert served.post(PATH, ASK | fields).status == 400
        assert not (home / "state" / "responses.db").exists()
    finally:
        served.stop()
