"""service/pipeline.py over real engines: the whole road without HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coterie.core.config import load
from coterie.core.errors import (
    ContextLengthExceeded,
    CoterieError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from coterie.core.events import Delta, Event, Finished, Started
from coterie.core.plan import AlternateSpecialist, Assignment, Rejected, RoutePlan
from coterie.core.request import (
    Chat,
    InferenceRequest,
    Limits,
    Message,
    Prompt,
    RouteHints,
    Sampling,
    Text,
    Tokens,
)
from coterie.service.build import build
from coterie.service.pipeline import Pipeline, PlannedRequest
from coterie.service.submit.load import ReplicaRequest
from coterie.service.submit.submitter import tokenise
from coterie.workers.contract import OnOutage, Sink
from tests.helpers.models.tiny import tiny_checkpoint
from tests.helpers.serving.running_tasks import running_tasks
from tests.helpers.serving.server_process import MachineLag
from tests.helpers.serving.worker_requests import own_workers

Test = Callable[[Pipeline], Awaitable[None]]
COUNT = iter(range(10**6))


def request(
    prompt: Prompt | str = "The quick brown fox", *, model: str | None = None, **options: Any
) -> InferenceRequest:
    sampling = {"temperature": 0.0, **options.pop("sampling", {})}
    limits = {"max_tokens": 12, "ignore_eos": True, **options.pop("limits", {})}
    base = InferenceRequest(
        id=f"req-{next(COUNT)}",
        prompt=Text(prompt) if isinstance(prompt, str) else prompt,
        sampling=Sampling(**sampling),
        limits=Limits(**limits),
        hints=RouteHints(model),
        response_format=None,
        session=None,
        tenant="t",
        arrived_at=time.monotonic(),
    )
    return replace(base, **options)


async def collect(pipeline: Pipeline, asked: InferenceRequest) -> list[Event]:
    return [event async for event in pipeline.handle(asked)]


async def collect_run(pipeline: Pipeline, planned: PlannedRequest) -> list[Event]:
    return [event async for event in pipeline.run(planned)]


def tokens(events: list[Event]) -> list[int]:
    return [t for event in events if isinstance(event, Delta) for t in event.token_ids]


@asynccontextmanager
async def serving(overrides: dict[str, Any], *, inproc: bool = True) -> AsyncIterator[Pipeline]:
    common = {
        "specialists.0.model": str(tiny_checkpoint("llama")),
        "specialists.0.name": "tiny",
        "engine.kv_bytes": "8MB",
        "engine.threads": 1,
        "engine.restart_backoff_s": 0.05,
    }
    pipeline = build(load(None, common | overrides), inproc=inproc)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.close()


@pytest.fixture(scope="module")
def on_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Test], None]]:
    """One pipeline for the module: two specialists on one engine, and a third on its own."""
    file = tmp_path_factory.mktemp("config") / "coterie.toml"
    file.write_text(f"""
        [engine]
        kv_bytes = "8MB"
        threads = 1
        [[specialists]]
        name = "first"
        model = "{tiny_checkpoint("llama")}"
        [[specialists]]
        name = "second"
        model = "{tiny_checkpoint("llama")}"
        context = 64
        block_size = 8
        [[specialists]]
        name = "other"
        model = "{tiny_checkpoint("qwen3")}"
    """)
    with asyncio.Runner() as runner:
        pipeline = build(load(file), inproc=True)
        runner.run(pipeline.start())
        try:
            yield lambda test: runner.run(test(pipeline))  # type: ignore[arg-type]
        finally:
            runner.run(pipeline.close())


def test_the_road(on_pipeline: Callable[[Test], None]) -> None:
    async def test(pipeline: Pipeline) -> None:
        events = await collect(pipeline, request())
        assert isinstance(events[0], Started) and isinstance(events[-1], Finished)
        assert len(tokens(events)) == 12
        chat = Chat((Message("user", "What is the capital of France?"),))
        answered = await collect(pipeline, request(chat, model="other"))
        assert len(tokens(answered)) == 12
        ids = await pipeline.tokenise("first", Text("The quick brown fox"))
        again = await collect(pipeline, request(Tokens(tuple(ids)), model="auto"))
        assert tokens(again) == tokens(events)

    on_pipeline(test)


def test_a_viable_alternate_answers_if_the_first_choice_has_no_room(
    on_pipeline: Callable[[Test], None],
) -> None:
    async def test(pipeline: Pipeline) -> None:
        served = pipeline._fleet.find("first").replicas
        queue = served.queue(served.members[0])
        crowd = [ReplicaRequest(5, "t", 1, 1) for _ in range(400)]
        for item in crowd:
            queue.add(item)

        def planned(*, viable: bool, other: str = "other") -> PlannedRequest:
            made = pipeline.plan(request(model="first"))
            alternate = AlternateSpecialist(other, 0.3, viable)
            made.run.plan = replace(made.plan, intent="code", alternates=(alternate,))
            return made

        plans: list[RoutePlan] = []
        taken = planned(viable=True)
        events = [event async for event in pipeline.run(taken, plans.append)]
        assert isinstance(events[-1], Finished) and len(tokens(events)) == 12
        assert [plan.specialist for plan in plans] == ["other"]
        assert plans[0].intent == "code" and "rerouted: first" in plans[0].reasons[-1]
        # the caller named the first choice, and nobody named the alternate
        assert plans[0].reasons.count("named by the caller") == 1
        # not where the router did not call it viable: then it is only offered
        with pytest.raises(Overloaded) as caught:
            await collect_run(pipeline, planned(viable=False))
        assert caught.value.retry_after_s is not None and caught.value.offer is not None
        assert caught.value.offer.model == "other"
        # one that has no room either is no help
        with pytest.raises(Overloaded) as caught:
            await collect_run(pipeline, planned(viable=True, other="first"))
        assert caught.value.offer is None
        for item in crowd:
            queue.remove(item)
        assert len(tokens(await collect_run(pipeline, planned(viable=True)))) == 12

    on_pipeline(test)


def test_specialists_share_an_engine_and_answer_alike(on_pipeline: Callable[[Test], None]) -> None:
    async def test(pipeline: Pipeline) -> None:
        both = await asyncio.gather(
            *(collect(pipeline, request(model=name)) for name in ("first", "second", "other"))
        )
        assert tokens(both[0]) == tokens(both[1]) != tokens(both[2])
        assert [isinstance(e[0], Started) and e[0].replica for e in both] == [
            "e0r0",
            "e0r0",
            "e1r0",
        ]
        cards = {card.name: card for card in pipeline.models()}
        assert list(cards) == ["first", "second", "other", "auto"]
        assert cards["second"].max_model_len == 64 and cards["first"].max_model_len > 64

    on_pipeline(test)


def test_refusals_come_before_the_first_event(on_pipeline: Callable[[Test], None]) -> None:
    wrong: list[tuple[InferenceRequest, type[CoterieError]]] = [
        (request(model="nobody"), NotFound),
        (request(Tokens(())), InvalidRequest),
        (request(Tokens((5, 99_999))), InvalidRequest),
        (request("word " * 2000), ContextLengthExceeded),
        (request("word " * 20_000), ContextLengthExceeded),
        (request(limits={"max_tokens": 5000}), ContextLengthExceeded),
        (request(model="second", limits={"max_tokens": 64}), ContextLengthExceeded),
        (request(limits={"max_tokens": -1}), InvalidRequest),
        (request(limits={"min_tokens": 99}), InvalidRequest),
        (request(sampling={"temperature": float("nan")}), InvalidRequest),
        (request(sampling={"n": 100}), InvalidRequest),
        (request(sampling={"num_beams": 64, "n": 1, "logprobs": 1}), CoterieError),
    ]

    async def test(pipeline: Pipeline) -> None:
        for asked, error in wrong:
            seen: list[Event] = []
            with pytest.raises(error):
                async for event in pipeline.handle(asked):
                    seen.append(event)
            assert seen == []
        assert len(tokens(await collect(pipeline, request()))) == 12

    on_pipeline(test)


def test_defaults_fill_the_context(on_pipeline: Callable[[Test], None]) -> None:
    async def test(pipeline: Pipeline) -> None:
        asked = request(model="second", limits={"max_tokens": None})
        events = await collect(pipeline, asked)
        end = events[-1]
        assert isinstance(end, Finished) and end.choices == ("length",)
        assert end.usage.prompt_tokens + end.usage.completion_tokens == 64

    on_pipeline(test)


def test_closing_the_iterator_frees_at_once(on_pipeline: Callable[[Test], None]) -> None:
    async def test(pipeline: Pipeline) -> None:
        def usage() -> float:
            families = text_string_to_metric_families(pipeline.metrics_text())
            (family,) = [f for f in families if f.name == "vllm:num_requests_running"]
            return sum(sample.value for sample in family.samples)

        tasks = running_tasks()
        async with aclosing(pipeline.handle(request(limits={"max_tokens": 900}))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        # cancelled while it waits for an event
        task = asyncio.ensure_future(collect(pipeline, request(limits={"max_tokens": 900})))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await collect(pipeline, request())
        assert usage() == 0
        assert pipeline._open == 0 and running_tasks() == tasks

    on_pipeline(test)


def test_a_reused_id_is_refused_while_it_runs(on_pipeline: Callable[[Test], None]) -> None:
    async def test(pipeline: Pipeline) -> None:
        asked = request(limits={"max_tokens": 200})
        running = asyncio.ensure_future(collect(pipeline, asked))
        await asyncio.sleep(0.02)
        with pytest.raises(InvalidRequest, match="id"):
            await collect(pipeline, asked)
        assert len(tokens(await running)) == 200

    on_pipeline(test)


def test_metrics_tell_what_happened(on_pipeline: Callable[[Test], None]) -> None:
    async def test(pipeline: Pipeline) -> None:
        def read() -> dict[tuple[str, str], float]:
            return {
                (sample.name, sample.labels.get("model_name", "")): sample.value
                for family in text_string_to_metric_families(pipeline.metrics_text())
                for sample in family.samples
            }

        before = read()
        await collect(pipeline, request(model="other", limits={"max_tokens": 9}))
        with pytest.raises(ContextLengthExceeded):
            await collect(pipeline, request("word " * 2000, model="other"))
        after = read()

        def grown(name: str) -> float:
            return after[name, "other"] - before.get((name, "other"), 0.0)

        assert grown("vllm:generation_tokens_total") == 9
        assert grown("vllm:time_to_first_token_seconds_count") == 1
        assert grown("vllm:inter_token_latency_seconds_count") == 8
        # from the hand-over to the worker: computing the prompt is part of it
        admitted_s = grown("coterie_admission_to_first_token_seconds_sum")
        prefill_s = grown("vllm:request_prefill_time_seconds_sum")
        assert 0 < prefill_s <= admitted_s <= grown("vllm:time_to_first_token_seconds_sum")
        assert grown("vllm:request_success_total") == 1
        assert grown("coterie_rejections_total") == 1
        assert grown("vllm:prompt_tokens_total") > 3
        assert after["coterie_gateway_cpu_seconds_total", ""] > 0

    on_pipeline(test)


def test_time_since_admission_begins_before_the_worker_replies(
    on_pipeline: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker replies after its step, often with the first token."""

    async def test(pipeline: Pipeline) -> None:
        served = pipeline.fleet.served["other"]
        [replica] = served.replicas.members
        submit = replica.submit

        async def late(*arguments: Any) -> Any:
            verdict = await submit(*arguments)
            await asyncio.sleep(0.2)
            return verdict

        monkeypatch.setattr(replica, "submit", late)
        series = served.series.admitted_time
        before = series.total
        await collect(pipeline, request(model="other", limits={"max_tokens": 2}))
        assert series.total - before >= 0.2

    on_pipeline(test)


