"""The whole road over real engines and experts: true figures, outcomes, limits, the log."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coterie.adapters.files import AdapterLibrary
from coterie.core.errors import InvalidRequest, Unavailable
from coterie.core.events import Delta, Finished, InferenceMetrics, ValidationResult
from coterie.core.request import AdapterHint, ResponseFormat
from coterie.service.pipeline import Pipeline
from coterie.service.records.store import RecordQuery, RecordStore
from tests.helpers.serving.routed_pipeline import PROMPTS, UNRELATED, answer, ask, install, serving
from tests.helpers.serving.server_process import own_home

Test = Callable[[Pipeline], Awaitable[None]]
Road = Callable[[Test], None]
DIGITS = {"type": "regex", "text": "[0-9]{6}"}
BLOCK = 16


@pytest.fixture(scope="module")
def on_road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    folder = tmp_path_factory.mktemp("road")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("COTERIE_HOME", str(own_home(folder / "home")))
        running = serving()
        pipeline = runner.run(running.__aenter__())

        async def prepare() -> None:
            for seed, name in enumerate(PROMPTS):
                await install(pipeline, folder, name, seed=seed)
            await install(pipeline, folder, "digits", seed=8, response_format=DIGITS)
            bad = {"type": "regex", "text": "(unclosed"}
            await install(pipeline, folder, "misled", seed=9, response_format=bad)
            await pipeline._fleet.catalog.settled()

        runner.run(prepare())
        try:
            yield lambda test: runner.run(test(pipeline))  # type: ignore[arg-type]
        finally:
            runner.run(running.__aexit__(None, None, None))


def named(*names: str) -> dict[str, object]:
    return {"adapters": tuple(AdapterHint(name) for name in names)}


def digest_of(pipeline: Pipeline, name: str) -> str:
    return pipeline.adapters.current()[name].digest


async def logged(pipeline: Pipeline, job_id: str, tenant: str = "t") -> InferenceMetrics:
    page = await pipeline.records.query(RecordQuery(tenant, 1000))
    (row,) = [row for row in page.rows if row.job_id == job_id]
    return row


def test_every_figure_is_true(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        served = pipeline._fleet.find("tiny")
        card = pipeline.adapters.current()["haiku"]
        request = ask(PROMPTS["haiku"], limits={"max_tokens": 40})
        began = time.time()
        done = await answer(pipeline, request)
        ended = time.time()
        found = done.end.metrics
        assert found is not None and done.experts == ["haiku"]
        prompt_ids = await pipeline.tokenise("tiny", request.prompt)
        assert found.input_tokens == len(prompt_ids) and found.output_tokens == 40
        blocks = math.ceil((found.input_tokens + found.output_tokens - 1) / BLOCK)
        kv_bytes = blocks * served.info.block_bytes["tiny"]
        assert found.vram_peak_mb == round((kv_bytes + done.end.adapter_bytes) / 1e6, 3)
        # fp32 in its file and on the device, here with padding, there with a header
        assert abs(done.end.adapter_bytes - card.nbytes) < 0.1 * card.nbytes
        assert (found.job_id, found.num_experts) == (request.id, 1)
        assert found.experts_used == ("haiku@1.0.0",)
        assert found.task_type == "creative_writing" and found.specialist == "tiny"
        assert found.success and found.error is None and found.finish_reason == "length"
        assert found.validation_passed is True
        # stages lie in each other as they happened, by the clock on the wall
        assert began - 0.05 <= found.submitted_at <= found.routed_at <= found.first_token_at
        assert found.first_token_at <= found.finished_at <= ended + 0.05
        assert 0 < found.router_latency_ms <= (found.routed_at - found.submitted_at) * 1e3 + 0.01
        assert found.queue_ms >= found.expert_load_latency_ms
        assert found.queue_ms <= found.first_token_ms <= found.total_latency_ms
        assert found.queue_ms + found.inference_latency_ms <= found.total_latency_ms + 0.01
        rate = found.output_tokens / found.inference_latency_ms * 1e3
        assert found.tokens_per_second == pytest.approx(rate, rel=0.01)
        assert await logged(pipeline, request.id) == found
        alone = (await answer(pipeline, ask())).end.metrics
        assert alone is not None and alone.num_experts == 0 and alone.expert_load_latency_ms == 0

    on_road(test)


def test_the_figures_of_an_abandoned_request_are_true(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        request = ask("word " * 150, limits={"max_tokens": 300})
        events = pipeline.handle(request)
        tokens = 0
        async for event in events:
            tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            if tokens >= 20:
                break
        await events.aclose()
        found = await logged(pipeline, request.id)
        assert (found.finish_reason, found.error, found.success) == ("abort", "abort", False)
        prompt_ids = await pipeline.tokenise("tiny", request.prompt)
        assert found.input_tokens == len(prompt_ids) and found.output_tokens >= tokens
        # it waited, then its prompt was computed, then tokens came
        assert 0 < found.queue_ms < found.first_token_ms < found.total_latency_ms
        rate = found.output_tokens / found.inference_latency_ms * 1e3
        assert found.tokens_per_second == pytest.approx(rate, rel=0.01)
        timings = json.loads(await pipeline.records.receipt(request.id, "t"))["timings"]
        prefill_ms, decode_ms = timings["prefill_ms"], timings["decode_ms"]
        assert prefill_ms == pytest.approx(found.first_token_ms - found.queue_ms, abs=0.01)
        assert prefill_ms > 0 and decode_ms > 0
        parts = timings["queue_ms"] + prefill_ms + decode_ms
        assert parts == pytest.approx(timings["total_ms"], abs=1)

    on_road(test)


def test_choices_share_the_blocks_of_their_prompt(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        request = ask("word " * 40, limits={"max_tokens": 20})
        three = replace(request, id="three", sampling=replace(request.sampling, n=3))
        one, many = await answer(pipeline, request), await answer(pipeline, three)
        tokens = one.end.usage.prompt_tokens
        alone = math.ceil((tokens + 19) / BLOCK)
        assert one.end.kv_blocks == alone
        assert many.end.kv_blocks == tokens // BLOCK + 3 * (alone - tokens // BLOCK)

    on_road(test)


def test_waiting_for_an_adapter_is_told(on_road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    load = AdapterLibrary.load

    def slowly(self: AdapterLibrary, *args: object) -> object:
        time.sleep(0.15)
        return load(self, *args)  # type: ignore[arg-type]

    async def test(pipeline: Pipeline) -> None:
        monkeypatch.setattr(AdapterLibrary, "load", slowly)
        hints = named("dates")
        cold, warm = [(await answer(pipeline, ask(hints=hints))).end.metrics for _ in range(2)]
        assert cold is not None and warm is not None
        assert 100 < cold.expert_load_latency_ms <= cold.queue_ms
        assert warm.expert_load_latency_ms < 100

    on_road(test)


def test_the_next_is_routed_while_the_last_one_generates(on_road: Road) -> None:
    """By the log's own timestamps."""

    async def test(pipeline: Pipeline) -> None:
        last = ask(PROMPTS["haiku"], limits={"max_tokens": 400})
        generates = asyncio.Event()

        async def read() -> None:
            async for event in pipeline.handle(last):
                if isinstance(event, Delta):
                    generates.set()

        running = asyncio.ensure_future(read())
        await generates.wait()
        following = [ask(PROMPTS[name]) for name in ("sql", "dates", "haiku")]
        await asyncio.gather(*(answer(pipeline, request) for request in following))
        await running
        first = await logged(pipeline, last.id)
        for request in following:
            found = await logged(pipeline, request.id)
            assert first.first_token_at < found.submitted_at < found.routed_at < first.finished_at
            # and it began to answer before the last one had ended
            assert found.first_token_at < first.finished_at

    on_road(test)


