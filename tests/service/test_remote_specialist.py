"""A specialist on another server inside the whole pipeline: its death in the middle of an answer,
before it, and for long; who stands in, the breaker, shadows, quotas and cost."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from coterie.api.app import create_app
from coterie.core.config import Config, load
from coterie.core.errors import CoterieError, Unavailable, UnsupportedFeature
from coterie.core.events import Delta, Event, Failed, Finished
from coterie.core.plan import RoutePlan
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Limits,
    Message,
    ResponseFormat,
    RouteHints,
    Sampling,
)
from coterie.service.build import build
from coterie.service.pipeline import Pipeline
from tests.helpers.folders import temporary_folder
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.http_peer import DONE, HEAD, Peer, chunk, saying, status
from tests.helpers.serving.http_peer import serving as peer_of
from tests.helpers.serving.server_process import own_home

COUNT = itertools.count()
DIGIT = ResponseFormat("json_schema", '{"type": "integer", "minimum": 1, "maximum": 9}')
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":10}}\n\n'
GOOD = saying(HEAD, chunk("from afar"), chunk(end="stop"), USAGE, DONE)
SETTINGS = """
[engine]
kv_bytes = "8MB"
threads = 1
[ensemble]
min_judged = 1
fresh_shadow = 1.0
shadow_sample = 1.0
[[tenants]]
name = "metered"
tokens_per_minute = 1000
[[tenants]]
name = "counted"
requests_per_minute = 100
[[specialists]]
name = "far"
fallback = "near"
checks = ["json"]
[specialists.remote]
url = "{url}"
model = "model-there"
timeout_s = 5.0
price_in = 2.0
price_out = 10.0
shadow = {shadow}
[[specialists]]
name = "near"
model = "{model}"
checks = ["json"]
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = own_home(temporary_folder("coterie-home-"))
    monkeypatch.setenv("COTERIE_HOME", str(path))
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def serving(home: Path, url: str, *, shadow: bool = False) -> AsyncIterator[Pipeline]:
    file = home / "coterie.toml"
    model = tiny_checkpoint("llama")
    file.write_text(SETTINGS.format(url=url, model=model, shadow=str(shadow).lower()))
    pipeline = build(load(file), inproc=True)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()


def request(model: str | None = None, **options: Any) -> InferenceRequest:
    base = InferenceRequest(
        id=f"remote-{next(COUNT)}",
        prompt=Chat((Message("user", "How many?"),)),
        sampling=Sampling(temperature=0.0),
        limits=Limits(max_tokens=4),
        hints=RouteHints(model),
        response_format=None,
        session=None,
        tenant="t",
        arrived_at=time.monotonic(),
    )
    return replace(base, **options)


async def answered(pipeline: Pipeline, asked: InferenceRequest) -> tuple[RoutePlan, list[Event]]:
    plans: list[RoutePlan] = []
    events = [event async for event in pipeline.handle(asked, on_plan=plans.append)]
    return plans[-1], events


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def metric(pipeline: Pipeline, line: str) -> float:
    for found in pipeline.metrics_text().splitlines():
        if found.startswith(line + " "):
            return float(found.rpartition(" ")[2])
    return 0.0


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def run(test: Awaitable[None]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test, 100)

    asyncio.run(whole())


async def known(pipeline: Pipeline) -> None:
    """One judged answer: from then on `near` may stand in."""
    limits = Limits(max_tokens=None, stop=("\n\n\n",))
    await answered(pipeline, request("near", response_format=DIGIT, limits=limits))


def test_a_remote_specialist_fails_is_replaced_and_returns(home: Path) -> None:
    async def test() -> None:
        async with peer_of(GOOD) as peer, serving(home, peer.url) as pipeline:
            await known(pipeline)
            await good_answers(pipeline, peer)
            await half_answers(pipeline, peer)
            await failures_before_the_first_token(pipeline, peer)
            await names_in_answers(pipeline, peer, load(home / "coterie.toml"))
            await the_breaker(pipeline, peer)
            port = peer.port
            await down_and_back(pipeline, peer, port)

    run(test())


