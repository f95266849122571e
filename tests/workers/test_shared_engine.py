"""Many threads on one `LLM`: each is served in turn, and every answer is the one it gets alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from coterie import LLM
from coterie.core.errors import CoterieError
from coterie.core.events import Event
from coterie.core.plan import Rejected
from coterie.workers.shared_engine import SharedEngine
from tests.helpers.models.tiny import tiny_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
# longer than threads take to wake up, on a busy machine too
STEP_S = 0.004


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint("llama")), dtype="fp32", threads=1, kv_bytes=8_000_000) as llm:
        yield llm


def together(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1), ... in threads that start together."""
    barrier = threading.Barrier(count)
    problems: list[BaseException] = []

    def run(index: int) -> None:
        barrier.wait()
        try:
            work(index)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not problems, problems


@pytest.mark.parametrize("count", [8, 64])
def test_no_thread_starves(llm: LLM, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads that send one request after the other, half through `stream` and half through
    `generate`, the worst first token comes a few steps after the others'."""
    prompts = [[0, 50 + index, 60 + turn] for index in range(count) for turn in range(3)]
    alone = [answer.token_ids for answer in llm.generate(prompts, **GREEDY)]
    step, steps, widths = llm._engine.step, [0], []

    def slow() -> list[Event]:
        time.sleep(STEP_S)
        steps[0] += 1
        widths.append(len(llm._shared.inboxes))
        return step()

    monkeypatch.setattr(llm._engine, "step", slow)
    first: list[int] = []
    found: dict[tuple[int, int], list[int]] = {}

    def work(index: int) -> None:
        for turn in range(3):
            sent, prompt = steps[0], prompts[3 * index + turn]
            if index % 2:
                found[index, turn] = llm.generate(prompt, **GREEDY)[0].token_ids
                # all of its tokens
                first.append(steps[0] - sent - GREEDY["max_tokens"])
                continue
            tokens: list[int] = []
            for delta in llm.stream(prompt, **GREEDY):
                if not tokens:
                    first.append(steps[0] - sent)
                tokens += delta.token_ids
            found[index, turn] = tokens

    together(count, work)
    assert [found[divmod(at, 3)] for at in range(len(prompts))] == alone
    assert max(first) <= 3 * max(2, median(first)) + 4, sorted(first)
    # they run together: three rounds of 8 tokens, and what threads take to come back
    assert steps[0] <= 3 * (GREEDY["max_tokens"] + 8), steps
    assert median(widths) > count / 2
    assert not llm._shared.inboxes


def test_threads_wait_for_a_full_queue(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = llm._engine._lanes[0].scheduler  # type: ignore[attr-defined]
    alone = [
        answer.token_ids for answer in llm.generate([[0, 50 + i] for i in range(24)], **GREEDY)
    ]
    found: dict[int, list[int]] = {}
    # two wait and two run
    monkeypatch.setattr(scheduler, "is_full", lambda _: len(scheduler.waiting) >= 2)

    def work(index: int) -> None:
        found[index] = llm.generate([0, 50 + index], **GREEDY)[0].token_ids

    together(24, work)
    assert [found[index] for index in range(24)] == alone


def test_prompts_of_one_call_join_the_same_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a running stream too; and where one of them is refused none is left behind."""
    step, steps = llm._engine.step, [0]

    def slow() -> list[Event]:
        time.sleep(STEP_S)
        steps[0] += 1
        return step()

    monkeypatch.setattr(llm._engine, "step", slow)
    took: list[int] = []

    def work(index: int) -> None:
        if index == 0:
            assert len(list(llm.stream([0, 50], max_tokens=100, ignore_eos=True))) == 100
            return
        before = steps[0]
        assert len(llm.generate([[0, 60 + at] for at in range(24)], **GREEDY)) == 24
        took.append(steps[0] - before)

    together(2, work)
    assert took[0] <= GREEDY["max_tokens"] + 8
    add = llm._engine.add
    monkeypatch.setattr(
        llm._engine,
        "add",
        lambda one: Rejected("invalid", "no", None) if one.prompt_ids[1] == 62 else add(one),
    )
    with pytest.raises(CoterieError, match="no"):
        llm.generate([[0, 60 + at] for at in range(5)], **GREEDY)
    assert not llm._shared.inboxes and not llm._shared._entering
    llm._shared._run_until(lambda: not llm._engine.has_work())
    assert llm._engine.stats()["running"] == 0


def test_streams_that_are_closed_or_dropped_while_others_run(llm: LLM) -> None:
    alone = llm.generate([0, 50], **GREEDY)[0].token_ids
    free = llm._engine.lane_states()[0].free_tokens
    found: list[list[int]] = []

    def work(index: int) -> None:
        if index % 3 == 0:
            found.append(llm.generate([0, 50], **GREEDY)[0].token_ids)
            return
        stream = llm.stream([0, 50], max_tokens=400, ignore_eos=True)
        next(stream)
        if index % 3 == 1:
            stream.close()
        # else the collector closes it

    together(12, work)
    assert found == [alone] * 4
    assert not llm._shared.inboxes
    # an abort may come with the next step
    assert llm._shared.call(lambda: llm._engine.lane_states()[0].free_tokens) == free


def test_an_error_in_a_step_ends_the_calls_that_wait_for_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = llm.generate([0, 50], **GREEDY)[0].token_ids
    step, failures = llm._engine.step, [RuntimeError("broken")]

    def failing() -> list[Event]:
        time.sleep(STEP_S)
        if failures and len(llm._shared.inboxes) > 1:
            raise failures.pop()
        return step()

    monkeypatch.setattr(llm._engine, "step", failing)
    ended: list[object] = []

    def work(index: int) -> None:
        try:
            ended.append(llm.generate([0, 50], **GREEDY)[0].token_ids)
        except RuntimeError as problem:
            ended.append(str(problem))

    together(8, work)
    assert (
        ended.count("broken") >= 1
        and all(end in (alone, "broken") for end in ended)
        and len(ended) == 8
    )
    assert not llm._shared.inboxes
    with pytest.raises(ZeroDivisionError):
        llm._shared.call(lambda: 1 // 0)
    assert llm.generate([0, 50], **GREEDY)[0].token_ids == alone


def test_one_thread_runs_all_steps_and_ends_with_its_model(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has no more work keeps nothing alive."""
    step, ran = llm._engine.step, []

    def noted() -> list[Event]:
        ran.append(threading.current_thread())
        return step()

    monkeypatch.setattr(llm._engine, "step", noted)

    def work(index: int) -> None:
        assert list(llm.stream([0, 50 + index], **GREEDY))

    together(4, work)
    assert len(set(ran)) == 1
    shared: SharedEngine | None = SharedEngine(llm._engine)
    known = weakref.ref(shared)
    thread = next(one for one in reversed(threading.enumerate()) if one.name == "engine")
    assert shared is not None and shared.call(lambda: 5) == 5
    del shared
    gc.collect()
    thread.join(20)
    assert known() is None and not thread.is_alive()


def test_a_request_that_the_engine_lost_ends_with_an_error(llm: LLM) -> None:
    """Instead of waiting for ever; the next one is answered."""
    shared, ended = llm._shared, threading.Event()

    def forget() -> None:
        for request_id in list(shared.inboxes):
            shared.engine._tracker.abort(request_id, [])

    def lose() -> None:
        """Without an event, as after a fault inside; again until the request was there."""
        while not ended.is_set():
            shared.call(forget)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        with pytest.raises(CoterieError, match="lost this request"):
            llm.generate([0, 50, 60], **(GREEDY | {"max_tokens": 100}))
    finally:
        ended.set()
        thread.join(60)
    assert len(llm.generate([0, 50, 60], **GREEDY)[0].token_ids) == GREEDY["max_tokens"]