def test_an_adapter_is_judged_by_what_it_answered(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        def rate(name: str) -> tuple[int, int]:
            return pipeline.records.rate(digest_of(pipeline, name))

        async def asked(name: str, **limits: object) -> None:
            request = ask(PROMPTS[name], limits=limits)
            done = await answer(pipeline, request)
            assert done.experts == [name]
            await logged(pipeline, request.id)
            await asyncio.sleep(0)

        before = {name: rate(name) for name in PROMPTS}
        whole = {"max_tokens": None, "context_size": 96}
        await asked("sql", **whole)
        await asked("haiku", **whole)
        # the caller's own limit cut it short: that says nothing about the adapter
        await asked("sql", max_tokens=4)
        grown = {
            name: (rate(name)[0] - before[name][0], rate(name)[1] - before[name][1])
            for name in PROMPTS
        }
        # random weights write no SQL; that there is a haiku says nothing about it
        assert grown == {"sql": (0, 1), "haiku": (0, 0), "dates": (0, 0)}

    on_road(test)


def test_verdicts_reach_the_score(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        async def asked() -> tuple[str, float]:
            request = ask(PROMPTS["dates"], limits={"max_tokens": 2})
            done = await answer(pipeline, request)
            assert done.plan.trace is not None
            (seen,) = [c for c in done.plan.trace.candidates if c.name == "dates@1.0.0"]
            return request.id, seen.success

        ids, rates = zip(*[await asked() for _ in range(5)], strict=True)
        assert len(set(rates)) == 1
        for job_id in ids:
            await pipeline.records.feedback(job_id, "t", False)
        _, after = await asked()
        assert 0 < after < rates[0]

    on_road(test)


def test_a_tuned_length_is_cut_to_the_room(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        request = ask(PROMPTS["sql"], limits={"max_tokens": None, "context_size": 80})
        done = await answer(pipeline, request)
        assert done.plan.tuned.max_tokens is not None and done.plan.tuned.max_tokens > 80
        assert done.end.usage.prompt_tokens + done.end.usage.completion_tokens == 80

    on_road(test)


def test_a_timeout_leaves_what_there_is(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        limits = {"max_tokens": 900, "timeout_s": 0.25}
        done = await answer(pipeline, ask(PROMPTS["sql"], limits=limits))
        found = done.end.metrics
        assert done.end.choices == ("timeout",) and done.text and found is not None
        assert 0 < found.output_tokens < 900 and found.total_latency_ms >= 250
        assert not found.success and found.error == found.finish_reason == "timeout"
        # nothing but the clock is to blame
        assert done.end.validation is None and found.validation_passed is None

    on_road(test)


def test_a_timeout_holds_when_the_worker_is_silent(
    on_road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(pipeline: Pipeline) -> None:
        replica = pipeline._fleet._groups[0].replicas[0]
        request = ask(PROMPTS["haiku"], limits={"max_tokens": 900, "timeout_s": 1.0})
        with monkeypatch.context() as patch:
            events = pipeline.handle(request)
            seen = [await anext(events) for _ in range(10)]
            # nothing that it says arrives any more
            patch.setattr(replica, "_take", lambda report: None)
            seen += [event async for event in events]
        end = seen[-1]
        assert isinstance(end, Finished) and end.choices == ("timeout",)
        row = await logged(pipeline, request.id)
        assert row == end.metrics and row.error == "timeout"
        # those that came while the last one was read were paid for too
        read = sum(len(e.token_ids) for e in seen if isinstance(e, Delta))
        assert 0 < read <= row.output_tokens < read + 100
        assert 1000 <= row.total_latency_ms < 20_000

    on_road(test)


def test_an_expert_brings_its_format(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        done = await answer(pipeline, ask(hints=named("digits"), limits={"max_tokens": 20}))
        assert done.text.isdigit() and len(done.text) == 6, done.text
        assert done.end.validation is not None and done.end.validation.valid
        # in a stack nobody's format rules
        pair = await answer(pipeline, ask(hints=named("digits", "sql")))
        assert not pair.text.isdigit()
        # the caller's own goes before it
        wanted = ResponseFormat("regex", "[x-z]{3}")
        own = await answer(pipeline, ask(hints=named("digits"), response_format=wanted))
        assert len(own.text) == 3 and set(own.text) <= set("xyz")
        # one that a package got wrong is nobody's fault but the package's
        assert (await answer(pipeline, ask(hints=named("misled")))).text
        with pytest.raises(InvalidRequest) as caught:
            await answer(pipeline, ask(response_format=ResponseFormat("regex", "(unclosed")))
        assert caught.value.param == "response_format"

    on_road(test)


def test_what_failed_is_in_the_log(on_road: Road, tmp_path: Path) -> None:
    async def test(pipeline: Pipeline) -> None:
        await install(pipeline, tmp_path, "doomed", seed=20)
        digest = digest_of(pipeline, "doomed")
        folder = Path(os.environ["COTERIE_HOME"]) / "state" / "experts" / "library" / digest
        (weights,) = folder.glob("*.safetensors")
        data = bytearray(weights.read_bytes())
        data[-8] ^= 1
        weights.write_bytes(data)
        request = ask(hints=named("doomed"))
        with pytest.raises(Unavailable, match="its files are damaged"):
            await answer(pipeline, request)
        row = await logged(pipeline, request.id)
        assert (row.success, row.error) == (False, "weights_error")
        assert row.experts_used == ("doomed@1.0.0",) and row.finished_at > row.submitted_at

    on_road(test)


def test_what_was_left_is_in_the_log(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        request = ask(PROMPTS["haiku"], limits={"max_tokens": 900})
        before = pipeline.records.rate(digest_of(pipeline, "haiku"))
        events = pipeline.handle(request)
        seen = [await anext(events) for _ in range(10)]
        await events.aclose()
        row = await logged(pipeline, request.id)
        # those that came while the last one was read were paid for too
        read = sum(len(e.token_ids) for e in seen if isinstance(e, Delta))
        assert 0 < read <= row.output_tokens < read + 100
        assert row.input_tokens == len(await pipeline.tokenise("tiny", request.prompt))
        assert row.experts_used == ("haiku@1.0.0",)
        assert not row.success and row.error == row.finish_reason == "abort"
        assert row.queue_ms <= row.first_token_ms <= row.total_latency_ms
        assert row.submitted_at < row.first_token_at <= row.finished_at
        # what was not answered says nothing about its adapter, and nobody can make it
        await pipeline.records.feedback(request.id, "t", False)
        assert row.validation_passed is None
        assert pipeline.records.rate(digest_of(pipeline, "haiku")) == before

    on_road(test)


def test_an_answer_that_is_left_while_it_is_judged_is_in_the_log(
    on_road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(pipeline: Pipeline) -> None:
        judged = asyncio.Event()

        async def never(*_: object) -> None:
            judged.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(pipeline._validators, "validate", never)
        request = ask(PROMPTS["haiku"], limits={"max_tokens": 12})
        reading = asyncio.ensure_future(answer(pipeline, request))
        await judged.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        row = await logged(pipeline, request.id)
        assert (row.finish_reason, row.output_tokens) == ("abort", 12)

    on_road(test)


def test_a_server_that_ends_writes_down_whom_it_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(own_home(tmp_path / "home")))

    async def test() -> InferenceMetrics | None:
        async with serving() as pipeline:
            judged = asyncio.Event()

            async def slowly(*_: object) -> ValidationResult:
                judged.set()
                await asyncio.sleep(0.5)
                return ValidationResult(False, "slow")

            monkeypatch.setattr(pipeline._validators, "validate", slowly)
            reading = asyncio.ensure_future(answer(pipeline, ask()))
            await judged.wait()
            await pipeline.drain()
        return (await reading).end.metrics

    found = asyncio.run(test())
    assert found is not None and found.validation_passed is False
    store = RecordStore(tmp_path / "home" / "state" / "records.db", 10)
    assert store.query(RecordQuery("t")).rows == (found,)
    store.close()


def test_what_was_refused_is_not_in_the_log(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        request = ask(limits={"max_tokens": 10**6})
        with pytest.raises(InvalidRequest):
            await answer(pipeline, request)
        page = await pipeline.records.query(RecordQuery("t", 1000))
        assert page.rows and request.id not in {row.job_id for row in page.rows}

    on_road(test)


def test_a_salt_is_not_another_tenant(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        request = ask(UNRELATED, tenant="own+0123456789abcdef")
        await answer(pipeline, request)
        assert (await logged(pipeline, request.id, "own")).job_id == request.id
        await pipeline.records.feedback(request.id, "own", True)

    on_road(test)


def test_metrics_tell_who_was_chosen_and_what_was_judged(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        def read() -> dict[tuple[str, str], float]:
            return {
                (sample.name, "".join(sample.labels.values())): sample.value
                for family in text_string_to_metric_families(pipeline.metrics_text())
                for sample in family.samples
                if "le" not in sample.labels
            }

        before = read()
        await answer(pipeline, ask(PROMPTS["haiku"]))
        await answer(pipeline, ask())
        after = read()

        def grown(name: str, labels: str = "") -> float:
            return after[name, labels] - before.get((name, labels), 0.0)

        assert grown("coterie_route_decisions_total", "haiku") == 1
        assert grown("coterie_route_decisions_total", "none") == 1
        assert grown("coterie_router_seconds_count") == 2
        assert grown("coterie_validations_total", "genericvalid") == 2
        assert grown("coterie_expert_wait_seconds_count", "tiny") == 1

    on_road(test)


def test_the_wait_is_estimated(on_road: Road) -> None:
    async def test(pipeline: Pipeline) -> None:
        await answer(pipeline, ask())
        assert 0 <= pipeline.expected_wait_s() < 10

    on_road(test)
