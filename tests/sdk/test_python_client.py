"""The Python client against the real server: answers, streams, jobs, experts, errors."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coterie_client as sdk
import pytest

from tests.helpers.serving import sdk_clients
from tests.helpers.serving.sdk_clients import LONG, OTHER, write_lora
from tests.helpers.serving.server_process import Served

GONE = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def client(environment: dict[str, str]) -> Iterator[sdk.ExpertClient]:
    with sdk.ExpertClient() as client:
        yield client


def test_an_answer_is_typed(client: sdk.ExpertClient) -> None:
    schema = {"type": "object", "properties": {"maxTokens": {"type": "boolean"}}}
    result = client.infer(
        "Say something",
        body="a document",
        max_tokens=40,
        temperature=0.5,
        explain=True,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert result.tokens_generated > 0
    assert result.metrics is not None
    assert result.metrics.output_tokens == result.tokens_generated
    assert result.plan is not None
    assert result.plan.generation_params.temperature == 0.5
    assert result.validation is not None
    assert result.validation.validator == "json_schema"


def test_a_stream_is_its_answer_in_pieces(client: sdk.ExpertClient) -> None:
    with client.infer_stream(prompt="Count", regex="[a-z]{30}", seed=4) as stream:
        chunks = list(stream)
    assert [chunks[0].event, chunks[-1].event] == ["started", "finished"]
    assert chunks[0].started is not None
    assert chunks[0].started.model == "tiny"
    assert {chunk.event for chunk in chunks[1:-1]} == {"delta"}
    assert stream.result is not None
    assert "".join(chunk.text for chunk in chunks) == stream.result.text
    assert len(stream.result.text) == 30


def test_closing_a_stream_gives_it_up(client: sdk.ExpertClient, server: Served) -> None:
    before = sdk_clients.metric(server, "vllm:generation_tokens_total")
    stream = client.infer_stream("Go on", **LONG)
    assert next(chunk.text for chunk in stream if chunk.text)
    stream.close()
    assert next(stream, None) is None
    deadline = time.monotonic() + 60
    while sdk_clients.metric(server, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.02)
    made = sdk_clients.metric(server, "vllm:generation_tokens_total") - before
    assert made < 3000, "the server went on with what was given up"


def test_errors_are_typed(client: sdk.ExpertClient, server: Served) -> None:
    with pytest.raises(sdk.BadRequest, match="did you mean `max_tokens`") as wrong:
        client.infer("hello", max_token=3)  # type: ignore[call-arg]
    assert (wrong.value.param, wrong.value.status) == ("max_token", 400)
    assert wrong.value.request_id
    with pytest.raises(sdk.NotFound, match="nobody"):
        client.infer("hello", force_experts=["nobody"])
    with pytest.raises(sdk.BadRequest, match="temperature"):
        next(client.infer_stream("hello", temperature=9))
    with pytest.raises(sdk.NotFound):
        client.job(GONE)
    with pytest.raises(sdk.Unauthorized, match="not known"), sdk.ExpertClient("wrong") as stranger:
        stranger.infer("hello")
    with (
        pytest.raises(sdk.ConnectionFailed, match="cannot talk to"),
        sdk.ExpertClient(base_url="http://127.0.0.1:1", max_retries=0) as lost,
    ):
        lost.infer("hello")
    with pytest.raises(sdk.Timeout):
        client.with_options(timeout=0.05).infer("hello", **LONG)


def test_a_job_is_answered_later(client: sdk.ExpertClient) -> None:
    # other files' jobs are on this server too
    user = f"ada-{os.getpid()}"
    submitted = client.submit("Do this later", regex="x{5}", user_id=user)
    assert submitted.status in ("queued", "processing")
    job = client.wait(submitted.job_id, timeout=60)
    assert job.status == "succeeded"
    assert job.result is not None
    assert job.text == job.result.text == "xxxxx"
    with client.job_events(submitted.job_id) as events:
        assert "".join(chunk.text for chunk in events) == "xxxxx"
    assert [row.job_id for row in client.jobs(user_id=user)] == [submitted.job_id]
    with pytest.raises(sdk.NotFound), sdk.ExpertClient(OTHER) as other:
        other.job(submitted.job_id)


def test_jobs_are_listed_over_pages(client: sdk.ExpertClient) -> None:
    ids = [client.submit("later", regex="y", user_id="bob").job_id for _ in range(3)]
    for job_id in ids:
        client.wait(job_id, timeout=60)
    listed = [row.job_id for row in client.jobs(user_id="bob", page_size=2)]
    assert listed == ids[::-1]


def test_a_job_can_be_cancelled(client: sdk.ExpertClient) -> None:
    job_id = client.submit("Go on", **LONG).job_id
    with pytest.raises(sdk.Timeout, match="not ended"):
        client.wait(job_id, timeout=0.1)
    cancelled = client.cancel(job_id)
    assert not cancelled.deleted
    assert client.wait(job_id, timeout=30).status == "cancelled"
    assert client.cancel(job_id).deleted
    with pytest.raises(sdk.NotFound):
        client.job(job_id)


def test_feedback_counts_once(client: sdk.ExpertClient) -> None:
    job_id = client.infer("hello", max_tokens=4).job_id
    assert client.feedback(job_id, "good", comment="well said").verdict == "good"
    with pytest.raises(sdk.Conflict):
        client.feedback(job_id, "bad")
    assert job_id in [row.job_id for row in client.inferences(page_size=2)]


def test_experts_are_managed(client: sdk.ExpertClient, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora")
    expert = client.experts.install_from(str(lora), name="py-made", version="1.0.0")
    assert (expert.name, expert.kind) == ("py-made", "lora")
    assert client.experts.pin("py-made").pinned
    assert not client.experts.unpin("py-made").pinned
    assert client.experts.alias("py-nick", "py-made").name == "py-made"
    listed = client.experts.list()
    assert listed.aliases["py-nick"] == "py-made@1.0.0"
    assert [row.current for row in listed.data if row.name == "py-made"] == [True]
    assert client.experts.show("py-made@1.0.0").versions[0].version == "1.0.0"
    answer = client.infer("hello", force_experts=["py-nick"], max_tokens=4)
    assert answer.experts_used == ["py-made"]
    with pytest.raises(sdk.BadRequest):
        client.experts.install(b"not a package")
    assert client.experts.remove("py-made").deleted
    with pytest.raises(sdk.NotFound):
        client.experts.show("py-made")


def test_the_async_client_does_the_same(environment: dict[str, str]) -> None:
    asyncio.run(_asked_together())


async def _asked_together() -> None:
    async with sdk.AsyncExpertClient() as client:
        asked = [client.infer("hello", regex=f"{letter}{{3}}") for letter in "abc"]
        assert [result.text for result in await asyncio.gather(*asked)] == ["aaa", "bbb", "ccc"]
        async with client.infer_stream("hello", regex="d{9}") as stream:
            assert "".join([chunk.text async for chunk in stream]) == "d" * 9
        assert stream.result is not None
        async with client.infer_stream("hello", **LONG) as given_up:
            async for chunk in given_up:
                if chunk.text:
                    break
        job_id = (await client.submit("later", regex="e{4}")).job_id
        assert (await client.wait(job_id, timeout=60)).text == "eeee"
        assert job_id in [row.job_id async for row in client.jobs(page_size=100)]
        with pytest.raises(sdk.BadRequest, match="top_p"):
            await client.infer("hello", top_p=7)
        assert (await client.experts.list()).object == "list"


def test_the_client_comes_from_this_tree() -> None:
    assert Path(sdk.__file__).is_relative_to(sdk_clients.ROOT)