def test_health_and_drain() -> None:
    async def test() -> None:
        async with serving({}) as pipeline:
            assert pipeline.health().ready
            running = asyncio.ensure_future(collect(pipeline, request(limits={"max_tokens": 200})))
            await asyncio.sleep(0.02)
            draining = asyncio.ensure_future(pipeline.drain())
            await asyncio.sleep(0)
            assert pipeline.health().live and not pipeline.health().ready
            with pytest.raises(Unavailable):
                await collect(pipeline, request())
            await draining
            assert len(tokens(await running)) == 200

    asyncio.run(test())


def test_a_full_queue_is_overloaded_with_a_retry_hint() -> None:
    async def test() -> None:
        limits = {"engine.max_queue": 2, "engine.max_sequences": 1}
        async with serving(limits) as pipeline:
            asked = [request(limits={"max_tokens": 100}) for _ in range(16)]
            done = await asyncio.gather(
                *(collect(pipeline, item) for item in asked), return_exceptions=True
            )
            refused = [item for item in done if isinstance(item, BaseException)]
            assert refused and all(isinstance(item, Overloaded) for item in refused)
            hints = [item.retry_after_s for item in refused if isinstance(item, Overloaded)]
            assert all(hint is not None and 1 <= hint <= 120 for hint in hints)
            answered = [item for item in done if isinstance(item, list)]
            assert len(answered) >= 2 and all(len(tokens(item)) == 100 for item in answered)

    asyncio.run(test())


