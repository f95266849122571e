"""core/spawn.py: programs are started without fork(), with streams, a status and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from coterie.core.spawn import DEVNULL, PIPE, AsyncProcess, environment, spawn, start
from tests.helpers.serving.fork_probe import forks, watch

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop", "no pidfd"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    if request.param == "no pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(work, 60))

    return run


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def finish(process: AsyncProcess) -> int:
    process.kill()
    process.close()
    return await process.wait()


def test_what_goes_in_comes_out_and_the_status_is_told(run: Run) -> None:
    code = "import sys; sys.stdout.write(sys.stdin.read()[::-1]); sys.exit(3)"

    async def test() -> None:
        process = await start(python(code), environment(), stdin=PIPE, stdout=PIPE)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"ab" * 100_000)
        await process.stdin.drain()
        process.stdin.close()
        assert await process.stdout.read() == b"ba" * 100_000
        assert await process.wait() == 3 == process.returncode == await process.wait()
        process.close()

    run(test())


def test_a_killed_program_says_by_what_and_only_its_own_group_goes(run: Run) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getsid(0), flush=True)\n"
        "time.sleep(600)\n"
    )

    async def test() -> None:
        process = await start(python(code), environment(), stdout=PIPE)
        assert process.stdout is not None
        assert int(await process.stdout.readline()) == process.pid
        process.kill(group=True)
        assert await process.wait() == -signal.SIGKILL
        # the one it started held the pipe too
        assert await process.stdout.read() == b""
        process.kill()
        process.close()

    run(test())


def test_a_program_that_reads_sees_its_input_end(run: Run) -> None:
    async def test() -> None:
        process = await start(python("import sys; sys.stdin.read()"), environment(), stdin=PIPE)
        process.close()
        assert await process.wait() == 0

    run(test())


def test_nothing_but_the_standard_streams_is_inherited(run: Run, tmp_path: Path) -> None:
    code = (
        "import os; names = {f: os.readlink(f'/proc/self/fd/{f}') for f in range(3)}\n"
        "left = [f for f in range(3, 100) if os.path.exists(f'/proc/self/fd/{f}')]\n"
        "print(names[2], left, os.environ.get('SECRET'))"
    )

    async def test() -> None:
        with (tmp_path / "file").open("wb") as file:
            os.set_inheritable(file.fileno(), True)
            process = await start(python(code), {}, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        assert process.stdout is not None
        assert await process.stdout.read() == b"/dev/null [] None\n"
        await finish(process)

    os.environ["SECRET"] = "of the server"
    try:
        run(test())
    finally:
        del os.environ["SECRET"]


def test_a_program_that_is_not_there_is_an_error_and_leaves_nothing_open(run: Run) -> None:
    async def test() -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(FileNotFoundError):
            await start(["/no/such/program"], {}, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        assert len(os.listdir("/proc/self/fd")) == before

    run(test())


def test_a_start_that_is_cancelled_anywhere_leaves_nothing_open(run: Run) -> None:
    async def begin() -> AsyncProcess:
        return await start(["/bin/cat"], environment(), stdin=PIPE, stdout=PIPE, stderr=PIPE)

    async def cancelled_after(steps: int) -> bool:
        task = asyncio.ensure_future(begin())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await finish(task.result())
        # whoever is told that it was cancelled need not look after it
        assert "cat" not in [child.name() for child in psutil.Process().children()]
        return task.cancelled()

    async def test() -> None:
        # the first takes descriptors that the loop keeps
        await finish(await begin())
        before = len(os.listdir("/proc/self/fd"))
        steps = 0
        while await cancelled_after(steps) or steps < 3:
            steps += 1
            give_up_at = asyncio.get_running_loop().time() + 30
            # the loop closes pipes in a later step
            while len(os.listdir("/proc/self/fd")) != before:
                assert asyncio.get_running_loop().time() < give_up_at, steps
                await asyncio.sleep(0.01)
        assert steps >= 3

    run(test())


def test_a_thread_may_wait_and_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    child = spawn(python("print(input() * 2)"), environment(), stdin=PIPE, stdout=PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"ab\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"abab\n"
    assert child.wait() == 0 == child.poll()
    child.kill()
    child.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_server_without_standard_streams_can_start_programs() -> None:
    code = (
        "import os\n"
        "from coterie.core.spawn import PIPE, environment, spawn\n"
        "import sys\n"
        "os.closerange(0, 3)\n"
        "child = spawn([sys.executable, '-c', 'print(input())'], environment(), stdin=PIPE,"
        " stdout=PIPE, stderr=PIPE)\n"
        "child.stdin.write(b'ab\\n')\n"
        "child.stdin.close()\n"
        "sys.exit(0 if child.stdout.read() == b'ab\\n' and child.wait() == 0 else 1)\n"
    )
    assert subprocess.run(python(code), env=environment(), timeout=60, check=False).returncode == 0


STARTED = """
import asyncio, os, sys
from coterie.core.spawn import environment, start

async def main():
    how = sys.argv[1]
    command = [sys.executable, "-S", "-c", ""]
    if how == "ours":
        await (await start(command, environment())).wait()
    else:
        await (await asyncio.create_subprocess_exec(*command, start_new_session=True)).wait()

if sys.argv[1] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
print(os.getpid())
"""


@pytest.mark.parametrize(("how", "forked"), [("ours", 0), ("uvloop", 1)])
def test_no_fork_handler_runs(how: str, forked: int, tmp_path: Path) -> None:
    """The second line shows that the probe sees what it is there for."""
    done = subprocess.run(
        [*python(STARTED), how], env={**os.environ, **watch(tmp_path)}, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    assert forks(tmp_path, int(done.stdout)) == forked
