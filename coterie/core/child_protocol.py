"""Questions to a child process that may hang or crash: a caller's grammar, a generated answer.

    children = ChildPool(ChildProgram(module, env, start_s=30.0))      # in the server
    answer = await children.ask(question, None, answer_s=2.0)
    await children.close()

    serve(prepare, memory_bytes=1 << 30)                               # the program's main()

A frame is a length of four bytes and that many bytes. The program reads frames on its standard
input and answers each on its standard output. The first frame sets the program up (it may be
empty) and is answered with an empty frame once the program is ready.

A process takes one question at a time. A process that died or took too long is replaced when the
next question comes. Each user of this module defines its questions and their limits.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Generic, TypeVar

from coterie.core.errors import Unavailable
from coterie.core.spawn import DEVNULL, PIPE, AsyncProcess, Stream, environment, start

LENGTH = struct.Struct("<I")
# times that one question is asked again because something outside killed the process
MAX_KILLED = 4
# how long the end of a process may take to be known, once its output has ended
REAP_S = 1.0
# in the process: takes a question, returns its answer
Answer = Callable[[bytes], bytes]
# processes with an equal setup are interchangeable
Setup = TypeVar("Setup")


class ChildNotStarted(Exception):
    """No process became ready for questions."""


class ChildDied(Exception):
    """The process ended during a question, as often as there were attempts."""


class _ChildKilled(Exception):
    """Something outside killed the process, as the system does when memory is short. That says
    nothing about the question."""


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """`python -m module`, with this environment and nothing else from the server."""

    module: str
    env: Mapping[str, str]
    # time until it must be ready
    start_s: float
    max_children: int = 1
    # None = the server's own stderr
    stderr: Stream = DEVNULL


def bare_environment(**more: str) -> dict[str, str]:
    """The variables that are needed to find our modules, and no secrets."""
    inherited = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
    return environment({**inherited, **more})


class ChildPool(Generic[Setup]):
    """Starts no process before the first question. For one event loop."""

    def __init__(
        self,
        program: ChildProgram,
        greet: Callable[[Setup], bytes] | None = None,
        on_killed: Callable[[], None] | None = None,
    ) -> None:
        """`greet` makes the first frame for a setup, on a thread. `on_killed` is called when a
        process was killed from outside and its question is asked again."""
        self._program, self._greet, self._on_killed = program, greet, on_killed
        self._permits = asyncio.Semaphore(program.max_children)
        # all that run, and those that are idle, longest idle first
        self._children: set[_Child[Setup]] = set()
        self._free: list[_Child[Setup]] = []
        self._answering: set[asyncio.Task[bytes]] = set()
        self._closed = False
        # questions without an answer so far
        self.num_waiting = 0

    async def ask(
        self, question: bytes, setup: Setup, *, answer_s: float | None, attempts: int = 1
    ) -> bytes:
        """Raises TimeoutError, ChildDied, ChildNotStarted, or Unavailable once the pool is closed.

        A process may die for a reason that is not the question: with two `attempts` the question is
        sent again. If the caller is cancelled, the process finishes its answer and is then used
        again.
        """
        self.num_waiting += 1
        try:
            await self._permits.acquire()
            work = asyncio.ensure_future(self._answered(question, setup, answer_s, attempts))
            self._answering.add(work)
            work.add_done_callback(self._leave)
            return await asyncio.shield(work)
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        """Closes at once: callers that still wait get an error."""
        self._closed = True
        for child in self._children:
            child.process.kill()
        await asyncio.gather(*self._answering, return_exceptions=True)
        while self._free:
            await self._end(self._free.pop())

    def _leave(self, work: asyncio.Task[bytes]) -> None:
        self._answering.discard(work)
        self._permits.release()

    async def _answered(
        self, question: bytes, setup: Setup, answer_s: float | None, attempts: int
    ) -> bytes:
        num_killed = 0
        while attempts:
            try:
                return await self._asked_once(question, setup, answer_s)
            except _ChildKilled as error:
                if num_killed == MAX_KILLED:
                    raise ChildNotStarted(f"{self._program.module} is killed each time") from error
                num_killed += 1
                if self._on_killed is not None:
                    self._on_killed()
            except TimeoutError:
                # an OSError too
                raise
            except (asyncio.IncompleteReadError, OSError):
                attempts -= 1
        raise ChildDied(f"{self._program.module} ended")

    async def _asked_once(self, question: bytes, setup: Setup, answer_s: float | None) -> bytes:
        child = await self._take(setup)
        try:
            async with asyncio.timeout(answer_s):
                answer = await child.exchange(question)
        except TimeoutError:
            await self._end(child)
            raise
        except (asyncio.IncompleteReadError, OSError):
            await self._ended(child)
            raise
        except BaseException:
            await self._end(child)
            raise
        self._free.append(child)
        return answer

    async def _ended(self, child: _Child[Setup]) -> None:
        """Of a process that ended by itself. Raises _ChildKilled if something outside ended it."""
        code: int | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                code = await child.process.wait()
        await self._end(child)
        self._refuse_closed()
        if code == -signal.SIGKILL:
            raise _ChildKilled

    async def _take(self, setup: Setup) -> _Child[Setup]:
        """An idle process with this setup, or a new one."""
        self._refuse_closed()
        for child in self._free[::-1]:
            if child.process.returncode is not None:
                self._free.remove(child)
                await self._end(child)
            elif child.setup == setup:
                self._free.remove(child)
                return child
        if self._free and len(self._children) >= self._program.max_children:
            await self._end(self._free.pop(0))
        return await self._start(setup)

    async def _start(self, setup: Setup) -> _Child[Setup]:
        program = self._program
        first = b"" if self._greet is None else await asyncio.to_thread(self._greet, setup)
        self._refuse_closed()
        command = [sys.executable, "-m", program.module]
        try:
            process = await start(
                command, program.env, stdin=PIPE, stdout=PIPE, stderr=program.stderr
            )
        except OSError as error:
            raise ChildNotStarted(f"{program.module}: {error}") from error
        child = _Child(process, setup)
        self._children.add(child)
        try:
            self._refuse_closed()
            async with asyncio.timeout(program.start_s):
                await child.exchange(first)
        except TimeoutError as error:
            await self._end(child)
            raise ChildNotStarted(
                f"{program.module} is not ready after {program.start_s:g} s"
            ) from error
        except (asyncio.IncompleteReadError, OSError) as error:
            await self._ended(child)
            raise ChildNotStarted(f"{program.module} ended before it was ready") from error
        except BaseException:
            await self._end(child)
            raise
        return child

    async def _end(self, child: _Child[Setup]) -> None:
        child.process.kill()
        self._children.discard(child)
        child.process.close()
        await child.process.wait()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Unavailable("the server is shutting down")


class _Child(Generic[Setup]):
    def __init__(self, process: AsyncProcess, setup: Setup) -> None:
        self.process, self.setup = process, setup

    async def exchange(self, question: bytes) -> bytes:
        writer, reader = self.process.stdin, self.process.stdout
        assert writer is not None and reader is not None
        writer.write(LENGTH.pack(len(question)) + question)
        await writer.drain()
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(size)


def serve(prepare: Callable[[bytes], Answer], *, memory_bytes: int = 0, cpu_s: float = 0.0) -> None:
    """The program's side: `prepare` takes the first frame and returns a function for the others.

    The system ends the process when it uses more than `memory_bytes`, or `cpu_s` for one answer (0
    = no limit). It also ends when its input is closed, even during an answer.
    """
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # output that a library prints must not be read as an answer
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    first = _receive(questions)
    if first is None:
        return
    answer = prepare(first)
    _send(answers, b"")
    while (question := _receive(questions)) is not None:
        # Python could not run a handler during the call: the signal's default action ends the
        # process
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reply = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _send(answers, reply)


def _end_with_parent() -> None:
    """Once the server is gone, the standard input has no writer."""
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.poll()
    os._exit(1)


def _receive(stream: BinaryIO) -> bytes | None:
    """None at the end of the input."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _send(stream: BinaryIO, data: bytes) -> None:
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()