def test_one_full_and_one_dead_replica_are_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(assignment: Assignment, sink: Sink, on_outage: OnOutage) -> Rejected:
        return Rejected("overloaded", "full", 3.0)

    async def test() -> None:
        async with serving({"specialists.0.replicas": 2}) as pipeline:
            first, second = pipeline._fleet._groups[0].replicas
            monkeypatch.setattr(first, "submit", refuse)
            monkeypatch.setattr(second, "healthy", lambda: False)
            with pytest.raises(Overloaded) as caught:
                await collect(pipeline, request())
            assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 3
            monkeypatch.setattr(first, "healthy", lambda: False)
            with pytest.raises(Unavailable):
                await collect(pipeline, request())

    asyncio.run(test())


def test_readers_that_lag_hold_no_place_in_the_queue() -> None:
    async def test() -> None:
        async with serving({"engine.max_queue": 2, "engine.max_sequences": 2}) as pipeline:
            slow = [pipeline.handle(request()) for _ in range(2)]
            for stream in slow:
                await anext(stream)
            replica = pipeline._fleet._groups[0].replicas[0]
            while replica.in_flight():
                await asyncio.sleep(0.005)
            assert len(tokens(await collect(pipeline, request()))) == 12
            await asyncio.sleep(0.3)
            for stream in slow:
                events = [event async for event in stream]
                assert len(tokens(events)) == 12
                end = events[-1]
                # what took the time is told
                assert isinstance(end, Finished) and end.receipt is not None
                assert end.receipt.timings.deliver_ms >= 300
                assert end.receipt.slowest.startswith("delivering the answer")
            replicas = pipeline._fleet.find(None).replicas
            assert (replicas.queued(), replicas.running()) == (0, 0)

    asyncio.run(test())


