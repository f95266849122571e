"""service/jobs over real engines: order, overload, cancelling, taking over, giving up."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie.core.config import load
from coterie.core.errors import NotFound, Overloaded, Unavailable
from coterie.core.events import Event
from coterie.core.job import Job, JobQuery, JobSpec
from coterie.core.request import InferenceRequest, Limits, RouteHints, Sampling, Text
from coterie.core.settings import JobSettings
from coterie.service.breaker import steering
from coterie.service.build import build
from coterie.service.jobs import dispatch, store
from coterie.service.jobs import service as module
from coterie.service.jobs.dispatch import JobPipeline
from coterie.service.jobs.service import JobService
from coterie.service.jobs.store import JobStore
from coterie.service.pipeline import Pipeline
from tests.helpers.models.tiny import tiny_checkpoint

Test = Callable[[Pipeline], Awaitable[None]]
TENANT = "t"
END_S = 60.0


def spec(
    prompt: str = "The quick brown fox", *, model: str | None = None, **options: Any
) -> JobSpec:
    limits = {"max_tokens": 12, "ignore_eos": True, **options.pop("limits", {})}
    request = InferenceRequest(
        id=str(uuid.uuid4()),
        prompt=Text(prompt),
        sampling=Sampling(**{"temperature": 0.0, **options.pop("sampling", {})}),
        limits=Limits(**limits),
        hints=RouteHints(model),
        response_format=None,
        session=None,
        tenant=TENANT,
        arrived_at=time.monotonic(),
    )
    return JobSpec(request, **options)


SAMPLED = {"temperature": 1.0}


def long_checkpoint(kind: str) -> Path:
    """Room for jobs that last long enough to be disturbed."""
    return tiny_checkpoint(kind, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def on_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Test], None]]:
    """One pipeline for the module, whose queue of two is soon full."""
    path = tmp_path_factory.mktemp("config") / "coterie.toml"
    path.write_text(f"""
        [engine]
        kv_bytes = "8MB"
        threads = 1
        max_queue = 2
        max_sequences = 2
        [[specialists]]
        name = "tiny"
        model = "{long_checkpoint("llama")}"
        [[specialists]]
        name = "other"
        model = "{long_checkpoint("qwen3")}"
    """)
    with asyncio.Runner() as runner:
        pipeline = build(load(path), inproc=True)
        runner.run(pipeline.start())
        try:
            yield lambda test: runner.run(test(pipeline))  # type: ignore[arg-type]
        finally:
            runner.run(pipeline.close())


@asynccontextmanager
async def service(answers: JobPipeline, folder: Path, **settings: Any) -> AsyncIterator[JobService]:
    jobs = JobService(answers, JobStore(folder / "jobs.db"), JobSettings(**settings))
    await jobs.start()
    try:
        yield jobs
    finally:
        await jobs.close()


async def ended(jobs: JobService, *ids: str) -> list[Job]:
    deadline = time.monotonic() + END_S
    while True:
        found = [await jobs.get(job_id, TENANT) for job_id in ids]
        if not any(job.active for job in found):
            return found
        assert time.monotonic() < deadline, f"not ended: {[job.status for job in found]}"
        await asyncio.sleep(0.01)


async def running(jobs: JobService, job_id: str) -> Job:
    while not (job := await jobs.get(job_id, TENANT)).text:
        assert job.active
        await asyncio.sleep(0.005)
    return job


async def text_of(pipeline: JobPipeline, asked: JobSpec, folder: Path) -> str:
    """What a job gives when nothing happens to it."""
    async with service(pipeline, folder / uuid.uuid4().hex) as jobs:
        fresh = replace(asked, request=replace(asked.request, id=str(uuid.uuid4())))
        job = await jobs.submit(fresh)
        (done,) = await ended(jobs, job.id)
        assert done.status == "succeeded", done.error
        return done.text


class Counted:
    """A pipeline that notes how often it was asked for each request."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.asked = pipeline, Counter[str]()
        self.resolve, self.expected_wait_s = pipeline.resolve, pipeline.expected_wait_s
        self.within_rights, self.check_format = pipeline.within_rights, pipeline.check_format
        self.count_request = pipeline.count_request

    def handle(
        self, request: InferenceRequest, *rest: Any, **more: Any
    ) -> AsyncGenerator[Event, None]:
        self.asked[request.id] += 1
        return self.pipeline.handle(request, *rest, **more)


