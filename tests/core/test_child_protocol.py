"""core/child_protocol.py: every question has one end, whatever becomes of the process asked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from coterie.core.child_protocol import (
    ChildDied,
    ChildNotStarted,
    ChildPool,
    ChildProgram,
    bare_environment,
)
from coterie.core.errors import Unavailable

HERE = Path(__file__).resolve().parent
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(work, 120))
        assert not children()

    return run


def children() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if "judge_child" in " ".join(child.cmdline())
    ]


def pool(start_s: float = 60.0, max_children: int = 1) -> ChildPool[str]:
    env = bare_environment()
    env["PYTHONPATH"] += f"{os.pathsep}{HERE.parents[1]}"
    return ChildPool(
        ChildProgram("tests.helpers.serving.judge_child", env, start_s, max_children), str.encode
    )


async def ask(asked: ChildPool[str], question: str, setup: str = "a", **limits: Any) -> list[str]:
    answer = await asked.ask(question.encode(), setup, **({"answer_s": 60.0} | limits))
    return answer.decode().split(" ", 2)


def test_one_process_answers_one_after_the_other_until_its_setup_changes(run: Run) -> None:
    async def test() -> None:
        asked = pool()
        answers = await asyncio.gather(*(ask(asked, f"q{i}") for i in range(20)))
        assert [answer[2] for answer in answers] == [f"q{i}" for i in range(20)]
        assert len({answer[0] for answer in answers}) == 1
        # a frame longer than a pipe holds, and what a library prints
        assert (await ask(asked, "x" * 3_000_000))[2] == "x" * 60
        assert (await ask(asked, "print"))[2] == "print"
        other = await ask(asked, "q", "b")
        assert other[1:] == ["b", "q"] and other[0] != answers[0][0]
        assert len(children()) == 1
        await asked.close()

    run(test())


def test_no_more_processes_than_allowed_and_no_more_than_needed(run: Run) -> None:
    async def test() -> None:
        asked = pool(max_children=2)
        for _ in range(3):
            await ask(asked, "q")
        assert len(children()) == 1
        answers = await asyncio.gather(*(ask(asked, "wait 0.2") for _ in range(6)))
        assert len({answer[0] for answer in answers}) == 2 == len(children())
        assert asked.num_waiting == 0
        await asked.close()

    run(test())


@pytest.mark.parametrize("question", ["die", "spin", "eat"])
def test_a_question_that_kills_is_told_and_the_next_one_is_answered(
    run: Run, question: str
) -> None:
    """By its own hand, past its CPU time, past its memory."""

    async def test() -> None:
        asked = pool()
        first = await ask(asked, "q")
        with pytest.raises(ChildDied):
            await ask(asked, question)
        after = await ask(asked, "q")
        assert after[0] != first[0]
        await asked.close()

    run(test())


def test_deaths_are_counted_by_question(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        asked = pool()
        with pytest.raises(ChildDied):
            await ask(asked, f"die once {tmp_path / 'one'}")
        await ask(asked, f"die once {tmp_path / 'two'}", attempts=2)
        with pytest.raises(ChildDied):
            await ask(asked, "die", attempts=2)
        # one that died before it was asked is nobody's
        await ask(asked, "q")
        (free,) = children()
        free.kill()
        while not asked._free[0].process.returncode:
            await asyncio.sleep(0.01)
        assert (await ask(asked, "q"))[2] == "q"
        await asked.close()

    run(test())


def test_a_question_that_takes_too_long_costs_its_process(run: Run) -> None:
    async def test() -> None:
        asked = pool()
        first = await ask(asked, "q")
        with pytest.raises(TimeoutError):
            await ask(asked, "sleep", answer_s=0.2, attempts=2)
        assert not children()
        assert (await ask(asked, "q"))[0] != first[0]
        await asked.close()

    run(test())


def test_whoever_leaves_costs_no_process_and_mixes_up_no_answers(run: Run) -> None:
    async def test() -> None:
        asked = pool()
        first = await ask(asked, "q")
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(asked, "wait 0.3"), 0.05)
        assert await ask(asked, "after") == [first[0], "a", "after"]
        await asked.close()

    run(test())


@pytest.mark.parametrize(
    ("setup", "told"), [("broken", "ended before"), ("never ready", "not ready")]
)
def test_a_program_that_does_not_start_is_told(run: Run, setup: str, told: str) -> None:
    async def test() -> None:
        asked = pool(start_s=60.0 if setup == "broken" else 0.5)
        with pytest.raises(ChildNotStarted, match=told):
            await ask(asked, "q", setup)
        assert not children()
        await asked.close()

    run(test())


def test_closing_refuses_all_at_once(run: Run) -> None:
    async def test() -> None:
        asked = pool()
        await ask(asked, "q")
        waiting = [asyncio.ensure_future(ask(asked, "sleep", attempts=2)) for _ in range(3)]
        while not asked._answering:
            await asyncio.sleep(0)
        await asked.close()
        for found in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(found, Unavailable)
        with pytest.raises(Unavailable):
            await ask(asked, "q")
        await asked.close()

    run(test())


def test_a_process_ends_with_the_server_in_the_middle_of_a_question() -> None:
    code = (
        "import asyncio, os\n"
        "from test_child_protocol import children, pool\n"
        "async def main():\n"
        "    asked = pool()\n"
        "    await asked.ask(b'q', 'a', answer_s=60)\n"
        "    print(children()[0].pid, flush=True)\n"
        "    await asked.ask(b'sleep', 'a', answer_s=None)\n"
        "asyncio.run(main())\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert server.stdout is not None
    child = psutil.Process(int(server.stdout.readline()))
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.stdout.close()
    give_up = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up, "it outlives the server"
        time.sleep(0.01)