@pytest.mark.full
def test_a_crash_is_a_pause_and_the_other_replica_serves_meanwhile() -> None:
    async def test() -> None:
        two = {"specialists.0.replicas": 2, "engine.restart_backoff_s": 0.5}
        async with serving(two, inproc=False) as pipeline:
            asked = [
                request(sampling={"temperature": 1.0, "seed": i}, limits={"max_tokens": 150})
                for i in range(8)
            ]
            again = [replace(item, id="u" + item.id) for item in asked]
            alone = await asyncio.gather(*(collect(pipeline, item) for item in again))
            streams: list[list[Event]] = [[] for _ in asked]

            async def read(item: InferenceRequest, into: list[Event]) -> list[Event]:
                async for event in pipeline.handle(item):
                    into.append(event)
                return into

            pairs = zip(asked, streams, strict=True)
            running = [asyncio.ensure_future(read(item, into)) for item, into in pairs]
            while any(len(events) < 10 for events in streams):
                await asyncio.sleep(0.001)
            victim = pipeline._fleet._groups[0].replicas[0]
            os.kill(victim.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            while victim.healthy():
                await asyncio.sleep(0.005)
            # truth per replica; the specialist itself can still answer
            health = pipeline.health()
            assert health.ready
            assert health.specialists["tiny"]["replicas"] == {"e0r0": False, "e0r1": True}
            started = (await collect(pipeline, request()))[0]
            assert isinstance(started, Started) and started.replica == "e0r1"
            done = await asyncio.gather(*running)
            assert [tokens(events) for events in done] == [tokens(events) for events in alone]

    asyncio.run(test())


def test_when_one_model_cannot_load_none_is_left_running(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    file = tmp_path / "coterie.toml"
    models = (tiny_checkpoint("llama"), tmp_path / "broken")
    file.write_text("".join(f'[[specialists]]\nmodel = "{model}"\n' for model in models))

    async def test() -> None:
        pipeline = build(load(file, {"engine.kv_bytes": "8MB"}))
        with pytest.raises(CoterieError):
            await pipeline.start()
        assert not own_workers()
        with pytest.raises(Unavailable):
            await collect(pipeline, request())
        assert not pipeline.health().ready

    asyncio.run(test())


def test_long_prompts_do_not_stop_the_loop(on_pipeline: Callable[[Test], None]) -> None:
    async def test(pipeline: Pipeline) -> None:
        worst = 0.0
        # as where no context bounds it
        text = Text("lorem ipsum " * 100_000)
        with MachineLag() as lag:
            task = asyncio.ensure_future(tokenise(pipeline.tokenizer("first"), text))
            while not task.done():
                begun = time.perf_counter()
                await asyncio.sleep(0.001)
                worst = max(worst, time.perf_counter() - begun)
        assert len(task.result()) > 100_000
        assert worst < lag.allowed_s(0.25)

    on_pipeline(test)