class Changed(Counted):
    """The same server after a change of its settings: another specialist is the default."""

    def handle(
        self, request: InferenceRequest, *rest: Any, **more: Any
    ) -> AsyncGenerator[Event, None]:
        hints = replace(request.hints, model=request.hints.model or "other")
        return super().handle(replace(request, hints=hints), *rest, **more)


def hold(jobs: JobService) -> None:
    """No job begins, as when the engine is full."""
    jobs._dispatcher.not_before = time.monotonic() + 99


def let_go(jobs: JobService) -> None:
    jobs._dispatcher.not_before = 0.0
    jobs._dispatcher._wake.set()


async def die(jobs: JobService) -> None:
    """What SIGKILL leaves of a service: its files, and a lock that nobody holds."""
    for task in [*jobs._tasks, *jobs._dispatcher.running.values()]:
        task.cancel()
    await asyncio.gather(*jobs._tasks, *jobs._dispatcher.running.values(), return_exceptions=True)
    store = jobs._store
    store._thread.submit(store._sql.close).result()  # type: ignore[union-attr]
    os.close(store._owner._handle)  # type: ignore[union-attr]
    store._thread.shutdown()


@pytest.mark.full
def test_an_engine_that_is_full_makes_jobs_wait_and_never_fail(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        counted = Counted(pipeline)
        # more places than the engine has: two that run and two that wait
        async with service(counted, tmp_path, concurrency=10) as jobs:
            hold(jobs)
            asked = [spec(f"fox {i}", limits={"max_tokens": 60}) for i in range(10)]
            ids = [(await jobs.submit(one)).id for one in asked]
            let_go(jobs)
            done = await ended(jobs, *ids)
            assert {job.status for job in done} == {"succeeded"}, [job.error for job in done]
            assert counted.asked.total() > len(ids), "the engine was never full"

    on_pipeline(test)


def test_a_job_of_a_drained_specialist_waits_and_no_other_does(
    on_pipeline: Callable[[Test], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steering, "RETRY_S", 0.1)

    async def test(pipeline: Pipeline) -> None:
        control = pipeline.ensemble.control
        control.drain("other", "ann")
        try:
            async with service(pipeline, tmp_path, concurrency=1) as jobs:
                first = await jobs.submit(spec(model="other"))
                for _ in range(3):
                    then = await jobs.submit(spec(model="tiny"))
                    [done] = await ended(jobs, then.id)
                    assert done.status == "succeeded", done.error
                assert (await jobs.get(first.id, TENANT)).status == "queued"
                control.undrain("other", "ann")
                [done] = await ended(jobs, first.id)
                assert done.status == "succeeded", done.error
                # one that waits so can be cancelled
                control.drain("other", "ann")
                again = await jobs.submit(spec(model="other"))
                await asyncio.sleep(0.2)
                await jobs.cancel(again.id, TENANT)
                [done] = await ended(jobs, again.id)
                assert done.status == "cancelled"
                assert len(jobs._dispatcher.queue) == 0
        finally:
            if control.watches["other"].is_draining:
                control.undrain("other", "ann")

    on_pipeline(test)


def test_a_jobs_figures_run_from_its_acceptance(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path) as jobs:
            hold(jobs)
            asked = spec()
            job = await jobs.submit(replace(asked, request=replace(asked.request, user_id="ada")))
            await asyncio.sleep(0.3)
            let_go(jobs)
            (done,) = await ended(jobs, job.id)
            assert done.result is not None and done.started_at is not None
            metrics = done.result.metrics
            assert metrics is not None and metrics.user_id == "ada"
            assert abs(metrics.submitted_at - job.submitted_at) < 0.01
            waited_ms = 1000 * (done.started_at - job.submitted_at)
            assert waited_ms > 299 and metrics.queue_ms > 290
            assert metrics.total_latency_ms >= metrics.queue_ms + metrics.inference_latency_ms - 1
            assert metrics.first_token_ms > metrics.queue_ms
            # it began when its prompt did, not with its first token
            assert done.started_at < metrics.first_token_at
            begun_ms = 1000 * (metrics.first_token_at - done.started_at)
            assert begun_ms == pytest.approx(metrics.first_token_ms - metrics.queue_ms, abs=20)

    on_pipeline(test)


def test_jobs_begin_by_priority_then_by_acceptance(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path, concurrency=1) as jobs:
            first = await jobs.submit(spec(limits={"max_tokens": 3000}))
            await running(jobs, first.id)
            levels = (2, 9, 5, 9, 0)
            ids = [(await jobs.submit(spec(limits={"priority": p}))).id for p in levels]
            assert jobs.counts() == {"queued": 5, "processing": 1}
            await jobs.delete(first.id, TENANT)
            done = dict(zip(ids, await ended(jobs, *ids), strict=True))
            order = sorted(ids, key=lambda job_id: done[job_id].started_at or 0)
            assert order == [ids[i] for i in (1, 3, 2, 0, 4)]

    on_pipeline(test)


def test_a_full_queue_refuses_and_keeps_nothing(
    on_pipeline: Callable[[Test], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path, concurrency=1, max_queued=2) as jobs:
            running_one = await jobs.submit(spec(limits={"max_tokens": 3000}))
            await running(jobs, running_one.id)
            waiting = [await jobs.submit(spec()) for _ in range(2)]
            assert waiting[1].estimated_wait_ms is not None
            with pytest.raises(Overloaded, match="2 jobs wait, and 2 may") as caught:
                await jobs.submit(spec())
            assert (caught.value.retry_after_s or 0) >= 1
            assert len((await jobs.page(JobQuery(TENANT))).jobs) == 3
            await jobs.delete(waiting[0].id, TENANT)
            monkeypatch.setattr(dispatch, "MAX_QUEUED_BYTES", 2000)
            with pytest.raises(Overloaded, match="bytes"):
                await jobs.submit(spec("x" * 3000))
            await jobs.delete(running_one.id, TENANT)

    on_pipeline(test)


def test_a_cancelled_job_stays_cancelled_and_frees_the_engine(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path, concurrency=1) as jobs:
            job = await jobs.submit(spec(limits={"max_tokens": 3000}))
            behind = await jobs.submit(spec())
            seen = await running(jobs, job.id)
            gone, removed = await jobs.delete(job.id, TENANT)
            assert not removed
            assert gone.status == "cancelled" and gone.text.startswith(seen.text)
            (after,) = await ended(jobs, behind.id)
            assert after.status == "succeeded"
            assert (await jobs.get(job.id, TENANT)).status == "cancelled"
            queued = await jobs.submit(spec(limits={"max_tokens": 3000}))
            waiting = await jobs.submit(spec())
            await jobs.delete(waiting.id, TENANT)
            await jobs.delete(queued.id, TENANT)
            (never,) = await ended(jobs, waiting.id)
            assert never.status == "cancelled" and never.started_at is None

    on_pipeline(test)


def test_jobs_of_a_dead_server_are_run_again_with_the_same_words(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        counted = Counted(pipeline)
        asked = [
            spec(
                f"fox {i}",
                sampling=SAMPLED if i % 2 else {},
                limits={"max_tokens": 80 if i < 2 else 500},
            )
            for i in range(6)
        ]
        dead = JobService(counted, JobStore(tmp_path / "jobs.db"), JobSettings(concurrency=2))
        await dead.start()
        ids = [(await dead.submit(one)).id for one in asked]
        await ended(dead, ids[0])
        await running(dead, ids[2])
        before = {job.id: job for job in (await dead.page(JobQuery(TENANT))).jobs}
        drawn = seeds(tmp_path)
        await die(dead)
        over = {job_id for job_id, job in before.items() if not job.active}
        assert 0 < len(over) < len(ids)
        counted.asked.clear()
        async with service(counted, tmp_path) as jobs:
            done = {job.id: job for job in await ended(jobs, *ids)}
            for job_id in over:
                assert done[job_id] == before[job_id] and not counted.asked[job_id]
            for one in asked:
                job_id = one.request.id
                if job_id not in over:
                    sampling = replace(one.request.sampling, seed=drawn[job_id])
                    whole = replace(one, request=replace(one.request, sampling=sampling))
                    assert done[job_id].text == await text_of(pipeline, whole, tmp_path)

    on_pipeline(test)


def seeds(folder: Path) -> dict[str, int]:
    from coterie.service.jobs.codec import decode_spec

    with closing(sqlite3.connect(folder / "jobs.db")) as sql:
        found = sql.execute("SELECT id, request FROM jobs WHERE request IS NOT NULL").fetchall()
    return {job_id: decode_spec(raw, 0.0, 0.0).request.sampling.seed or 0 for job_id, raw in found}


def test_two_servers_never_run_one_job_twice(
    on_pipeline: Callable[[Test], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SWEEP_S", 0.02)

    async def test(pipeline: Pipeline) -> None:
        counted = Counted(pipeline)
        # one place each: the engine's queue is never full
        async with (
            service(counted, tmp_path, concurrency=1) as one,
            service(counted, tmp_path, concurrency=1) as two,
        ):
            ids = [(await (one, two)[i % 2].submit(spec(f"fox {i}"))).id for i in range(12)]
            done = await ended(one, *ids)
            assert {job.status for job in done} == {"succeeded"}
            assert counted.asked == dict.fromkeys(ids, 1)
            # cancelled by the one that does not run it
            job = await one.submit(spec(limits={"max_tokens": 3000}))
            await running(one, job.id)
            assert (await two.delete(job.id, TENANT))[0].status == "cancelled"
            while one.counts()["processing"]:
                await asyncio.sleep(0.01)
            assert (await one.get(job.id, TENANT)).status == "cancelled"

    on_pipeline(test)


@pytest.mark.full
def test_a_server_that_stops_in_good_order_leaves_its_jobs(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path, concurrency=1) as jobs:
            hold(jobs)
            ids = [(await jobs.submit(spec(limits={"max_tokens": 1000}))).id for _ in range(3)]
            let_go(jobs)
            await running(jobs, ids[0])
            jobs.pause()
            with pytest.raises(Unavailable):
                await jobs.submit(spec())
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as sql:
            rows = sql.execute("SELECT status, owner, crashes, plan IS NULL FROM jobs").fetchall()
        assert rows == [("queued", "", 0, 0), ("queued", "", 0, 1), ("queued", "", 0, 1)]
        async with service(pipeline, tmp_path) as jobs:
            done = await ended(jobs, *ids)
            assert {job.status for job in done} == {"succeeded"}
            assert len({job.text for job in done}) == 1

    on_pipeline(test)


def test_a_job_goes_by_its_first_plan_when_the_server_comes_back_otherwise(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    asked = spec(sampling={"temperature": 1.0, "seed": 5}, limits={"max_tokens": 60})

    async def test(pipeline: Pipeline) -> None:
        told = await text_of(pipeline, asked, tmp_path)
        dead = JobService(pipeline, JobStore(tmp_path / "jobs.db"), JobSettings())
        await dead.start()
        await dead.submit(asked)
        await running(dead, asked.request.id)
        await die(dead)
        changed = Changed(pipeline)
        assert await text_of(changed, asked, tmp_path) != told
        async with service(changed, tmp_path) as jobs:
            (job,) = await ended(jobs, asked.request.id)
        assert job.text == told
        assert job.result is not None and job.result.model == "tiny"

    on_pipeline(test)


def test_a_job_for_a_model_that_is_not_here_waits_for_a_server_that_has_it(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path) as jobs:
            with pytest.raises(NotFound):
                await jobs.submit(spec(model="elsewhere"))
            job = await jobs.submit(spec(model="tiny", limits={"max_tokens": 300}))
            jobs.pause()
        edit(tmp_path, "UPDATE jobs SET model = 'elsewhere'")
        async with service(pipeline, tmp_path) as jobs:
            await asyncio.sleep(0.05)
            assert (await jobs.get(job.id, TENANT)).status == "queued"
        edit(tmp_path, "UPDATE jobs SET model = 'tiny'")
        async with service(pipeline, tmp_path) as jobs:
            (done,) = await ended(jobs, job.id)
            assert done.status == "succeeded"

    on_pipeline(test)


def edit(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "jobs.db")) as sql, sql:
        sql.execute(statement)


def test_suspects_of_crashes_run_alone_and_the_one_that_kills_is_given_up(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    async def test(pipeline: Pipeline) -> None:
        dead = JobService(pipeline, JobStore(tmp_path / "jobs.db"), JobSettings())
        hold(dead)
        await dead.start()
        ids = [(await dead.submit(spec(f"fox {i}"))).id for i in range(5)]
        await die(dead)
        edit(tmp_path, f"UPDATE jobs SET crashes = 3 WHERE id IN ('{ids[0]}', '{ids[1]}')")
        edit(tmp_path, f"UPDATE jobs SET crashes = 9, status = 'processing' WHERE id = '{ids[2]}'")
        async with service(pipeline, tmp_path) as jobs:
            done = await ended(jobs, *ids)
        assert [job.status for job in done] == ["succeeded"] * 2 + ["failed"] + ["succeeded"] * 2
        assert done[2].error is not None and done[2].error.code == "worker_crashed"
        spans = [(job.started_at or 0, job.finished_at or 0) for job in done]
        assert spans[0][0] >= max(spans[3][1], spans[4][1]), "a suspect ran beside another job"
        assert spans[1][0] >= spans[0][1], "two suspects ran together"

    on_pipeline(test)


def test_a_file_that_cannot_be_written_for_a_while_loses_no_answer(
    on_pipeline: Callable[[Test], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(store, "BUSY_S", 0.05)
    monkeypatch.setattr(store, "RETRY_S", 0.1)

    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path) as jobs:
            job = await jobs.submit(spec(limits={"max_tokens": 400}))
            await running(jobs, job.id)
            with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as sql:
                sql.execute("BEGIN IMMEDIATE")
                with pytest.raises(Unavailable, match="cannot be used"):
                    await jobs.submit(spec())
                while "job_not_written" not in caplog.messages:
                    await asyncio.sleep(0.02)
                assert (await jobs.get(job.id, TENANT)).active
                sql.execute("ROLLBACK")
            (done,) = await ended(jobs, job.id)
            assert done.status == "succeeded"
            assert len((await jobs.page(JobQuery(TENANT))).jobs) == 1

    on_pipeline(test)


def test_a_file_that_is_locked_at_the_start_is_opened_later(
    on_pipeline: Callable[[Test], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUSY_S", 0.05)
    monkeypatch.setattr(store, "RETRY_S", 0.1)

    async def test(pipeline: Pipeline) -> None:
        with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as sql:
            sql.execute("BEGIN EXCLUSIVE")
            jobs = JobService(pipeline, JobStore(tmp_path / "jobs.db"), JobSettings())
            await jobs.start()
            with pytest.raises(Unavailable, match="locked") as caught:
                await jobs.submit(spec())
            assert caught.value.retry_after_s is not None
            sql.execute("ROLLBACK")
        deadline = time.monotonic() + END_S
        while True:
            try:
                job = await jobs.submit(spec())
                break
            except Unavailable:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        (done,) = await ended(jobs, job.id)
        assert done.status == "succeeded"
        await jobs.close()

    on_pipeline(test)


def test_a_damaged_file_costs_jobs_and_nothing_else(
    on_pipeline: Callable[[Test], None], tmp_path: Path
) -> None:
    (tmp_path / "jobs.db").write_bytes(b"junk" * 1000)

    async def test(pipeline: Pipeline) -> None:
        async with service(pipeline, tmp_path) as jobs:
            with pytest.raises(Unavailable, match="not a database"):
                await jobs.submit(spec())
            request = spec().request
            assert [event async for event in pipeline.handle(request)]

    on_pipeline(test)
