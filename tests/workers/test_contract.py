"""The contract of workers/contract.py, kept by every transport: real engines and processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from coterie.core.errors import CoterieError, WeightsError
from coterie.core.events import Failed, Finished, Started
from coterie.core.plan import Admitted, Rejected
from coterie.workers.contract import Replica, WorkerSpec
from coterie.workers.inproc import InprocReplica
from coterie.workers.supervisor import ProcessReplica
from tests.helpers.serving.running_tasks import running_tasks
from tests.helpers.serving.worker_requests import (
    GREEDY,
    LANE,
    SAMPLED,
    Listener,
    assign,
    begin,
    run,
    tiny_spec,
)

TRANSPORTS: dict[str, Callable[[WorkerSpec], Replica]] = {
    "inproc": InprocReplica,
    "process": ProcessReplica,
}

# for what a test of the whole server tries over processes as well
IN_PROCESS_FIRST = ["inproc", pytest.param("process", marks=pytest.mark.full)]

Test = Callable[[Replica], Awaitable[None]]


@asynccontextmanager
async def running(transport: str, spec: WorkerSpec) -> AsyncIterator[Replica]:
    replica = TRANSPORTS[transport](spec)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close()


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def on_replica(request: pytest.FixtureRequest) -> Iterator[Callable[[Test], None]]:
    """Run a coroutine against one replica that the whole module shares."""
    with asyncio.Runner() as runner:
        replica = TRANSPORTS[request.param](tiny_spec())
        runner.run(replica.start())
        try:
            yield lambda test: runner.run(test(replica))  # type: ignore[arg-type]
        finally:
            runner.run(replica.close())


def test_events_come_in_order_and_add_up(on_replica: Callable[[Test], None]) -> None:
    async def test(replica: Replica) -> None:
        listener = await run(replica, assign("a"))
        assert isinstance(listener.verdict, Admitted) and listener.verdict.replica == "r0"
        first, end = listener.events[0], listener.end
        assert isinstance(first, Started) and first.prompt_tokens == 4
        assert isinstance(end, Finished) and end.choices == ("length",)
        assert len(listener.tokens()) == 16 and end.usage.prompt_tokens == 4
        assert listener.deltas[-1].finish_reason == "length"
        assert replica.in_flight() == 0

    on_replica(test)


def test_together_is_as_alone(on_replica: Callable[[Test], None]) -> None:
    async def test(replica: Replica) -> None:
        prompts = [tuple(range(10 + i, 14 + 3 * i)) for i in range(8)]
        both = [GREEDY, SAMPLED]
        work = [
            (f"{i}-{j}", prompt, replace(sampling, seed=i))
            for i, prompt in enumerate(prompts)
            for j, sampling in enumerate(both)
        ]
        alone = [
            (await run(replica, assign("alone" + n, p, sampling=s))).tokens() for n, p, s in work
        ]
        together = await asyncio.gather(
            *(run(replica, assign("both" + n, p, sampling=s)) for n, p, s in work)
        )
        assert [listener.tokens() for listener in together] == alone
        assert len({tuple(tokens) for tokens in alone}) > 8

    on_replica(test)


def test_several_choices(on_replica: Callable[[Test], None]) -> None:
    async def test(replica: Replica) -> None:
        listener = await run(replica, assign("n", sampling=replace(SAMPLED, n=3)))
        assert isinstance(listener.end, Finished) and len(listener.end.choices) == 3
        texts = {tuple(listener.tokens(choice)) for choice in range(3)}
        assert len(texts) == 3 and all(len(tokens) == 16 for tokens in texts)

    on_replica(test)


def test_abort_ends_silently_and_frees_everything(on_replica: Callable[[Test], None]) -> None:
    async def test(replica: Replica) -> None:
        free = replica.lane_states()[LANE].free_tokens
        listener = await begin(replica, assign("long", max_tokens=900))
        await listener.until(lambda seen: len(seen.deltas) >= 3)
        await replica.abort("long")
        seen = len(listener.events)
        assert replica.in_flight() == 0
        # another request's end proves that the abort was dealt with
        await run(replica, assign("after"))
        assert len(listener.events) == seen
        state = replica.lane_states()[LANE]
        assert state.queued == 0 and state.free_tokens == free
        assert replica.stats()["running"] == 0
        await replica.abort("never heard of")

    on_replica(test)


def test_cancelling_submit_aborts(on_replica: Callable[[Test], None]) -> None:
    async def test(replica: Replica) -> None:
        listener = Listener()
        task = asyncio.ensure_future(replica.submit(assign("c", max_tokens=900), listener))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert replica.in_flight() == 0
        await run(replica, assign("after-c"))
        assert replica.stats()["running"] == 0

    on_replica(test)


def test_refusals_are_verdicts(on_replica: Callable[[Test], None]) -> None:
    async def test(replica: Replica) -> None:
        wrong = {
            "not_found": assign("w1", lane="nobody"),
            "invalid_request": assign("w2", prompt=(99_999,)),
            "context_length_exceeded": assign("w3", prompt=tuple([5] * 2000)),
        }
        for code, assignment in wrong.items():
            verdict = await replica.submit(assignment, Listener())
            assert isinstance(verdict, Rejected) and verdict.code == code
        await asyncio.gather(*(run(replica, assign(f"fine-{i}")) for i in range(2)))
        assert replica.in_flight() == 0

    on_replica(test)


def test_a_hundred_submits_and_aborts_leak_nothing(on_replica: Callable[[Test], None]) -> None:
    async def test(replica: Replica) -> None:
        await run(replica, assign("warm"))
        tasks, files = running_tasks(), len(os.listdir("/proc/self/fd"))
        free = replica.lane_states()[LANE].free_tokens
        for index in range(100):
            listener = await begin(replica, assign(f"l{index}", max_tokens=500))
            if index % 2:
                await listener.until(lambda seen: len(seen.events) > 1)
            await replica.abort(f"l{index}")
        await run(replica, assign("last"))
        assert running_tasks() == tasks
        assert len(os.listdir("/proc/self/fd")) <= files + 1
        assert replica.lane_states()[LANE].free_tokens == free
        assert replica.stats()["restarts"] == 0

    on_replica(test)


@pytest.mark.parametrize("transport", IN_PROCESS_FIRST)
def test_a_full_queue_is_refused_with_a_hint(transport: str) -> None:
    async def test() -> None:
        spec = tiny_spec(max_queue=2, max_sequences=1)
        async with running(transport, spec) as replica:
            listeners = [begin(replica, assign(f"q{i}", max_tokens=200)) for i in range(12)]
            done = await asyncio.gather(*listeners)
            refused = [item.verdict for item in done if isinstance(item.verdict, Rejected)]
            assert refused and all(r.code == "overloaded" for r in refused)
            assert all(r.retry_after_s is not None and r.retry_after_s > 0 for r in refused)
            taken = [item for item in done if isinstance(item.verdict, Admitted)]
            for listener in taken:
                assert isinstance(await listener.ended(), Finished)

    asyncio.run(test())


@pytest.mark.parametrize("transport", IN_PROCESS_FIRST)
def test_drain_lets_running_requests_end(transport: str) -> None:
    async def test() -> None:
        async with running(transport, tiny_spec()) as replica:
            listener = await begin(replica, assign("d", max_tokens=300))
            draining = asyncio.ensure_future(replica.drain(30))
            await asyncio.sleep(0)
            assert not replica.healthy()
            refused = await replica.submit(assign("new"), Listener())
            assert isinstance(refused, Rejected) and refused.code == "unavailable"
            await draining
            assert isinstance(listener.end, Finished) and len(listener.tokens()) == 300

    asyncio.run(test())


@pytest.mark.parametrize("transport", IN_PROCESS_FIRST)
def test_close_fails_what_still_runs(transport: str) -> None:
    async def test() -> None:
        async with running(transport, tiny_spec()) as replica:
            listener = await begin(replica, assign("d", max_tokens=900))
            await replica.drain(0.01)
        assert isinstance(listener.end, Failed) and listener.end.code == "unavailable"
        await replica.close()

    asyncio.run(test())


@pytest.mark.parametrize("transport", IN_PROCESS_FIRST)
def test_a_model_that_cannot_load_says_why(transport: str, tmp_path: os.PathLike[str]) -> None:
    async def test() -> None:
        replica = TRANSPORTS[transport](replace(tiny_spec(), model=str(tmp_path)))
        with pytest.raises(WeightsError, match=r"config\.json|safetensors"):
            await replica.start()
        await replica.close()
        starved = TRANSPORTS[transport](replace(tiny_spec(), kv_bytes=100))
        with pytest.raises(CoterieError, match="blocks"):
            await starved.start()
        await starved.close()

    asyncio.run(test())