async def good_answers(pipeline: Pipeline, peer: Peer) -> None:
    plan, events = await answered(pipeline, request(tenant="metered"))
    assert plan.specialist == "far" and text_of(events) == "from afar"
    finished = events[-1]
    assert isinstance(finished, Finished) and finished.receipt is not None
    assert finished.receipt.plan.replica == "remote-far"
    assert (finished.receipt.prompt_tokens, finished.receipt.completion_tokens) == (100, 10)
    body = peer.requests[-1].body
    assert body["model"] == "model-there"
    # what nobody gave is not sent: no seed is drawn for another server
    given = {"model", "stream", "stream_options", "messages", "max_tokens", "temperature"}
    # the router tunes what it routes
    assert body.keys() == given | {"top_p"}
    plan, _ = await answered(pipeline, request("far"))
    assert peer.requests[-1].body.keys() == given and plan.sampling.seed is None
    cost = 0.5 * metric(pipeline, 'coterie_remote_cost_total{model_name="far"}')
    assert cost == pytest.approx((100 * 2 + 10 * 10) / 1e6)
    # the quota holds what the server counted, not our estimate
    tokens = next(q for q in pipeline.quota_states("metered") if q.kind == "tokens")
    assert 890 <= tokens.remaining < 960
    with pytest.raises(UnsupportedFeature):
        await answered(pipeline, request("far", response_format=ResponseFormat("regex", "a+")))
    with pytest.raises(UnsupportedFeature):
        await pipeline.tokenise("far", Chat((Message("user", "a"),)))


async def half_answers(pipeline: Pipeline, peer: Peer) -> None:
    """From its first token on an answer stays where it is: never stitched from two."""
    peer.script = saying(HEAD, chunk("half an"))
    plan, events = await answered(pipeline, request())
    assert plan.specialist == "far" and text_of(events) == "half an"
    assert isinstance(events[-1], Failed) and events[-1].code == "worker_crashed"
    assert metric(pipeline, 'coterie_failures_total{model_name="far",code="worker_crashed"}') == 1
    line = 'coterie_engine_events_total{replica="remote-far",event="cut_answers"}'
    assert metric(pipeline, line) == 1
    peer.script = GOOD
    await until(lambda: pipeline.fleet.served["far"].replicas.ready())
    assert text_of((await answered(pipeline, request()))[1]) == "from afar"


async def failures_before_the_first_token(pipeline: Pipeline, peer: Peer) -> None:
    peer.script = saying(status(500, {"error": {"message": "boom"}}))
    plan, events = await answered(pipeline, request(tenant="counted"))
    assert plan.specialist == "near" and isinstance(events[-1], Finished)
    assert "near in place of far, which failed" in plan.reasons
    # two attempts are one request
    assert [quota.remaining for quota in pipeline.quota_states("counted")] == [99]
    assert metric(pipeline, 'coterie_recoveries_total{where="far",kind="stood_in"}') == 1
    receipt = events[-1].receipt
    assert receipt is not None and receipt.plan.specialist == "near"
    # who names it gets the error
    with pytest.raises(Unavailable, match="boom"):
        await answered(pipeline, request("far"))
    # a fault of the caller is nobody else's
    peer.script = saying(status(400, {"error": {"message": "bad messages"}}))
    with pytest.raises(CoterieError, match="bad messages") as refused:
        await answered(pipeline, request())
    assert refused.value.code == "invalid_request"
    # nor is a limit
    peer.script = saying(status(429, {"error": {"message": "slow"}}, retry_after="9"))
    with pytest.raises(CoterieError) as busy:
        await answered(pipeline, request("far"))
    assert (busy.value.code, busy.value.retry_after_s) == ("overloaded", 9.0)
    peer.script = GOOD
    assert (await answered(pipeline, request()))[0].specialist == "far"


async def names_in_answers(pipeline: Pipeline, peer: Peer, config: Config) -> None:
    """An answer tells who gave it, not who was asked first."""
    transport = httpx.ASGITransport(create_app(pipeline, config))
    chat = {"messages": [{"role": "user", "content": "How many?"}], "max_tokens": 4}
    text = {"prompt": "How many?", "max_tokens": 4}
    asked = {"/v1/chat/completions": chat, "/v1/completions": text, "/v1/messages": chat}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path, body in asked.items():
            for is_streamed in (False, True):
                peer.script = saying(status(500))
                sent = body | {"model": "auto", "stream": is_streamed}
                reply = await client.post(path, json=sent)
                assert reply.status_code == 200, reply.text
                assert reply.headers["x-coterie-specialist"] == "near"
                names = set(re.findall(r'"model": ?"(\w+)"', reply.text.partition("receipt")[0]))
                assert names == {"near"}, reply.text
                peer.script = GOOD
                reply = await client.post(path, json=body | {"model": "auto"})
                assert reply.json()["model"] == "far"


async def the_breaker(pipeline: Pipeline, peer: Peer) -> None:
    """Five failures in a row eject the replica, although its server answers probes."""
    control = pipeline.ensemble.control
    peer.script = saying(status(500))
    for _ in range(5):
        with pytest.raises(Unavailable):
            await answered(pipeline, request("far"))
    assert control.watches["far"].replicas.ejected(control.now) == {"remote-far"}
    peer.script = GOOD
    before = sum(one.method == "POST" for one in peer.requests)
    plan, _ = await answered(pipeline, request())
    assert plan.specialist == "near"
    assert "near in place of far, which is ejected" in plan.reasons
    assert sum(one.method == "POST" for one in peer.requests) == before
    control.restore("far", "operator")
    assert (await answered(pipeline, request()))[0].specialist == "far"
    kinds = [item["kind"] for item in await pipeline.ensemble.audit(20)]
    assert kinds[:2] == ["restored", "replica_ejected"]


async def down_and_back(pipeline: Pipeline, peer: Peer, port: int) -> None:
    replica = pipeline.fleet.served["far"].replicas.members[0]
    peer.probe_status, peer.script = 503, saying()
    plan, _ = await answered(pipeline, request())
    assert plan.specialist == "near"
    await until(lambda: replica.state() == "silent")
    # it is known to be down: nothing is sent there
    before = sum(one.method == "POST" for one in peer.requests)
    plan, _ = await answered(pipeline, request())
    assert plan.specialist == "near" and plan.reasons[-1].endswith("which is ejected")
    assert sum(one.method == "POST" for one in peer.requests) == before
    with pytest.raises(Unavailable) as refused:
        await answered(pipeline, request("far"))
    assert refused.value.retry_after_s is not None
    health = pipeline.health()
    # the rest of the server is ready
    assert health.live and health.ready and not health.specialists["far"]["ready"]
    peer.probe_status, peer.script = 200, GOOD
    await until(replica.healthy)
    pipeline.ensemble.control.watches["far"].replicas.restore_all()
    assert (await answered(pipeline, request()))[0].specialist == "far"
    assert metric(pipeline, 'coterie_worker_restarts_total{replica="remote-far"}') >= 1


@pytest.mark.full
@pytest.mark.parametrize("opted_in", [False, True])
def test_shadows_go_to_another_server_only_by_opt_in(home: Path, opted_in: bool) -> None:
    async def test() -> None:
        async with peer_of(GOOD) as peer, serving(home, peer.url, shadow=opted_in) as pipeline:
            control = pipeline.ensemble.control
            control.demote("far", "operator")
            await known(pipeline)
            for _ in range(3):
                plan, _ = await answered(pipeline, request())
                assert plan.specialist == "near"
                assert plan.shadow == ("far" if opted_in else "")
            status = pipeline.ensemble.status
            await until(lambda: not status()["shadows"]["running"] + status()["shadows"]["waiting"])
            posts = sum(one.method == "POST" for one in peer.requests)
            assert bool(posts) == opted_in

    run(test())
